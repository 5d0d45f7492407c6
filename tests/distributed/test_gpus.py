"""One run on two GPUs, with NCCL inside the captured steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.build import BF16, CONFIG, Limited, blobs, loop_of, mlp, run
from tests.distributed.training import assert_close, fixed, listed, trained_on_images
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.config import ControlConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.decide import replay
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.records.codec import encode
from triaccel_ray.records.plan import FaultKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    workers = WorkerPool(2, "nccl")
    yield workers
    workers.close()


def errors_after_destroy(rank: int) -> list[str]:
    """Returns the errors of collectives after `destroy_process_group`, by which Ray Train ends a group."""
    ranks, tensor = Ranks.of_default_group(), torch.ones(8, device="cuda")
    ranks.start_all_reduce([tensor])()
    torch.cuda.synchronize()
    distributed.destroy_process_group()
    found = []
    for collective in (
        lambda: ranks.start_all_reduce([tensor])(),
        lambda: ranks.all_gather(tensor),
        lambda: ranks.broadcast_([tensor]),
        lambda: ranks.broadcast_from(0, tensor),
    ):
        try:
            collective()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_collectives_in_a_group_that_was_ended_have_lost_a_rank(workers: WorkerPool) -> None:
    for errors in workers.run(2, errors_after_destroy):
        assert len(errors) == 4
        assert all(error.startswith("LostRankError: another rank was lost: ") for error in errors), errors


UNCOMPILED = replace(fixed(12), execution=ExecutionConfig(compile="off"))


class Waiting(nn.Module):
    """Makes the host wait for the device."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1.0 if inputs.sum().item() != 12345.0 else 2.0)


def trained(
    rank: int, config: ControlConfig, num_steps: int, last: str = "", limit: int | None = None
) -> dict[str, Any]:
    """Weights, captures, ticks and faults after steps; rank 1's model may wait for its device, or lack memory."""
    ending = Limited(limit) if limit is not None and rank == 1 else nn.Identity()
    model = nn.Sequential(mlp(seed=rank), Waiting() if last == "waits" and rank == 1 else ending).cuda()
    loop, ticks = loop_of(model, blobs(1202), config)
    run(loop, num_steps)
    faults = [fault for tick in ticks for fault in tick.observation.faults]
    found = {
        "weights": listed(model),
        "captured": loop._training.steps.num_captured,
        "parts": loop._training.steps.step.num_micro_batches,
        "decisions": [encode(tick.decision) for tick in ticks],
        "replays": replay(config, [(tick.observation, tick.decision) for tick in ticks]).diverged_at is None,
        "refused": [fault.detail for fault in faults if fault.kind is FaultKind.CAPTURE_FAILED],
        "evaluation": loop.evaluate(blobs(31, seed=1)).metrics,
    }
    loop.close()
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_captured_steps_on_two_gpus_compute_what_one_computes(workers: WorkerPool, accumulate: int) -> None:
    config = fixed(12, accumulate=accumulate)
    (alone,) = workers.run(1, trained, config, 200)
    found = workers.run(2, trained, config, 200)
    for each in found:
        assert each["captured"] >= 1
        assert each["weights"] == found[0]["weights"]
        assert_close(each["weights"], alone["weights"], within=1e-4)
        assert each["evaluation"] == found[0]["evaluation"]


def test_images_train_on_two_gpus_as_on_one(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained_on_images, fixed(12), 40)
    for each in workers.run(2, trained_on_images, fixed(12), 40):
        assert_close(each, alone, within=1e-2)  # convolutions compute in TF32


def trained_with_norms(rank: int, config: ControlConfig, compiles: Any, num_steps: int) -> dict[str, Any]:
    """Tensors, decisions and captures of a network whose normalization takes the samples of all ranks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(width, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for width in (3, 8)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).cuda()
    if distributed.is_initialized():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    samples = torch.randn(96, 3, 8, 8), torch.randint(4, (96,))
    loop, ticks = loop_of(model, samples, replace(config, execution=ExecutionConfig(compile=compiles)))
    with torch.backends.cudnn.flags(allow_tf32=False):
        run(loop, num_steps)
    found = {
        "tensors": [tensor.double().flatten().tolist() for tensor in model.state_dict().values()],
        "captured": loop._training.steps.num_captured,
        "decisions": [encode(tick.decision) for tick in ticks],
        "faults": sorted({fault.kind.value for tick in ticks for fault in tick.observation.faults}),
    }
    loop.close()
    return found


@pytest.mark.parametrize("compiles", ["off", "on"])
def test_synchronized_batch_normalization_trains_on_two_gpus_as_on_one(workers: WorkerPool, compiles: Any) -> None:
    (alone,) = workers.run(1, trained_with_norms, fixed(12), compiles, 16)
    first, second = workers.run(2, trained_with_norms, fixed(12), compiles, 16)
    assert first["tensors"] == second["tensors"]
    assert_close(first["tensors"], alone["tensors"], within=1e-3)


def test_synchronized_batch_normalization_runs_with_every_strategy_on(workers: WorkerPool) -> None:
    first, second = workers.run(2, trained_with_norms, replace(CONFIG, max_overhead=1.0), "auto", 100)
    assert first == second
    assert first["decisions"]


@pytest.mark.parametrize("compiles", ["off", "auto"])
def test_two_gpus_share_an_optimizer(workers: WorkerPool, compiles: Any) -> None:
    precision = PrecisionConfig(enabled=False, initial=BF16)
    config = replace(fixed(12), precision=precision, execution=ExecutionConfig(compile=compiles))
    for storage in ("fp32", "split"):
        whole = workers.run(2, trained, replace(config, weights=storage), 50)
        for each in workers.run(2, trained, replace(config, weights=storage, shard_optimizer=True), 50):
            assert each["captured"] >= 1
            assert each["weights"] == whole[0]["weights"]


@pytest.mark.parametrize("compiles", ["off", "auto"])
def test_two_gpus_decide_the_same_with_every_strategy_on(workers: WorkerPool, compiles: Any) -> None:
    config = replace(CONFIG, max_overhead=1.0, execution=ExecutionConfig(compile=compiles))
    first, second = workers.run(2, trained, config, 200)
    for name in ("weights", "decisions", "captured"):
        assert first[name] == second[name], name
    assert first["replays"]
    assert second["replays"]


def test_a_host_that_waits_on_one_gpu_ends_capture_on_both(workers: WorkerPool) -> None:
    first, second = workers.run(2, trained, UNCOMPILED, 20, "waits")
    assert (first["captured"], second["captured"]) == (0, 0)
    assert first["weights"] == second["weights"]
    assert "rank 1 raised" in first["refused"][0]


def test_both_gpus_retreat_when_one_runs_out_of_memory(workers: WorkerPool) -> None:
    (alone,) = workers.run(1, trained, UNCOMPILED, 20)
    for each in workers.run(2, trained, UNCOMPILED, 20, "", 3):
        assert each["parts"] == 2
        assert_close(each["weights"], alone["weights"], within=1e-4)
