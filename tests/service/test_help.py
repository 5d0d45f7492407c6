from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.service.waiting import COMMAND_S
from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.cli.specs import Run, Submit
from triaccel_ray.service.runs.methods import METHODS

COMMANDS = ("run", "search", "compare", "report", "replay", "resume", "ui", "doctor", "submit", "jobs", "logs", "stop")
WITH_MANY = ("run", "search", "compare", "replay")
SEARCHED = {"--tau-low", "--tau-high", "--rho-low", "--rho-high"}
MEASURED = {"--t-ctrl", "--t-curv", "--b-curv", "--curvature"}


def help_of(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, option: str = "--help-all"
) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        parse([command, option])
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^\W*(--[a-z][a-z-]*)", text, flags=re.MULTILINE)) - {"--help-all"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_help_all_has_the_rest(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = help_of(command, capsys, monkeypatch, option="--help")
    brief, every = options_in(short), options_in(help_of(command, capsys, monkeypatch))
    assert len(brief) <= 10
    assert brief <= every
    assert (brief < every) == ("--help-all shows all options" in short) == (command in WITH_MANY)
    if command in WITH_MANY:
        assert {"--storage-path"} < brief
        assert not {"--tracking-uri", "--noise-bound"} & brief


def test_help_is_shown_beside_other_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["run", "digits", "--noise-bound", "on", "--help"])
    assert ended.value.code == 0
    assert "--memory-budget" in capsys.readouterr().out


def test_the_words_of_a_job_ask_for_no_help_of_submit() -> None:
    command = parse(["submit", "--", "run", "digits", "--help"])
    assert isinstance(command, Submit)
    assert command.words == ("run", "digits", "--help")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"triaccel {version('triaccel-ray')}\n"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("search --help-all", 0),
        ("sing", 2),
        ("run digits --colour red", 2),
        ("run nothing", 2),
        ("run digits --epochs 0", 2),
        ("run digits --memory-budget 2", 2),
        ("compare digits.py:Digits", 2),
    ],
)
def test_help_and_mistakes_do_not_wait_for_pytorch(words: str, status: int) -> None:
    heavy = "{'torch', 'numpy', 'ray', 'mlflow', 'rich.live'}"
    code = f"""
import sys
from triaccel_ray.service.cli.main import main
try:
    main({words.split()})
except SystemExit as ended:
    sys.exit(f'imported: {{loaded}}' if (loaded := {heavy} & sys.modules.keys()) else ended.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "imported" not in done.stderr
    assert done.returncode == status


@pytest.mark.parametrize("command", COMMANDS)
def test_what_need_not_be_given_is_no_value_that_can_be(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not re.search(r"\{None|None\||,None", help_of(command, capsys, monkeypatch))


@pytest.mark.parametrize(
    ("command", "offered", "not_offered"),
    [
        ("run", SEARCHED | MEASURED, set()),
        ("search", MEASURED, SEARCHED),
        ("compare", SEARCHED | MEASURED, set()),
        ("replay", SEARCHED, MEASURED),
    ],
)
def test_a_command_offers_the_thresholds_that_it_reads(
    command: str,
    offered: set[str],
    not_offered: set[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options_in(help_of(command, capsys, monkeypatch))
    assert {"--precision", "--tau-curv", "--alpha", "--step-up", "--noise-bound"} <= options
    assert offered <= options
    assert not options & not_offered
    for option in not_offered:
        with pytest.raises(SystemExit) as ended:
            parse([command, "digits", option, "1"])
        assert ended.value.code == 2
        assert "Unrecognized" in capsys.readouterr().err


def test_every_method_is_explained_where_it_can_be_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = re.sub(r"[\s│]+", " ", help_of("run", capsys, monkeypatch)).replace("- ", "-")  # as it was not wrapped
    for method in METHODS.keys() - {"probe"}:
        assert f"{method}: {METHODS[method]}" in text
        assert isinstance(command := parse(["run", "digits", "--method", method]), Run)
        assert command.main.method == method
    with pytest.raises(SystemExit):
        parse(["run", "digits", "--method", "probe"])


def test_help_that_nobody_reads_to_its_end_says_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        words = [sys.executable, "-m", "triaccel_ray.service", "search", "--help"]
        done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, timeout=COMMAND_S)
    assert (done.returncode, done.stderr) == (1, "")
