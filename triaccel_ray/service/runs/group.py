"""A run on several GPUs: Ray Train places and restarts a group of ranks, which train the same loop.

Rank 0 has a plain `Worker`, which alone writes to the run's folder; each other rank has a `Follower`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put  # no public way to note a value in the GCS
from ray.train import UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError
from ray.util.placement_group import get_current_placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from triaccel_ray.apply.agreement import PeerError
from triaccel_ray.baseline import BaselineLoop
from triaccel_ray.config import ControlConfig
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.distributed.ranks import LostRankError
from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.checkpoint import read_checkpoint
from triaccel_ray.records.events import TakenOverError
from triaccel_ray.service.failures import MAX_LOSSES, DiskFullError, PreemptedError, cause_of, picklable
from triaccel_ray.service.runs.building import seed_everything
from triaccel_ray.service.runs.environment import end_with_parent
from triaccel_ray.service.runs.mailbox import Mailbox, Progress
from triaccel_ray.service.runs.shared_data import SharedSplits
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import CHECKPOINT
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.service.storage.training_folder import TrainingFolder

RESIZE_INTERVAL_S = 10.0
"""An elastic group looks for more GPUs this often. Ray Train learns of new machines every 20 s."""
_WAIT_FOR_GPUS_S, _WAIT_FOR_GPUS_ELASTIC_S = 60.0, 5.0
"""A group waits for GPUs for so long before Ray Train tries again, without end. If it is elastic, some of them may be
on a lost machine, and GPUs are counted again."""
_REFRESH_S = 60
"""Seconds for which the list of machines is refreshed after a loss. Ray notices a lost machine after some 15 s."""
_STOP_S = 60.0
"""Longest time for the ranks to end when they are asked to."""
_RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # a lost rank is noticed after 2 s otherwise
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process more, for notices that nothing here acts on
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a task's relative paths start at the command's folder
}
_LOST = (RayActorError, OutOfMemoryError)
"""Ray's errors about a process that was lost, or that Ray has killed for want of memory."""
_RANKS_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0"}
"""NVLink multicast stays off: where its service is missing, NCCL fails instead of doing without."""


def ask(reference: Any) -> Any:
    """Returns what the mailbox answers.

    Raises:
        LostRankError: it was lost, as a rule with the trial that owns it. Then Ray is about to end the ranks, too.
    """
    try:
        return ray.get(reference)
    except _LOST as error:
        raise _lost(error) from error


def _lost(error: Exception) -> LostRankError:
    return LostRankError(f"a process of the run was lost: {first_line(error)}")


class Group:
    """The ranks of one run, as its trial sees them; a thread waits for Ray Train meanwhile."""

    def __init__(self, spec: RunSpec, place: StoragePath, *, on_gpus: bool, shared: SharedSplits | None) -> None:
        """Starts the ranks, on one GPU each unless they are processes on CPUs."""
        release_gpus(place)  # of a group whose trial was lost
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._mailbox: Any = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        self._error: Exception | None = None
        train = functools.partial(train_rank, spec, place, shared, self._mailbox)
        self._thread = threading.Thread(
            target=self._fit, args=(train, spec.gpu_range, on_gpus), name="ray-train", daemon=True
        )
        self._thread.start()

    @property
    def has_begun(self) -> bool:
        """Whether the run's log has been opened."""
        has_begun: bool = ask(self._mailbox.has_begun.remote())
        return has_begun

    def next_progress(self) -> Progress:
        """Has the ranks train one epoch, and returns how far the run is; each epoch is reported once.

        Raises:
            PreemptedError: processes were lost too often, without an epoch in between.
            LostRankError: the mailbox was lost, or Ray Train's controller.
            Exception: what a rank has raised.
        """
        progress: Progress | None = ask(self._mailbox.next.remote())
        if progress is not None:
            return progress
        self._thread.join()
        error = self._error
        assert error is not None  # without one, the run has finished
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        if isinstance(cause, _LOST):
            raise _lost(cause) from cause
        raise pickle.loads(cause.pickled) if isinstance(cause, RankFailedError) else cause

    def stop(self) -> None:
        """Has the ranks end before their next epoch."""
        with contextlib.suppress(LostRankError):  # without the mailbox, the ranks end by themselves
            ask(self._mailbox.stop.remote())

    def close(self) -> None:
        """Returns when the ranks are gone. If they do not end, this process does, and Ray ends what it has started."""
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            os._exit(1)
        ray.kill(self._mailbox)

    def _fit(self, train: Callable[[], None], gpu_range: tuple[int, int], on_gpus: bool) -> None:
        try:
            with TemporaryDirectory(prefix="triaccel-train-", ignore_cleanup_errors=True) as folder:
                trainer(train, gpu_range, EndOnFailure(self._mailbox), folder, on_gpus=on_gpus).fit()
        except Exception as error:  # raised by `next_progress`, in the trial's own thread
            self._error = error
        with contextlib.suppress(LostRankError):
            ask(self._mailbox.end.remote())


def trainer(
    train: Callable[[], None], gpu_range: tuple[int, int], callback: EndOnFailure, folder: str, *, on_gpus: bool
) -> Any:
    """Returns what runs `train` on each rank; it writes to `folder`, nothing of which is needed later."""
    min_ranks, max_ranks = gpu_range
    wait_s = _WAIT_FOR_GPUS_S if min_ranks == max_ranks else _WAIT_FOR_GPUS_ELASTIC_S
    os.environ.update(_RAY_TRAIN, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(wait_s))  # the process may train another
    return TorchTrainer(
        train,
        torch_config=NetworkInterfaceConfig(),
        scaling_config=ScalingConfig(
            num_workers=max_ranks if min_ranks == max_ranks else (min_ranks, max_ranks),
            use_gpu=on_gpus,
            resources_per_worker={"CPU": 1.0, "GPU": 1.0} if on_gpus else {"CPU": 1.0},
            elastic_resize_monitor_interval_s=RESIZE_INTERVAL_S,
        ),
        run_config=RunConfig(  # type: ignore[arg-type]  # `TorchTrainer` declares the class of an older API
            name="group",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=-1),  # the callback counts
            callbacks=[callback],
            worker_runtime_env={"env_vars": _RANKS_ENVIRONMENT},
            logging_config=LoggingConfig(log_level="CRITICAL"),
        ),
    )


class RankFailedError(RuntimeError):
    """A rank has failed by itself, so that another attempt would fail again."""

    def __init__(self, message: str, pickled: bytes, is_peer: bool) -> None:
        """Takes the exception pickled: Ray's processes need not import the user's code.

        `is_peer` says that it only repeats what another rank has raised.
        """
        super().__init__(message, pickled, is_peer)
        self.pickled, self.is_peer = pickled, is_peer


class EndOnFailure(UserCallback):
    """Ends the group when a rank has failed by itself, or too many are lost while no epoch is trained.

    Ray Train 2.60 would retry any exception of a rank, and counts losses over the whole run, however long it is.
    """

    def __init__(self, mailbox: Any) -> None:
        """Takes the actor that knows when an epoch has been trained."""
        self._mailbox = mailbox

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Raises what ends the run; returns if a process was lost, which Ray Train then replaces."""
        failed = [error for error in worker_exceptions.values() if isinstance(error, RankFailedError)]
        if failed and len(failed) == len(worker_exceptions):
            raise min(failed, key=lambda error: error.is_peer)
        num_losses = ray.get(self._mailbox.lose.remote())
        if num_losses > MAX_LOSSES:
            last = first_line(next(iter(worker_exceptions.values())))
            raise PreemptedError(
                f"a process was lost {num_losses} times without an epoch in between, the last time so: {last}"
            )
        threading.Thread(target=refresh_cluster_view, name="look-at-cluster", daemon=True).start()


def refresh_cluster_view() -> None:
    """Refreshes Ray Train's list of machines every second for a minute; by default Ray Train does so every 20 s."""
    # There is no public way. Importing this takes long, and only Ray Train's controller, which has it, calls this.
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as autoscaling

    coordinator = autoscaling.get_or_create_autoscaling_coordinator()
    for _ in range(_REFRESH_S):
        with contextlib.suppress(ray.exceptions.RayError):  # the cluster ends, or is busy
            ray.get(coordinator.get_reserved_resources.remote("", recompute=True))
        time.sleep(1.0)


class NetworkInterfaceConfig(TorchConfig):
    """Ray Train's configuration of PyTorch, whose ranks use Ray's interface before their process group begins."""

    @property
    def backend_cls(self) -> Any:
        """The class that starts the process group."""
        return _Backend


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]  # which has no public name
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(use_rays_interface)
        super().on_start(worker_group, backend_config)


def use_rays_interface() -> None:
    """Has gloo use the interface by which Ray reaches this machine, unless the environment names one.

    By default it uses that of the machine's name, which on Debian leads to the loopback: no other machine gets there.
    """
    address = ray.util.get_node_ip_address()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def train_rank(spec: RunSpec, place: StoragePath, shared: SharedSplits | None, mailbox: Any) -> None:
    """Trains the run on one rank of the initialized process group.

    Raises:
        LostRankError: another rank was lost; Ray Train begins again with a new group.
        RankFailedError: this rank has failed by itself, which ends the run.
    """
    end_with_parent()
    try:
        _train(spec, place, shared, mailbox)
    except LostRankError:
        raise
    except Exception as error:
        told = picklable(error)
        raise RankFailedError(str(told)[:500], pickle.dumps(told), isinstance(error, PeerError)) from None


def _train(spec: RunSpec, place: StoragePath, shared: SharedSplits | None, mailbox: Any) -> None:
    """Trains epochs while the trial wants more, and finishes the run after the last one.

    Rank 0 alone opens, writes and uploads the run's folder.
    """
    folder, leads = TrainingFolder(place), ray.train.get_context().get_world_rank() == 0
    splits = None if shared is None else ray.get(shared)
    with contextlib.ExitStack() as stack:
        if leads:
            _internal_kv_put(_key_of(place), pickle.dumps(get_current_placement_group()), overwrite=True)
            stack.callback(folder.close)
            folder.open()
            worker = Worker(spec, folder.path, splits)
        else:
            worker = Follower(replace(spec, keep=None), folder.path, splits)
        stack.callback(worker.close)
        try:
            worker.resume()
            folder.push_soon()
            while not worker.ranks.any(leads and not ask(mailbox.may_train.remote())):
                progress = worker.train_epoch(folder)
                if leads:
                    ask(mailbox.report.remote(progress))
                if progress.finished:
                    return
            worker.stop()
        except (DiskFullError, TakenOverError, LostRankError):
            raise
        except Exception as error:
            if leads and worker.has_begun:
                worker.fail(error)  # here: the store may be away, and the folder is this machine's
            raise


class Follower(Worker):
    """Trains the same loop as rank 0, which has a plain `Worker`.

    It writes nothing: its log is never opened, and its spec keeps no model.
    """

    def resume(self) -> int:
        """Restores the states that rank 0 reads from its files, in its order; the last one is that of the run."""
        while (content := self.ranks.broadcast_bytes(None)) is not None:
            state = read_checkpoint(io.BytesIO(content), self.folder / CHECKPOINT)
            try:
                self._load(state)
            except (RuntimeError, ValueError, KeyError) as error:
                if cause_of(error) != "bug":  # else rank 0 has found the same, and looks for another checkpoint
                    raise
        if self.ranks.any(False):
            self._rebuild_loop()
        self._seed()  # random states in the checkpoint are rank 0's
        return self.loop.sampler.epoch

    def checkpoint(self) -> None:
        """Gives rank 0 what it lacks: the state of this rank's share of the optimizer, if the ranks share it."""
        self.loop.state_dict()

    def _build_loop(self, control: ControlConfig) -> ControlLoop | BaselineLoop:
        self.loop = super()._build_loop(control)
        self._seed()
        return self.loop

    def _seed(self) -> None:
        """Seeds the generators of this rank: with rank 0's states, it would drop out the same units."""
        key = (self.spec.seed, self.ranks.rank, self.loop.sampler.epoch)
        seed_everything(hash(key) % 2**32)  # a hash of integers is the same in all processes


def release_gpus(place: StoragePath) -> None:
    """Releases what the group of the run at `place` has reserved, if its trial was killed.

    Ray 2.60 ends its processes, but keeps their placement group until the job ends. Ray Train's cleaner needs the
    dashboard to notice the loss, and a Ray that starts for one command has none.
    """
    found = _internal_kv_get(_key_of(place))
    if found:
        remove_placement_group(pickle.loads(found))


def _key_of(place: StoragePath) -> bytes:
    """Returns the key in the cluster's key-value store under which the run's placement group is noted."""
    return f"triaccel-ray group of {place}".encode()
