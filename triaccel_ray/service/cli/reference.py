"""Generates `docs/cli.md`, the table of all settings: `python -m triaccel_ray.service.cli.reference` prints it."""

from __future__ import annotations

import sys
from dataclasses import MISSING

from triaccel_ray.service.cli.options import (
    CompareOptions,
    RunOptions,
    SearchOptions,
    ThresholdOptions,
    TrainingOptions,
    TuneBatchOptions,
)
from triaccel_ray.service.cli.settings import Setting

HEAD = """# Options

`python -m triaccel_ray.service.cli.reference` makes this page from the fields of the configurations. A task may have
other defaults. Python functions take the same names, with `_`; there `on` and `off` may be `True` and `False`. So does
a TOML file for `--config`; a finished run leaves one, `config.toml`. `triaccel COMMAND --help-all` shows the rest.

Exit status: 0 on success, 1 if a run failed or a search found no feasible trial, 2 on bad input, 130 if stopped. A
memory budget of one GPU that is too small for the first step counts as bad input.
"""
TITLES = {
    RunOptions: "`triaccel run`",
    SearchOptions: "`triaccel search`",
    CompareOptions: "`triaccel compare`",
    TuneBatchOptions: "`triaccel tune-batch`",
    TrainingOptions: "How to train: `run`, `search`, `compare`, `tune-batch`",
    ThresholdOptions: "The control loop: `run`, `search`, `compare`, `replay`",
}


def page() -> str:
    """Returns the page, as Markdown."""
    parts = [HEAD]
    for group, title in TITLES.items():
        known: tuple[Setting, ...] = vars(group)["settings"]
        rows = [_row(f"`--{each.option}`", _values(each), _default(each), each.doc) for each in known]
        header = [_row("option", "values", "default", "what it does"), "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", group.__doc__ or "", "", *header, *rows, ""]))
    return "\n".join(parts)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(setting: Setting) -> str:
    if setting.unit == "bytes":
        return "size, such as 2GiB"
    if setting.bounds:
        return f"{'integer' if setting.kind is int else 'number'} in {setting.bounds}"
    return ", ".join(f"`{word}`" for word in setting.words) or setting.metavar or "text"


def _default(setting: Setting) -> str:
    return "" if setting.default in (None, (), MISSING) else str(setting.shown(setting.default))


if __name__ == "__main__":
    sys.stdout.write(page())
