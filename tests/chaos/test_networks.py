"""A group on three machines with networks of their own, as on a cluster; their names lead to their loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.mortal import HOLD, RECIPE, assert_whole, events, interruptions
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
            for link, place, at in ((inner, name, address), (outer, "head", gateway)):
                run(f"ip link set {link} netns {self._holders[place].pid} name to-{'head' if place == name else name}")
                self.call(place, f"ip addr add {at}/24 dev to-{'head' if place == name else name}")
                self.call(place, f"ip link set to-{'head' if place == name else name} up")
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
    probe = [
        "unshare",
        "-n",
        "sh",
        "-c",
        "ip link add x type veth peer name y && echo 1 > /proc/sys/net/ipv4/ip_forward",
    ]
    with contextlib.suppress(FileNotFoundError):
        if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0:
            made = Networks()
            yield made
            made.close()
            return
    pytest.skip("needs the right to make network namespaces")


@contextlib.contextmanager
def ray_on(networks: Networks, name: str, *words: str, log: Path) -> Iterator[None]:
    """A machine of the cluster, with one CPU."""
    command = [*networks.within(name), sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    with log.open("w") as file:
        node = subprocess.Popen([*command, "--num-gpus=0", *words], stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None, say=log.read_text)
        assert node.poll() is None, log.read_text()
        yield
    finally:
        end(node)


@pytest.mark.timeout(1800)
def test_a_group_trains_across_networks_and_goes_on_when_a_link_is_cut(tmp_path: Path, networks: Networks) -> None:
    (tmp_path / HOLD).touch()
    words = ["run", "tests.chaos.mortal:Mortal", "--gpus", "2..3", "--device", "cpu", "--address", f"{HEAD}:6379"]
    words += ["--epochs", str(RECIPE.epochs), "--lr", "0.05", "--warmup-epochs", "1", "--name", "run"]
    words += ["--data-dir", str(tmp_path), "--storage-path", str(tmp_path)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {
            "PYTHONPATH": os.getcwd(),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }.items():
            patch.setenv(name, value)
        head = ("--head", f"--node-ip-address={HEAD}", "--port=6379", "--include-dashboard=false")
        stack.enter_context(ray_on(networks, "head", *head, log=tmp_path / "head.log"))
        for name, (address, _) in OTHERS.items():
            joins = (f"--address={HEAD}:6379", f"--node-ip-address={address}")
            stack.enter_context(ray_on(networks, name, *joins, log=tmp_path / f"{name}.log"))
        command = subprocess.Popen(
            [*networks.within("head"), sys.executable, "-m", "triaccel_ray.service", *words],
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
