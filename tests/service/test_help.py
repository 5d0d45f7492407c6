import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.service.waiting import COMMAND_S
from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.runs.spec import METHODS

TRAIN = ("run", "search", "compare", "tune-batch")
COMMANDS = (*TRAIN, "report", "replay", "resume", "ui", "doctor", "submit", "jobs", "logs", "stop")
WITH_MANY = (*TRAIN, "replay")
SEARCHED = {"--tau-low", "--tau-high", "--rho-low", "--rho-high"}
MEASURED = {"--t-ctrl", "--t-curv", "--b-curv", "--curvature"}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What is shown in place of carrying out the command."""
    with pytest.raises(SystemExit) as ended:
        parse(words.split())
    assert ended.value.code == 0
    return capsys.readouterr().out


def options_in(text: str) -> set[str]:
    return set(re.findall(r"^\W*(--[a-z][a-z-]*)", text, flags=re.MULTILINE)) - {"--help-all"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_short_and_help_all_has_the_rest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    short, whole = (shown(f"{command} {option}", capsys) for option in ("--help", "--help-all"))
    brief, every = options_in(short), options_in(whole)
    assert not re.search(r"\{None|None\||,None", whole)  # what need not be given is no value that can be
    assert len(brief) <= 10
    assert brief <= every
    assert (brief < every) == ("--help-all shows all options" in short) == (command in WITH_MANY)
    if command in WITH_MANY:
        assert {"--storage-path"} < brief
        assert not {"--tracking-uri", "--noise-bound"} & brief


def test_help_and_version_are_shown_beside_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--memory-budget" in shown("run digits --noise-bound on --help", capsys)
    assert f"triaccel {version('triaccel-ray')}\n" in shown("--version", capsys)
    job = ("run", "digits", "--help")  # asks for no help of submit
    assert parse(["submit", "--", *job]).words == job


@pytest.mark.parametrize(
    ("words", "status"), [("search --help-all", 0), ("run nothing", 2), ("run digits --epochs 0", 2)]
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


def test_a_command_offers_the_thresholds_that_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    for command, missing in {"run": set(), "search": SEARCHED, "compare": set(), "replay": MEASURED}.items():
        options = options_in(shown(f"{command} --help-all", capsys))
        assert {"--precision", "--tau-curv", "--alpha", "--step-up", "--noise-bound"} <= options
        assert options & (SEARCHED | MEASURED) == (SEARCHED | MEASURED) - missing


def test_every_method_is_explained_where_it_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"[\s│]+", " ", shown("run --help-all", capsys)).replace("- ", "-")  # as it was not wrapped
    methods = METHODS.keys() - {"probe", "tune-batch"}
    assert all(f"{method}: {METHODS[method]}" in text for method in methods)


def test_help_that_nobody_reads_to_its_end_says_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        words = [sys.executable, "-m", "triaccel_ray.service", "search", "--help"]
        done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, text=True, timeout=COMMAND_S)
    assert (done.returncode, done.stderr) == (1, "")
