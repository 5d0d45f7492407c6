"""Connects to Ray: to a given cluster, or to one started on this machine for the duration of the command."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import ray
import torch
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled, without types

from triaccel_ray.config import require
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.service.cluster.head_watch import connection_error, stops_answering, watching
from triaccel_ray.service.console import err
from triaccel_ray.service.credentials import display_address, without_passwords
from triaccel_ray.service.runs.environment import COMMIT_VARIABLE, commit_of
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.signals import as_interrupt, deferring_interrupt
from triaccel_ray.service.units import counted

CONNECT_TIMEOUT_S = 5.0


class ClusterUnavailableError(ValueError):
    """No Ray cluster answers at the given address, or none can be started."""


@contextlib.contextmanager
def cluster(address: str | None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Connects to the Ray cluster at `address`; if None, starts one on this machine and stops it at the end.

    A process that is already connected, such as a notebook's, stays so, with workers as its own `ray.init` set them up.

    Raises:
        ClusterUnavailableError: nothing answers at the address, or Ray cannot start here.
        HeadLostError: the head has not answered for half a minute.
    """
    is_own = not ray.is_initialized()
    with scoped_token_auth() if is_own else contextlib.nullcontext():
        if is_own:
            try:
                _connect(address, num_cpus)
            except BaseException:
                ray.shutdown()  # after Ctrl-C, say: Ray's threads would miss the token and report it
                raise
        gcs_address = ray.get_runtime_context().gcs_address
        # If SIGTERM goes to the process group, a Ray started here ends, too, and Tune's handler would wait for it.
        at_once = partial(stops_answering, gcs_address) if is_own and address is None else bool
        # Ray's own SIGTERM handler ends the process with a stack trace, before runs have ended their logs.
        with as_interrupt(signal.SIGTERM, at_once=at_once), watching(gcs_address):
            try:
                yield
            finally:
                if is_own:
                    ray.shutdown()


@contextlib.contextmanager
def scoped_token_auth() -> Iterator[None]:
    """Limits token authentication, which a Ray started here turns on in this process, to the lifetime of that Ray.

    Ray 2.60 leaves it on for ever. If the process next joined a cluster without tokens, it would lose all actors.
    """
    given = os.environ.get(AUTH_MODE_ENV_VAR)
    try:
        yield
    finally:
        if given is None and os.environ.pop(AUTH_MODE_ENV_VAR, None) is not None:
            Config.initialize("")  # makes Ray read the environment again; there is no public API
            AuthenticationTokenLoader.instance().reset_cache()  # a cached token is required, whatever the mode


def _connect(address: str | None, num_cpus: int | None) -> None:
    require_reachable(address)
    # Ray's workers start in another folder, but must import a user's own task from the folder of the command.
    paths = [os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
        "PL_DISABLE_FORK": "1",  # this and the next as in Tune's trials, which can then reuse an idle worker
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        COMMIT_VARIABLE: commit_of(Path.cwd()),
    }
    try:
        with _local_ray_settings() if address is None else contextlib.nullcontext():
            ray.init(
                address=address or "local",
                num_cpus=num_cpus if address is None else None,
                include_dashboard=False if address is None else None,
                logging_level=logging.ERROR,
                log_to_driver=False,
                runtime_env={"env_vars": variables},
            )
    except Exception as error:  # Ray raises a bare Exception if a node is slow to start
        if address is not None:
            raise _unavailable(address, first_line(error)) from error
        raise ClusterUnavailableError(
            f"Ray cannot start on this machine ({first_line(error)}): check that memory and disk space in "
            f"{gettempdir()} are left and that RAY_TMPDIR, if set, is your own folder, or name a running cluster with "
            "--address"
        ) from error


def joined_address(given: str | None) -> str | None:
    """Returns the address of the Ray that this process is connected to, as a notebook may be; else `given`.

    Raises:
        ClusterUnavailableError: `given` is another address.
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
def _local_ray_settings() -> Iterator[None]:
    """Makes a Ray that starts inside the block listen on loopback alone, and gives its workers normal priority.

    It records no task events: nothing reads them, and its end would wait 5 s for them if its head is gone.

    By default its ports on Linux are open to the whole network. `_node_ip_address="127.0.0.1"` does not help: Ray
    replaces it with the machine's own address. By default workers have a niceness of 15, and any other process on the
    machine would lengthen the steps by which trials are judged.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    variables = {
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        ray_constants.RAY_WORKER_NICENESS: "0",
        "RAY_task_events_report_interval_ms": "0",
    }
    try:
        with environment_variables(variables), deferring_interrupt():
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process and its children inside the block, and restores them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gpu_fraction(num_sharing: int) -> float:
    """Returns the fraction of a GPU that each of `num_sharing` trials requests, so that exactly that many fit.

    Rounded down to Ray's resolution of 1/10000: if six parts were rounded up, only five would fit.
    """
    return (10_000 // num_sharing) / 10_000


def gpus_of_a_run(spec: RunSpec, address: str | None) -> float:
    """Returns the number of GPUs that each run requests from Ray: one, a fraction of one, or none.

    `--device cuda` requests a GPU even if no machine of the cluster has one. Ray then lets the runs wait until such a
    machine joins, and reports them to an autoscaler. `auto` decides by the GPUs present now, for all runs.
    """
    if spec.device == "cpu":
        return 0.0
    present, num_gpus, text = int(ray.cluster_resources().get("GPU", 0)), gpu_fraction(spec.trials_per_gpu), ""
    if present == 0 and (address is None or spec.device == "auto"):
        num_gpus, text = 0.0, "everything trains on CPUs; with --device cuda it waits for a GPU"
    elif present < spec.gpu_range[0]:  # as asked, by --device cuda: `require_gpus` has refused it otherwise
        text = f"the run waits for {spec.gpu_range[0]}"
    if text and address is not None:
        err.print(f"the cluster has {counted(present, 'GPU')} now: {text}", style="yellow", soft_wrap=True)
    return num_gpus


def require_gpus(address: str | None, spec: RunSpec) -> None:
    """Raises ValueError if this machine, or the cluster at `address`, has no GPU to share, or too few for `--gpus`.

    On a cluster, `--device cuda` waits for GPUs, so none needs to be present.
    """
    if spec.trials_per_gpu == 1 and not spec.is_distributed:
        return
    if address is not None and spec.device == "cuda":
        return
    where, found = "this machine", {"CPU": os.cpu_count() or 1, "GPU": torch.cuda.device_count()}
    if address is not None:
        with cluster(address):
            where, found = "the cluster", ray.cluster_resources()
    num_cpus, num_gpus = int(found.get("CPU", 0)), int(found.get("GPU", 0))
    rule = f"{where} has no GPU to share; leave it out: a machine without a GPU trains one trial at a time"
    require(num_gpus > 0 or spec.trials_per_gpu == 1, "trials-per-gpu", spec.trials_per_gpu, rule)
    uses_gpus = spec.device == "cuda" or (spec.device == "auto" and num_gpus > 0)
    kind = counted(num_gpus, "GPU") if uses_gpus else f"{counted(num_cpus, 'CPU')} for processes in place of GPUs"
    rule = f"{where} has {kind}; give at most {num_gpus if uses_gpus else num_cpus}"
    require(spec.gpu_range[0] <= (num_gpus if uses_gpus else num_cpus), "gpus", spec.gpus, rule)


def require_reachable(address: str | None) -> None:
    """Raises ClusterUnavailableError unless the address is None, or a Ray cluster answers there."""
    if address is not None and (reason := reason_unreachable(address)):
        raise _unavailable(address, reason)


def reason_unreachable(address: str) -> str:
    """Returns why no Ray cluster answers at the address, else ""; Ray itself would wait for minutes and print warnings.

    For the Ray Client server (ray://), or if Ray's ports use TLS, only the port is checked.
    """
    if address in ("auto", "local"):
        return ""
    if ":" not in address.removeprefix("ray://"):
        return "an address is host:port or auto"
    if reason := connection_error(address.removeprefix("ray://"), CONNECT_TIMEOUT_S):
        return reason
    speaks_tls = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    if address.startswith("ray://") or speaks_tls:
        return ""
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:  # the answer of a cluster that requires a token
                return "what listens there is not Ray"
    return ""


def _unavailable(address: str, reason: str) -> ClusterUnavailableError:
    return ClusterUnavailableError(
        f"address = {display_address(address)!r}: no Ray cluster answers there ({without_passwords(reason)}); start "
        "one with `ray start --head`, or leave --address out to run on this machine. Where it asks for a token, copy "
        "its head node's ~/.ray/auth_token to the same place here and set RAY_AUTH_MODE=token"
    )
