"""Runs on several GPUs, here gloo processes on CPUs, that lose ranks or their trial, on a real Ray."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest
import ray

from tests.chaos.mortal import DEATHS, DOOM, HOLD, assert_whole, events, interruptions, lines, trained
from tests.service.waiting import processes, wait_until
from triaccel_ray.records.events import Epoch
from triaccel_ray.service.failures import MAX_LOSSES, RunFailedError
from triaccel_ray.service.runs.record import read_run


@pytest.mark.usefixtures("own_ray")
def test_ranks_that_are_killed_at_random_steps_cost_no_sample(tmp_path: Path) -> None:
    chance = random.Random(1)
    steps = [chance.randint(1, 5) if index % 2 else 6 for index in range(MAX_LOSSES + 2)]  # 6: after an epoch
    (tmp_path / DOOM).write_text("\n".join(f"{chance.randrange(2)} {step}" for step in steps))
    assert trained(tmp_path, "2") is None
    assert len(lines(tmp_path / DEATHS)) == len(steps)
    assert_whole(tmp_path)
    found = interruptions(tmp_path)
    attempts = {line.split()[0] for line in lines(tmp_path / DEATHS)}  # in one of which both ranks may have died
    assert [(each.cause, each.world_size) for each in found] == [("preempted", 2)] * len(attempts)
    assert all(each.seconds_lost is not None and each.seconds_lost > 0 for each in found)


@pytest.mark.usefixtures("own_ray")
def test_a_group_that_is_lost_too_often_has_failed(tmp_path: Path) -> None:
    (tmp_path / DOOM).write_text("\n".join(["1 2"] * (MAX_LOSSES + 1)))
    error = trained(tmp_path, "2")
    assert isinstance(error, RunFailedError)
    assert error.cause == "preempted"
    assert f"a process was lost {MAX_LOSSES + 1} times without an epoch in between, the last time so: " in str(error)
    assert len(interruptions(tmp_path)) == MAX_LOSSES
    assert read_run(tmp_path / "run").status == "failed (preempted)"


@pytest.mark.usefixtures("own_ray")
@pytest.mark.parametrize("victim", ["ResourceTrainable", "Mailbox"])
def test_a_group_whose_trial_or_mailbox_is_killed_leaves_nothing_behind(victim: str, tmp_path: Path) -> None:
    (tmp_path / HOLD).touch()
    orphans: list[int] = []

    def kill() -> None:
        wait_until(lambda: sum(isinstance(each.record, Epoch) for each in events(tmp_path)) == 2)
        orphans.extend(processes("RayTrainWorker"))
        (killed,) = processes(victim)
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, orphans)))
        wait_until(lambda: interruptions(tmp_path))  # the new group found room, though the old one had taken all

    assert trained(tmp_path, "2", kill) is None
    assert len(orphans) == 2
    assert_whole(tmp_path)
    (interruption,) = interruptions(tmp_path)
    assert interruption.cause == "preempted"
    assert interruption.epoch in (1, 2)  # a slow disk has no checkpoint of the second epoch yet
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
