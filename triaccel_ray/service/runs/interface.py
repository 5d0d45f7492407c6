"""Through which network interface the ranks of a group reach each other."""

from __future__ import annotations

import os
from typing import Any

import psutil
import ray
from ray.train.torch import TorchConfig


class InterfaceConfig(TorchConfig):
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
