"""Runs on several GPUs, here gloo processes on CPUs, that Ray Train starts, on a real Ray."""

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator
from torch import Tensor

from tests.service.runs.several import NUM_SAMPLES, Several, samples_of_epochs, several_spec
from tests.service.waiting import processes, wait_until
from triaccel_ray.service.failures import RunFailedError
from triaccel_ray.service.runs import group
from triaccel_ray.service.runs.launch import run_all
from triaccel_ray.service.runs.mailbox import Mailbox, Progress
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.storage.layout import ERROR, EVENTS
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Recipe

pytestmark = pytest.mark.usefixtures("own_ray")


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class WrongOnRank1(Several):
    """Has a mistake on one rank, in a place where ranks do not agree on errors."""

    def optimizer(self, model: Any, recipe: Recipe) -> torch.optim.Optimizer:
        if rank() == 1:
            raise KeyError("only here")
        return super().optimizer(model, recipe)


class LateOnRank1(Several):
    """Fails on one rank while it trains."""

    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        if rank() == 1 and (self.data_dir is not None) and len(list(self.data_dir.glob("run/checkpoint.pt"))):
            raise KeyError("a mistake in the loss")
        return super().loss(outputs, targets, recipe)


class Diverging(Several):
    def loss(self, outputs: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
        return super().loss(outputs, targets, recipe) * float("nan")


def outcome(spec: RunSpec, folder: Path) -> Exception | None:
    return run_all({"run": spec}, StoragePath(str(folder)), num_gpus=0).get("run")


def assert_gone() -> None:
    """Checks that no rank is left, and that nothing is reserved any more."""
    wait_until(lambda: not processes("RayTrainWorker"), say=lambda: processes("RayTrainWorker"))
    wait_until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def test_a_group_trains_on_each_sample_once(tmp_path: Path) -> None:
    assert outcome(several_spec(data_dir=str(tmp_path), keep="last"), tmp_path) is None
    assert samples_of_epochs(tmp_path) == {epoch: list(range(NUM_SAMPLES)) for epoch in range(3)}
    run = read_run(tmp_path / "run")
    assert (run.status, run.interruptions, run.start.parameters["world_size"]) == ("finished", (), 2)
    assert (run.folder / "model.pt").exists()
    assert_gone()


@pytest.mark.parametrize(
    ("task", "cause", "text", "epochs"),
    [
        ("LateOnRank1", "bug", "KeyError: 'a mistake in the loss'", [1]),
        ("Diverging", "non_finite", "NonFiniteLossError: the training loss of epoch 1 is nan", []),
    ],
)
def test_a_failure_of_a_configuration_ends_the_run_at_once(
    tmp_path: Path, task: str, cause: str, text: str, epochs: list[int]
) -> None:
    error = outcome(several_spec(f"{__name__}:{task}", data_dir=str(tmp_path)), tmp_path)
    assert isinstance(error, RunFailedError)
    assert error.cause == cause
    run = read_run(tmp_path / "run")
    assert (run.status, run.interruptions) == (f"failed ({cause})", ())  # no attempt after the first
    assert text in run.end.message
    assert [epoch.epoch for epoch in run.epochs] == epochs
    assert text.rpartition(" is nan")[0].rpartition(": ")[2] in (run.folder / ERROR).read_text()
    assert_gone()


def test_an_error_of_one_rank_before_training_leaves_no_run(tmp_path: Path) -> None:
    error = outcome(several_spec(f"{__name__}:WrongOnRank1"), tmp_path)
    assert not isinstance(error, RunFailedError)
    assert "only here" in str(error)
    assert not (tmp_path / "run" / EVENTS).exists()
    assert_gone()


def test_ranks_use_the_interface_of_ray_unless_the_user_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    group.use_rays_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    group.use_rays_interface()
    found = psutil.net_if_addrs()[os.environ["GLOO_SOCKET_IFNAME"]]
    assert ray.util.get_node_ip_address() in [each.address for each in found]


def test_ray_train_looks_at_the_cluster_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss; the request uses a part of Ray that is not public."""
    coordinator = default_autoscaling_coordinator.get_or_create_autoscaling_coordinator()
    ray.get(coordinator.request_resources.remote("group", [{"CPU": 1}], expire_after_s=60))
    node = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(group, "_REFRESH_S", 1)
    group.refresh_cluster_view()
    assert node in ray.get(coordinator.get_reserved_resources.remote("group"))


def test_losses_are_counted_since_the_last_epoch_that_is_new() -> None:
    async def told() -> list[int]:
        mailbox = Mailbox()
        found = [await mailbox.lose(), await mailbox.lose()]
        for epoch in (1, 1):  # the second one again, by the ranks that came after a loss
            await mailbox.report(Progress(epoch=epoch, performance=None, finished=False))
            found.append(await mailbox.lose())
        return found

    assert asyncio.run(told()) == [1, 2, 1, 2]


def test_a_group_of_fixed_size_waits_longer_for_gpus_also_after_an_elastic_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune has one process train run after run."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    waited = []
    for gpu_range in ((2, 3), (2, 2)):
        callback = group.EndOnFailure(ray.remote(Mailbox).remote())
        group.trainer(lambda: None, gpu_range, callback, str(tmp_path), on_gpus=False)
        waited.append(float(os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"]))
    assert waited == [5.0, 60.0]
