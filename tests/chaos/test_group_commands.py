"""Comparisons and searches whose runs train on two ranks, as a user types the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.shell import Shell, done
from tests.service.runs.several import Several
from triaccel_ray.records.events import Start, read_events
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import EVENTS

OPTIONS = ("--gpus", "2", "--device", "cpu", "--epochs", "2", "--warmup-epochs", "0", "--name", "result")


def num_ranks(folder: Path) -> dict[str, int]:
    """The number of ranks of each run below `folder`, all of which have finished, by its name."""
    found = {}
    for log in folder.glob(f"**/{EVENTS}"):
        first = next(iter(read_events(log))).record
        if isinstance(first, Start) and log.parent != folder:
            assert read_run(log.parent).status == "finished"
            found[log.parent.name.removesuffix("-seed0")] = int(first.parameters.get("world_size", 1))
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("compare", "--methods", "engine-amp,triaccel", "--seeds", "1"), {"engine-amp": 2, "triaccel": 2}),
        (("search", "--trials", "1", "--margin", "100"), {"fp32": 1, "amp": 1, "trial-000": 2}),
    ],
    ids=["compare", "search"],
)
def test_each_run_trains_on_two_ranks_and_baselines_on_one(
    tmp_path: Path, shell: Shell, words: tuple[str, ...], expected: dict[str, int]
) -> None:
    task = (f"{Several.__module__}:Several", "--storage-path", str(tmp_path))
    done(shell.type(words[0], *task, *words[1:], *OPTIONS, RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled"))
    assert num_ranks(tmp_path / "result").items() >= expected.items()
