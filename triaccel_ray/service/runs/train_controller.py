"""What Ray Train's controller does for a group of ranks; light to import, since it is a process of its own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.train import UserCallback
from ray.train.torch import TorchConfig

_REFRESH_S = 60
"""Seconds for which the list of machines is refreshed after a loss. Ray notices a lost machine after some 15 s."""


class RankFailedError(RuntimeError):
    """A rank has failed by itself, so that another attempt would fail again."""

    def __init__(self, message: str, pickled: bytes, is_peer: bool) -> None:
        """Takes the exception pickled: Ray's processes need not import the user's code.

        `is_peer` says that it only repeats what another rank has raised.
        """
        super().__init__(message, pickled, is_peer)
        self.pickled, self.is_peer = pickled, is_peer


class TooManyLossesError(RuntimeError):
    """Processes were lost again and again, without an epoch in between."""


class EndOnFailure(UserCallback):
    """Ends the group when a rank has failed by itself, or too many are lost while no epoch is trained.

    Ray Train 2.60 would retry any exception of a rank, and counts losses over the whole run, however long it is.
    """

    def __init__(self, mailbox: Any, max_losses: int) -> None:
        """Takes the actor that knows when an epoch has been trained."""
        self._mailbox, self._max_losses = mailbox, max_losses

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Raises what ends the run; returns if a process was lost, which Ray Train then replaces."""
        failed = [error for error in worker_exceptions.values() if isinstance(error, RankFailedError)]
        if failed and len(failed) == len(worker_exceptions):
            raise min(failed, key=lambda error: error.is_peer)
        num_losses = ray.get(self._mailbox.lose.remote())
        if num_losses > self._max_losses:
            last = str(next(iter(worker_exceptions.values()))).strip().partition("\n")[0]
            raise TooManyLossesError(
                f"a process was lost {num_losses} times without an epoch in between, the last time so: {last}"
            )
        threading.Thread(target=refresh_cluster_view, name="look-at-cluster", daemon=True).start()


def refresh_cluster_view() -> None:
    """Refreshes Ray Train's list of machines every second for a minute; by default Ray Train does so every 20 s."""
    # There is no public way. Importing this takes long, and only Ray Train's controller comes here, which has it.
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
