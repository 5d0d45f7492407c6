"""What the benchmarks judge by, and the parts of them that need neither a GPU nor a cluster nor a server."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Manager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import any_model, many_gpus
from benchmarks.architectures import compare
from benchmarks.many_gpus import measure_link, predicted_ratio, spawned
from benchmarks.search_overhead import Contender, faults, optuna_alone
from benchmarks.tracking import Trainer
from tests.build import CPU
from triaccel_ray.measure.memory import memory_meter
from triaccel_ray.records.events import Epoch, Tick, read_events


def test_a_gap_beyond_the_limit_and_lost_trials_are_faults(tmp_path: Path) -> None:
    quick = Contender(9.0, [(5.0, 6.0), (1.0, 2.5), (7.0, 8.0)])
    assert quick.gaps == pytest.approx([2.5, 1.0])
    slow = Contender(9.0, [(0.0, 1.0), (2.6, 3.0)])
    alone = Contender(1.0, optuna_alone(tmp_path, 3))
    assert min(alone.gaps) >= 0.0
    too_much = ["TOO MUCH: 1.60 s pass between two trials, where 1.5 s are allowed"]
    assert faults({"triaccel": slow}, num_trials=2) == too_much
    assert faults({"triaccel": alone, "bare Ray Tune": quick}, num_trials=3) == []
    lost = ["WRONG: trials are missing of Optuna alone, triaccel"]
    assert faults({"triaccel": alone, "Optuna alone": quick}, num_trials=4) == lost


def test_epochs_are_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    trainer = Trainer("benchmarks.trivial:Layers3", tmp_path, "cpu")
    off, on = trainer.epoch("off"), trainer.epoch("on")
    trainer.end()
    assert off.records == 0.0 < on.records < on.wall
    assert (off.num_ticks, on.num_ticks) == (0, 2)
    (log,) = tmp_path.rglob("events.jsonl")
    records = [event.record for event in read_events(log)]
    assert [type(record) for record in records[1:]] == [Tick, Tick, Epoch]


def test_a_model_of_transformers_trains_as_with_amp() -> None:
    found = compare("ViT")
    assert (found["layers"], found["faults"]) == (14, [])
    assert found["differs"] < 0.02
    assert found["loop"] < 0.68  # of ln 2 = 0.693: it has learned


def test_runs_that_compile_at_once_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one of them fails to compile, the others are timed after it."""
    compiled: list[str] = []
    num_timed = 0

    def start(name: str, method: str, seed: int) -> Any:
        compiled.append(name)
        if name == "broken":
            raise ValueError(name)
        return any_model.Started(lambda: None, lambda: torch.zeros(()), memory_meter(CPU), None, {})

    with Manager() as manager, ThreadPoolExecutor(3) as pool:
        barrier, gpu = manager.Barrier(3), manager.Lock()

        def measure(started: Any, num_steps: int) -> dict[str, Any]:
            nonlocal num_timed
            num_timed += 1
            assert len(compiled) == 3
            assert not gpu.acquire(blocking=False)
            return {"number": num_timed}

        monkeypatch.setattr(any_model, "start", start)
        monkeypatch.setattr(any_model, "measure", measure)
        names = ["gpt", "broken", "resnet18"]
        arguments = ("loop", 10, 0, barrier, gpu)
        runs = [pool.submit(any_model.run_after_all_compiled, name, *arguments) for name in names]
        assert [type(run.exception()) for run in runs] == [type(None), ValueError, type(None)]
        assert {runs[0].result()["number"], runs[2].result()["number"]} == {1, 2}
        assert gpu.acquire(blocking=False)


def test_one_gpu_is_not_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["many_gpus", "--gpus", "2", "1"])
    with pytest.raises(SystemExit) as ended:
        many_gpus.main()
    assert ended.value.code == 2
    assert "--gpus: each number must be at least 2" in capsys.readouterr().err


def test_scaling_is_predicted_from_a_measured_link() -> None:
    link = spawned(measure_link, 2, 2)
    assert 0.0 < link["latency_ms"] < 1e3
    assert link["bytes_per_ms"] > 1e4

    def ratio(wanted: int, network: float = 1e9) -> float:
        return predicted_ratio(link, (10**8, 10**8), (20.0, 25.0), (2, wanted), network)

    assert ratio(2) == pytest.approx(2 * 20 / 25)
    assert 4 * 20 / 30 < ratio(4) < 4 * 20 / 25  # a ring moves at most twice as much as between two
    assert ratio(64, network=1e3) < ratio(64) < 64
