"""How a cluster is reached and its GPUs are shared, and what is refused."""

import contextlib
import os
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest
import ray
import torch
import yaml
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.service.own_task import own_spec
from triaccel_ray.service.cluster.cluster import (
    ClusterUnavailableError,
    cluster,
    environment_variables,
    gpu_fraction,
    gpus_of_a_run,
    require_gpus,
    require_reachable,
)
from triaccel_ray.service.runs.launch import num_groups
from triaccel_ray.service.runs.spec import MAX_TRIALS_PER_GPU


@pytest.mark.parametrize("num_sharing", range(1, MAX_TRIALS_PER_GPU + 1))
def test_as_many_trials_as_asked_for_fit_on_a_gpu(num_sharing: int) -> None:
    ten_thousandths = round(gpu_fraction(num_sharing) * 10_000)  # in which Ray counts
    assert num_sharing * ten_thousandths <= 10_000 < (num_sharing + 1) * ten_thousandths


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to share")
def test_without_a_gpu_there_is_nothing_to_share() -> None:
    require_gpus(None, own_spec("digits", device="auto"))
    require_gpus("10.0.0.1:6379", own_spec("digits", device="cuda", trials_per_gpu=2))  # one may join
    with pytest.raises(ValueError, match="trials-per-gpu = 2: this machine has no GPU to share; leave it out"):
        require_gpus(None, own_spec("digits", device="auto", trials_per_gpu=2))


def test_a_cluster_with_too_few_gpus_says_how_many_it_has_and_waits_only_if_told(
    cluster_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="gpus = '3': the cluster has 2 GPUs; give at most 2"):
        require_gpus(cluster_address, own_spec("digits", device="auto", gpus="3"))
    waiting, fitting = (own_spec("digits", device="cuda", gpus=gpus) for gpus in ("3..4", "2"))
    require_gpus(cluster_address, waiting)
    with cluster(cluster_address):
        assert gpus_of_a_run(waiting, cluster_address) == 1.0
        assert "the cluster has 2 GPUs now: the run waits for 3" in capsys.readouterr().err
        assert gpus_of_a_run(fitting, cluster_address) == 1.0
        assert capsys.readouterr().err == ""


def test_as_many_groups_train_at_a_time_as_fit(cluster_address: str) -> None:
    with cluster(cluster_address):  # two GPUs, two CPUs
        found = {gpus: num_groups(own_spec("digits", device="auto", gpus=gpus), 1.0) for gpus in ("1", "2", "1..2")}
        assert found == {"1": None, "2": 1, "1..2": 1}
        assert num_groups(own_spec("digits", device="cpu", gpus="2"), 0.0) == 1


def test_a_ray_that_cannot_start_here_is_not_blamed_on_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster_address: str
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    (tmp_path / "file").touch()
    with (
        environment_variables({"RAY_TMPDIR": str(tmp_path / "file" / "below")}),
        pytest.raises(ClusterUnavailableError, match=r"Ray cannot start on this machine \(.*RAY_TMPDIR"),
        cluster(None),
    ):
        pass
    assert "RAY_AUTH_MODE" not in os.environ  # Ray sets it before it fails
    assert get_authentication_mode() == AuthenticationMode.DISABLED
    with cluster(cluster_address):  # which has no tokens: an actor that had to bring one would be lost
        counter = ray.remote(Counter).options(num_cpus=0).remote("aab")
        assert ray.get(counter.most_common.remote(1), timeout=60) == [("a", 2)]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"])
def test_what_listens_and_is_no_ray_is_refused_without_asking_again(
    answer: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("triaccel_ray.service.cluster.cluster.CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_all, args=(server, answer))
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ClusterUnavailableError, match=r"\(what listens there is not Ray\)"):
            require_reachable(address)
        server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join()
    assert capfd.readouterr().err == ""


def _answer_all(server: socket.socket, answer: bytes) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # until it is shut down
        while True:
            stack.enter_context(server.accept()[0]).sendall(answer)


def test_the_file_for_ray_up_is_one_that_ray_takes() -> None:
    config = yaml.safe_load((Path(__file__).parents[3] / "docs" / "cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token" in prepared[commands][-1]
    assert "RAY_enable_autoscaler_v2=0" in prepared["head_start_ray_commands"][-1]
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
