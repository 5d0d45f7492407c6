"""A group on three machines with networks of their own, as on a cluster; their names lead to their loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.chaos.mortal import HOLD, RECIPE, assert_whole, events, interruptions
from tests.service.ray_head import ray_node
from tests.service.waiting import COMMAND_S, HELD_S, end, wait_until
from triaccel_ray.records.events import Epoch

HEAD = "10.77.1.1"
OTHERS = {"a": ("10.77.1.2", HEAD), "b": ("10.77.2.2", "10.77.2.1")}
"""Machine -> its address, and the head's on the link between them; the head forwards between the links."""


class Networks:
    """Network namespaces, each with a machine; what runs in one reaches the others through its link to the head."""

    def __init__(self) -> None:
        self._holders = {name: subprocess.Popen(["unshare", "-n", "sleep", "3600"]) for name in ("head", *OTHERS)}
        own = os.readlink("/proc/self/ns/net")
        for each in self._holders.values():
            wait_until(lambda each=each: each.poll() is not None or os.readlink(f"/proc/{each.pid}/ns/net") != own)
            assert each.poll() is None
        for name in self._holders:
            self.call(name, "ip link set lo up")
        for name, (address, gateway) in OTHERS.items():
            inner, outer = (f"tr{os.getpid()}{name}{side}" for side in "io")
            run(f"ip link add {inner} type veth peer name {outer}")
            for link, place, at, to in ((inner, name, address, "head"), (outer, "head", gateway, name)):
                run(f"ip link set {link} netns {self._holders[place].pid} name to-{to}")
                self.call(place, f"ip addr add {at}/24 dev to-{to} && ip link set to-{to} up")
            self.call(name, f"ip route add default via {gateway}")
        self.call("head", "echo 1 > /proc/sys/net/ipv4/ip_forward")

    def within(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._holders[name].pid), "-n"]

    def call(self, name: str, command: str) -> None:
        subprocess.run([*self.within(name), "sh", "-c", command], check=True, timeout=60)

    def close(self) -> None:
        for each in self._holders.values():
            end(each)


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, timeout=60)


@pytest.fixture
def networks() -> Iterator[Networks]:
    making = "ip link add x type veth peer name y && echo 1 > /proc/sys/net/ipv4/ip_forward"
    probe = ["unshare", "-n", "sh", "-c", making]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0:
            made = Networks()
            yield made
            made.close()
            return
    pytest.skip("needs the right to make network namespaces")


@pytest.mark.timeout(1800)
def test_a_group_trains_across_networks_and_goes_on_when_a_link_is_cut(tmp_path: Path, networks: Networks) -> None:
    (tmp_path / HOLD).touch()
    words = ["run", "tests.chaos.mortal:Mortal", "--gpus", "2..3", "--device", "cpu", "--address", f"{HEAD}:6379"]
    words += ["--epochs", str(RECIPE.epochs), "--lr", "0.05", "--warmup-epochs", "1", "--name", "run"]
    words += ["--data-dir", str(tmp_path), "--storage-path", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    head = ("--head", "--port=6379", "--include-dashboard=false")
    joins = {"head": (HEAD, head)} | {name: (own, (f"--address={HEAD}:6379",)) for name, (own, _) in OTHERS.items()}
    with contextlib.ExitStack() as stack:
        for name, (address, own) in joins.items():
            machine = (f"--node-ip-address={address}", "--num-cpus=1", "--num-gpus=0")
            log, within = tmp_path / f"{name}.log", networks.within(name)
            stack.enter_context(ray_node(*own, *machine, env=env, log=log, within=within))
        command = subprocess.Popen(
            [*networks.within("head"), sys.executable, "-m", "triaccel_ray.service", *words],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stack.callback(end, command)
        wait_until(lambda: sum(isinstance(each.record, Epoch) for each in events(tmp_path)) == 2)
        networks.call("head", "ip link set to-b down")
        wait_until(lambda: interruptions(tmp_path), timeout_s=HELD_S)
        (tmp_path / HOLD).unlink()
        said, _ = command.communicate(timeout=COMMAND_S)
        assert command.returncode == 0, said
    found = [(each.cause, each.world_size_before, each.world_size) for each in interruptions(tmp_path)]
    assert found == [("preempted", 3, 2)]
    assert_whole(tmp_path)
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert [(each.info.run_name, each.info.status) for each in runs] == [("run", "FINISHED")]
