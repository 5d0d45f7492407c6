"""Serves MLflow's UI while the command runs; the server process ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

from triaccel_ray.config import check_field, require
from triaccel_ray.service.console import out
from triaccel_ray.service.signals import as_interrupt
from triaccel_ray.service.tracking.tracker import Tracker, sqlite_path

_GRACE_S = 10.0
"""Seconds that a server gets to shut down before it is killed."""


def runs_pages(tracker: Tracker, base: str) -> dict[str, str]:
    """Returns experiment -> URL of its runs page, for experiments with runs, the one with the latest run first.

    The page of an experiment itself, and a click on it in MLflow's list, show chat traces, of which there are none.
    """
    latest = {}
    for experiment in tracker.client.search_experiments():
        runs = tracker.client.search_runs([experiment.experiment_id], order_by=["start_time DESC"], max_results=1)
        for run in runs:
            page = f"{base}/#/experiments/{experiment.experiment_id}/runs?workflowType=machine_learning"
            latest[experiment.name] = run.info.start_time, page
    return {name: page for name, (_, page) in sorted(latest.items(), key=lambda item: item[1], reverse=True)}


def show(tracker: Tracker, host: str, port: int) -> int:
    """Prints the page of each experiment, serves a SQLite store until Ctrl-C, and returns the exit status.

    Raises:
        ValueError: the port is in use, this machine does not have the address `host`, or there is no such store.
    """
    check_field("port", port, int, "[1, 65535]")
    base, title, file = f"http://{host}:{port}", "MLflow UI (Ctrl-C ends it)", sqlite_path(tracker.uri)
    if file is None:
        base, title = tracker.uri.rstrip("/"), "the tracking server has its own UI:"
    else:
        rule = "there is no such file, so nothing is recorded there; name the folder of your runs with --storage-path"
        require(file.is_file(), "tracking uri", tracker.uri, f"{rule}, or their store with --tracking-uri")
        _require_free(host, port)
    tracker.prepare()
    lines = [f"{name}: {page}" for name, page in runs_pages(tracker, base).items()] or ["no runs are recorded yet"]
    out.print("\n".join([title, *lines, f"store: {tracker.uri}"]), soft_wrap=True)
    sys.stdout.flush()
    return 0 if file is None else _serve(tracker.uri, host, port)


def _require_free(host: str, port: int) -> None:
    """Checks that a server could listen there; MLflow's own ends without an error status if it cannot."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            probe.bind(address)
    except OSError as error:
        rule = f"cannot be served at ({error.strerror}); choose another --port or --host"
        raise ValueError(f"(host, port) = ({host!r}, {port}): {rule}") from error


def _serve(store_uri: str, host: str, port: int) -> int:
    """Serves the UI and returns the exit status of the server; 0 if a signal ended it."""
    # One worker and no job executor: a fifth of the memory, a third of the time to start.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **os.environ}
    arguments = ["server", "--backend-store-uri", store_uri, "--host", host, "--port", str(port), "--workers", "1"]
    with as_interrupt(signal.SIGTERM, signal.SIGHUP):  # from a service manager, and from a closed terminal
        # A session of its own, so that Ctrl-C reaches this process alone and the server ends without a traceback.
        server = subprocess.Popen([sys.executable, "-m", "mlflow", *arguments], env=environment, start_new_session=True)
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            server.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(_GRACE_S)
            finally:  # kills the process group after the grace period or a second signal, and whatever the server left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()
