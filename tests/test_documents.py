"""What README.md and docs/ tell a user to type can be typed: examples run, and every command is one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaccel_ray.service import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
STANDS_FOR_MANY = "COMMAND"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def commands_in(text: str) -> Iterator[str]:
    """Yields what stands after `triaccel` in every code span, and in every line of an indented or fenced block."""
    spans = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (" ".join(found.split()) for found in re.findall(r"`triaccel ([^`]+)`", spans))
    lines = text.replace("\\\n", " ").splitlines()
    yield from (line.split("#")[0].strip()[9:] for line in lines if line.strip().startswith("triaccel "))


COMMANDS = [
    pytest.param(command, id=f"{path.name}: {command}")
    for path in DOCUMENTS
    for command in dict.fromkeys(commands_in(path.read_text()))
]


def is_understood(words: list[str]) -> bool:
    """Whether the command line takes these words, or would with a task or name, which a text may leave out."""
    for tried in (words, [words[0], "digits", *words[1:]]):
        try:
            command = cli.parse(tried)
        except SystemExit as ended:
            if ended.code == 0:  # help
                return True
        else:
            return is_understood(list(command.words)) if isinstance(command, cli.Submit) and command.words else True
    return False


def test_the_examples_run_as_they_stand(tmp_path: Path) -> None:
    first, settings, *_ = python_blocks()
    assert "ControlLoop(model" in first
    assert "load_checkpoint" in settings
    done = subprocess.run(
        [sys.executable, "-c", f"{first}\n{settings}"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    epochs = done.stdout.splitlines()
    assert [line.split()[0] for line in epochs[:3]] == ["1", "2", "3"]
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "checkpoint.pt"}


def test_the_tasks_example_says_what_a_task_is() -> None:
    (task,) = [block for block in python_blocks() if "class MyTask" in block]
    names = ("build_my_model", "x_train", "y_train", "x_val", "y_val", "x_all", "y_all", "x_test", "y_test")
    space: dict[str, object] = dict.fromkeys(names)
    exec(compile(task, "README.md", "exec"), space)
    assert isinstance(space["MyTask"], type)
    assert space["MyTask"]().name == "mine"  # abstract methods left out would raise


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_told_can_be_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.removesuffix(" ...").replace(STANDS_FOR_MANY, "run"))
    assert is_understood(words), capsys.readouterr().err


def test_a_command_that_is_none_is_noticed() -> None:
    assert not is_understood(["run", "digits", "--colour", "red"])
    assert not is_understood(["sing"])
    assert not is_understood(["submit", "--", "run", "digits", "--colour", "red"])
