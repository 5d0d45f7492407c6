"""Reaching Ray: the cluster that is named, or one started on this machine for the time of the command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import gettempdir

import ray
import torch
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, without types

from triaccel_ray.config import require
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.service.cluster.head_watch import watching
from triaccel_ray.service.console import err
from triaccel_ray.service.credentials import without_credentials, without_passwords
from triaccel_ray.service.runs.environment import COMMIT_VARIABLE, commit_of
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.signals import as_interrupt, never_lost

CONNECT_TIMEOUT_S = 5.0


class ClusterUnavailableError(ValueError):
    """No Ray cluster answers at the address given."""

    reason: str = ""
    """What an attempt to reach it met."""


@contextlib.contextmanager
def cluster(address: str | None, *, num_cpus: int | None = None, last_words: str = "") -> Iterator[None]:
    """Connects to the Ray cluster at `address`; starts one on this machine when None, and stops it at the end.

    A process that is connected already, such as a notebook's, stays so: its workers are as its own `ray.init` said.
    `last_words` are said where the head is lost and nothing else can be done any more.

    Raises:
        ClusterUnavailableError: nothing answers at the address, or no Ray can start here.
        HeadLostError: nothing has answered there for half a minute.
    """
    is_own = not ray.is_initialized()
    with token_meanwhile() if is_own else contextlib.nullcontext():
        if is_own:
            try:
                _connect(address, num_cpus)
            except BaseException:
                ray.shutdown()  # Ctrl-C, perhaps: Ray's threads would miss the token, and say so
                raise
        # Ray's own handling of SIGTERM ends the process with a stack trace, before runs have ended their logs.
        with as_interrupt(signal.SIGTERM), watching(ray.get_runtime_context().gcs_address, last_words):
            try:
                yield
            finally:
                if is_own:
                    ray.shutdown()  # watched too: without a head it may wait


@contextlib.contextmanager
def token_meanwhile() -> Iterator[None]:
    """Has this process ask for a token, as a Ray that it starts has it do, until that Ray has ended, and no longer.

    Ray 2.60 lets it ask for ever. Of a cluster without tokens that it joined next all actors would be lost at once.
    """
    given = os.environ.get(AUTH_MODE_ENV_VAR)
    try:
        yield
    finally:
        if given is None and os.environ.pop(AUTH_MODE_ENV_VAR, None) is not None:
            Config.initialize("")  # has Ray read the environment again; there is no public way
            AuthenticationTokenLoader.instance().reset_cache()  # a token in it is asked for, whatever the mode


def _connect(address: str | None, num_cpus: int | None) -> None:
    require_reachable(address)
    # Ray's workers start elsewhere: a user's own task has to be importable from where the command was given.
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
        "PL_DISABLE_FORK": "1",  # this and the next as Tune's trials have them, so that they get a worker that is there
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        COMMIT_VARIABLE: commit_of(Path.cwd()),
    }
    try:
        with _started_here() if address is None else contextlib.nullcontext():
            ray.init(
                address=address or "local",
                num_cpus=num_cpus if address is None else None,
                include_dashboard=False if address is None else None,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env={"env_vars": variables},
            )
    except Exception as error:  # Ray raises a bare Exception where a node is slow to start
        if address is not None:
            raise _unavailable(address, first_line(error)) from error
        raise ClusterUnavailableError(
            f"Ray cannot start on this machine ({first_line(error)}): see that memory and room in {gettempdir()} are "
            "left and that RAY_TMPDIR, if set, is a folder of yours, or name a running cluster with --address"
        ) from error


def joined_address(given: str | None) -> str | None:
    """Returns the address of the Ray that this process is connected to, as a notebook may be; else the one given.

    Raises:
        ClusterUnavailableError: another one is given.
    """
    if not ray.is_initialized():
        return given
    running: str = ray.get_runtime_context().gcs_address
    if given not in (None, "auto", running):
        raise ClusterUnavailableError(
            f"address = {display_address(given)!r}: this process uses Ray at {running} already; leave the address out, "
            "or call ray.shutdown() first"
        )
    return running


@contextlib.contextmanager
def _started_here() -> Iterator[None]:
    """Has a Ray that starts meanwhile listen on this machine's loopback address alone, and its workers yield to nobody.

    On Linux its ports are open to the whole network otherwise, and `_node_ip_address="127.0.0.1"` does not change that:
    Ray puts the machine's own address in its place. Workers have a niceness of 15 otherwise: any other process on the
    machine would lengthen the steps by which trials are judged.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    variables = {ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0", ray_constants.RAY_WORKER_NICENESS: "0"}
    try:
        with environment_variables(variables), never_lost():
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process meanwhile, and of those that it starts; what they were is put back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def gpus_available() -> bool:
    """Returns whether the connected cluster has a GPU."""
    return bool(ray.cluster_resources().get("GPU", 0))


def gpu_fraction(num_sharing: int) -> float:
    """Returns what each of `num_sharing` trials asks of a GPU, so that as many and no more fit.

    Rounded down: Ray counts in ten-thousandths, and of six parts rounded up only five would fit.
    """
    return (10_000 // num_sharing) / 10_000


def gpus_of_a_run(spec: RunSpec, address: str | None) -> float:
    """Returns what each run asks Ray for: a GPU or its part of one, or none.

    `--device cuda` asks for one also where no machine of the cluster has any: Ray lets the runs wait for a machine that
    joins, and tells an autoscaler of them. `auto` uses what is there now, to the end.
    """
    if spec.device == "cpu":
        return 0.0
    if gpus_available():
        return gpu_fraction(spec.trials_per_gpu)
    if address is None:
        return 0.0
    waits = spec.device == "cuda"
    now = "now: everything trains on CPUs; with --device cuda it waits for a GPU"
    text = f"the cluster has no GPU {'yet: runs wait until a machine with one joins' if waits else now}"
    err.print(text, style="yellow", markup=False, soft_wrap=True)
    return gpu_fraction(spec.trials_per_gpu) if waits else 0.0


def require_gpu_to_share(address: str | None, spec: RunSpec) -> None:
    """Returns if one trial a GPU is asked for, or there is a GPU: a mistake must not use up a search's name.

    On a cluster, `--device cuda` waits for a GPU, and need not find one.

    Raises:
        ValueError: several trials are to share a GPU, and neither this machine nor the cluster at `address` has one.
    """
    if spec.trials_per_gpu == 1 or (address is not None and spec.device == "cuda"):
        return
    if address is None:
        found, where = torch.cuda.is_available(), "this machine"
    else:
        with cluster(address):
            found, where = gpus_available(), "the cluster"
    rule = f"{where} has no GPU to share; leave it out: on CPUs as many trials run at once as there are CPUs"
    require(found, "trials-per-gpu", spec.trials_per_gpu, rule)


def require_reachable(address: str | None) -> None:
    """Returns if a Ray cluster answers at the address; Ray itself would wait for minutes, and print warnings.

    Of Ray's client server (ray://), and where Ray's ports speak TLS, the port alone is tried.

    Raises:
        ClusterUnavailableError: none does.
    """
    require_listening(address)
    speaks_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    if address in (None, "auto", "local") or address.startswith("ray://") or speaks_tls:
        return
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:  # a cluster that asks for a token
                raise _unavailable(address, "what listens there is no Ray") from error


def require_listening(address: str | None) -> None:
    """Returns if something listens at the address.

    Raises:
        ClusterUnavailableError: nothing does.
    """
    if address in (None, "auto", "local"):
        return
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator:
        raise _unavailable(address, "an address is host:port or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _unavailable(address, first_line(error)) from error


def display_address(address: str) -> str:
    """Returns `address` without user and password, fit for messages; it may have no scheme."""
    if "://" in address or "@" not in address:
        return without_credentials(address)
    return f"***@{address.rpartition('@')[2]}"


def _unavailable(address: str, reason: str) -> ClusterUnavailableError:
    error = ClusterUnavailableError(
        f"address = {display_address(address)!r}: no Ray cluster answers there ({without_passwords(reason)}); start "
        "one with `ray start --head`, or leave --address out to run on this machine. Where it asks for a token, copy "
        "its head node's ~/.ray/auth_token to the same place here and set RAY_AUTH_MODE=token"
    )
    error.reason = without_passwords(reason)
    return error
