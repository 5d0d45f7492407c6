"""What README.md and docs/ tell a user to type can be typed: examples run, and every command is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaccel_ray.service.cli.arguments import Submit
from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.cli.reference import page

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").rglob("*.md")))
STANDS_FOR_MANY = "COMMAND"


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
            command = parse(tried)
        except SystemExit as ended:
            if ended.code == 0:  # help
                return True
        else:
            return is_understood(list(command.words)) if isinstance(command, Submit) and command.words else True
    return False


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "ControlLoop(model" in example
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    epochs = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in epochs[:3]] == ["1", "2", "3"]


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, section in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if section:
            titles = re.findall(r"^#+ (.*)", linked.read_text(), flags=re.MULTILINE)
            assert section in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], section


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_told_can_be_typed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command.removesuffix(" ...").replace(STANDS_FOR_MANY, "run"))
    assert is_understood(words), capsys.readouterr().err


def test_a_command_that_is_none_is_noticed() -> None:
    assert not is_understood(["run", "digits", "--color", "red"])
    assert not is_understood(["submit", "--", "run", "digits", "--color", "red"])
    with pytest.raises(ValueError, match="no such command"):
        is_understood(["sing"])


def test_the_page_of_options_is_what_the_fields_say() -> None:
    assert Path("docs/cli.md").read_text() == page(), "python -m triaccel_ray.service.cli.reference > docs/cli.md"
