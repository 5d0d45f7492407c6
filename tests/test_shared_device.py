import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.build import CPU
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.measure.memory import MIB, CudaMemory
from triaccel_ray.service.runs.environment import RESERVE_BYTES, cap_memory_share, part_of_device
from triaccel_ray.trainables.digits import Digits

TRAIN = """
import sys
import time
from dataclasses import replace
from pathlib import Path
from triaccel_ray.service.runs.spec import run_spec
from triaccel_ray.service.runs.worker import Worker

task, num_epochs, headroom, folder = sys.argv[1:]
spec = replace(run_spec(task), trials_per_gpu=2, memory_headroom_bytes=int(headroom))
spec = replace(spec, recipe=replace(spec.recipe, epochs=int(num_epochs)))
worker = Worker(spec, Path(folder))
worker.resume()
Path(folder, "started").touch()
deadline = time.monotonic() + 200
while len(list(Path(folder).parent.glob("*/started"))) < 2:  # so that both train side by side
    assert time.monotonic() < deadline, "the other process has not started"
    time.sleep(0.01)
while not worker.finished:
    worker.advance()
worker.finish()
worker.close()
"""


class Greedy(Digits):
    """Its first batch takes more than it is given below: two activations of 256 MiB in BF16 are the least of it."""

    control = ControlConfig(every_steps=2, batch=BatchConfig(start=1024, minimum=32, maximum=1024))

    def model(self) -> nn.Module:
        width = 2**17
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def faults(folder: Path) -> list[str]:
    ticks = [record["data"] for record in records(folder) if record["kind"] == "tick"]
    return [fault["kind"] for tick in ticks for fault in tick["observation"]["faults"]]


@pytest.mark.parametrize("num_sharing", [2, 3, 16])
def test_the_parts_of_a_device_and_what_they_leave_free_fit_on_it(num_sharing: int) -> None:
    total = 16 * 1024 * MIB
    part = part_of_device(total, num_sharing)
    assert num_sharing * (part + RESERVE_BYTES) <= total
    assert part == pytest.approx(total / num_sharing - RESERVE_BYTES, abs=1)
    assert part_of_device(total, num_sharing, 100 * MIB) == 100 * MIB
    with pytest.raises(ValueError, match=rf"memory budget = .*: must be at most .* of each of {num_sharing} processes"):
        part_of_device(total, num_sharing, part + 1)


def test_a_part_that_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="trials-per-gpu = 8: of 4096 MiB nothing is left to each but the 512 MiB"):
        part_of_device(4096 * MIB, 8)


def test_on_a_cpu_or_alone_on_a_device_a_budget_stays_as_it_is() -> None:
    assert cap_memory_share(CPU, 4, 10 * MIB) == 10 * MIB
    assert cap_memory_share(CPU, 4) is None
    assert cap_memory_share(torch.device("cuda"), 1) is None


@pytest.mark.gpu
def test_a_process_that_shares_a_device_is_held_to_its_part_from_then_on() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    try:
        part = cap_memory_share(device, 8)
        assert part == part_of_device(total, 8)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(part, dtype=torch.uint8, device=device)  # the CUDA context counts, so not even all of it
        assert CudaMemory(device, None, 2**50).limit_bytes > part
        memory = CudaMemory(device, part, 2**50)
        memory.require_room()
        assert memory.limit_bytes == part
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_a_run_without_memory_changes_its_plan_and_its_neighbor_notices_nothing(tmp_path: Path) -> None:
    greedy, modest = tmp_path / "greedy", tmp_path / "modest"
    words = [
        [f"{__name__}:Greedy", "10", str(400 * MIB), str(greedy)],
        ["digits", "40", str(400 * MIB), str(modest)],
    ]
    runs = [subprocess.Popen([sys.executable, "-c", TRAIN, *each]) for each in words]
    try:
        assert [run.wait(timeout=300) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    assert "out_of_memory" in faults(greedy)
    # Images with one channel have no channels_last.
    assert set(faults(modest)) <= {"compiled", "fusion_refused", "curvature_waits"}
    for folder in (greedy, modest):
        last = records(folder)[-1]
        assert (last["kind"], last["data"]["status"]) == ("end", "finished")
        assert last["data"]["results"]["peak_gb"] <= last["data"]["results"]["limit_gb"]
    plans = [record["data"]["decision"]["plan"] for record in records(greedy) if record["kind"] == "tick"]
    assert plans[-1]["batch_size"] < 1024
    began, ended = ([records(folder)[at]["time_ms"] for folder in (greedy, modest)] for at in (0, -1))
    assert max(began) < min(ended)  # they did train side by side
