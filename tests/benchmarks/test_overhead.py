"""The parts of the benchmarks of overhead that need neither a cluster nor a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.search_overhead import Contender, faults, optuna_alone
from benchmarks.tracking import Trainer
from benchmarks.trivial import Layers60
from triaccel_ray.model.layers import find_layers
from triaccel_ray.records.events import Epoch, Tick, read_events


def test_gaps_lie_between_trials_in_the_order_of_time() -> None:
    contender = Contender()
    contender.add(9.0, [(5.0, 6.0), (1.0, 2.5), (7.0, 8.0)])
    assert (contender.seconds, contender.num_trials) == ([9.0], 3)
    assert contender.gaps == pytest.approx([2.5, 1.0])


def test_optuna_alone_trains_every_trial(tmp_path: Path) -> None:
    contender = Contender()
    contender.add(1.0, optuna_alone(tmp_path, 3))
    assert contender.num_trials == 3
    assert all(gap >= 0.0 for gap in contender.gaps)


def test_epochs_are_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    trainer = Trainer("benchmarks.trivial:Layers3", tmp_path, ["--device", "cpu"])
    off, on = trainer.epoch("off"), trainer.epoch("on")
    trainer.end()
    assert off.records == 0.0 < on.records < on.wall
    assert (off.num_ticks, on.num_ticks) == (0, 2)
    (log,) = tmp_path.rglob("events.jsonl")
    records = [event.record for event in read_events(log)]
    assert [type(record) for record in records[1:]] == [Tick, Tick, Epoch]


def test_sixty_layers_are_sixty() -> None:
    assert len(find_layers(Layers60().model())) == 60


def test_a_gap_beyond_the_limit_and_lost_trials_are_faults() -> None:
    quick, slow = Contender(), Contender()
    quick.add(9.0, [(0.0, 1.0), (2.0, 3.0)])
    slow.add(9.0, [(0.0, 1.0), (2.6, 3.0)])
    assert faults({"triaccel": quick, "bare Ray Tune": slow}, num_trials=2) == []
    assert faults({"triaccel": slow}, num_trials=2) == [
        "TOO MUCH: 1.60 s pass between two trials, where 1.5 s are allowed"
    ]
    assert faults({"triaccel": quick, "Optuna alone": quick}, num_trials=3) == [
        "WRONG: trials are missing of Optuna alone, triaccel"
    ]
