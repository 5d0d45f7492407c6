"""MLflow's UI for as long as the command lasts: a server of its own, of which nothing outlives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil

from triaccel_ray.service.endings import as_interrupt

GRACE_S = 10.0
"""For a server that was asked to end, before it is killed."""
ALLOWED_HOSTS = "MLFLOW_SERVER_ALLOWED_HOSTS"
ALLOWED_ORIGINS = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"


def exposure(host: str, port: int) -> str:
    """Returns what to know of a server that other machines reach: who may do what, and under which names."""
    text = f"--host {host}: everybody who reaches this machine can read and delete runs"
    if os.environ.get(ALLOWED_HOSTS) and os.environ.get(ALLOWED_ORIGINS):
        return text
    return (
        f"{text}; browsers elsewhere are answered 403 unless the environment allows the name by which they call: "
        f"{ALLOWED_HOSTS}=NAME:{port} {ALLOWED_ORIGINS}=http://NAME:{port}"
    )


def serve(store_uri: str, host: str, port: int) -> int:
    """Returns the exit status of the server once it has ended; 0 where a signal has asked for that."""
    # One worker and no job executor: a fifth of the memory, a third of the time to start.
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **os.environ}
    words = ["server", "--backend-store-uri", store_uri, "--host", host, "--port", str(port), "--workers", "1"]
    with as_interrupt(signal.SIGTERM, signal.SIGHUP):  # of a service manager, and of a terminal that is closed
        server = subprocess.Popen([sys.executable, "-m", "mlflow", *words], env=environment)
        try:
            return server.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes below it; one that takes long, or a second signal, has them killed."""
    if server.poll() is not None:
        return
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    try:
        server.terminate()
        psutil.wait_procs(processes, timeout=GRACE_S)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.wait()
