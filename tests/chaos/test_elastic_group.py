"""A run on several machines, here gloo processes on CPUs, that loses one and gains one.

It stands alone in its file: the tests beside it would leave this process connected to a cluster of one machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from tests.chaos.mortal import HOLD, assert_whole, interruptions, trained, wait_for_epochs
from tests.service.ray_head import machines, ray_node
from tests.service.waiting import HELD_S, processes, wait_until
from triaccel_ray.service.cluster.cluster import cluster


@pytest.mark.parametrize("is_drained", [False, True], ids=["killed", "drained"])
def test_an_elastic_group_shrinks_and_grows_with_the_cluster(tmp_path: Path, is_drained: bool) -> None:
    (tmp_path / HOLD).touch()
    sizes: list[tuple[str, int, int]] = []

    def come_and_go() -> None:
        wait_for_epochs(tmp_path, 2)
        for change in (leave, add):
            before = len(interruptions(tmp_path))
            change()
            wait_until(
                lambda before=before: len(interruptions(tmp_path)) > before,
                timeout_s=HELD_S,
                say=lambda: (sizes, [each["Alive"] for each in ray.nodes()], processes("")),
            )
            last = interruptions(tmp_path)[-1]
            sizes.append((last.cause, last.world_size_before, last.world_size))

    def leave() -> None:
        node = next(iter(made.worker_nodes))
        if is_drained:  # as a cloud does before it takes a machine back
            words = ("drain-node", "--address", made.address, "--node-id", node.node_id, "--reason-message", "spot")
            deadline = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds", "10")
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words, *deadline], check=True, timeout=60)
            time.sleep(10)
        made.remove_node(node, allow_graceful=False)

    def add() -> None:
        words = (f"--address={made.address}", "--num-cpus=1", "--num-gpus=0")
        joined.enter_context(ray_node(*words, env=os.environ, log=tmp_path / "joining.log"))

    assert not ray.is_initialized()
    with machines(num_others=2) as made, contextlib.ExitStack() as joined, cluster(made.address):
        assert trained(tmp_path, "2..3", come_and_go) is None
    assert sizes == [("preempted", 3, 2), ("resized", 2, 3)]
    assert_whole(tmp_path)
