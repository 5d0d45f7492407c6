"""Cost of tracking for training: epochs with and without records, with a healthy and a failing tracking server.

Run `python -m benchmarks.tracking`. A process trains one run. Every other epoch is recorded as by `triaccel run` (event
log; a thread of this process ships it to a real MLflow server). The rest is not recorded. The server answers, is
killed, hangs, or a proxy answers 500 in its place. In the end it is back and must hold every value of the event log
once. The models have 3 and 60 layers, on a CPU; `--task` trains any task instead, on a GPU if there is one. Besides the
two times, which a busy machine blurs, the output has the time that the training process spends on records. State `twice
off` records nothing on either side: it shows the noise of the comparison. Exits with 1 if anything is lost, or if
records take more than 1% of the training time in any of the other states.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from benchmarks.trivial import Layers3, Layers60
from tests.service.mlflow_server import Server, assert_equals_log, only_run
from tests.service.proxy import Proxy, proxy_to
from triaccel_ray.service.tracking.shipper import Shipper
from triaccel_ray.service.tracking.tracker import Tracker
from triaccel_ray.trainables.registry import load_task

MAX_RECORDS_SHARE = 0.01
"""Largest share of the training time that records may take."""
SHIPPING_INTERVAL_S = 0.2
"""A tenth of the default, so that logs are shipped during every recorded epoch."""
Device = Literal["auto", "cpu", "cuda"]
STATES = ("twice off", "answers", "killed", "hangs", "answers 500")


@dataclass(frozen=True)
class EpochCost:
    """Costs of one epoch, in seconds."""

    wall: float
    cpu: float
    """CPU time of all threads of the training process."""
    records: float
    """Time within calls that append to the event log."""
    num_ticks: int
    """Number of those calls that recorded a tick."""


def train(commands: Connection, task: str, folder: Path, device: Device, data_dir: Path | None) -> None:
    """Trains an epoch for each command, with records if it is `on`, and answers with its cost; None ends it."""
    import torch

    from triaccel_ray.records.events import EventLog, Record, Tick
    from triaccel_ray.service.runs.spec import run_spec
    from triaccel_ray.service.runs.worker import Worker

    if device == "cpu":
        torch.set_num_threads(1)
    spent, num_ticks, command = 0.0, 0, "on"
    append = EventLog.append

    def timed(log: EventLog, record: Record) -> None:
        nonlocal spent, num_ticks
        if command != "on":
            return
        began = time.perf_counter()
        append(log, record)
        spent += time.perf_counter() - began
        num_ticks += isinstance(record, Tick)

    EventLog.append = timed  # type: ignore[method-assign, assignment]  # timed without a change to the package
    worker = Worker(replace(run_spec(task, data_dir), device=device), folder)
    worker.resume()
    while (command := commands.recv()) is not None:
        spent, num_ticks, began, cpu = 0.0, 0, time.perf_counter(), time.process_time()
        worker.advance()
        commands.send(EpochCost(time.perf_counter() - began, time.process_time() - cpu, spent, num_ticks))


class Trainer:
    """The training process, controlled from this one."""

    def __init__(self, task: str, folder: Path, device: Device, data_dir: Path | None = None) -> None:
        processes = get_context("spawn")
        self._commands, theirs = processes.Pipe()
        self._process = processes.Process(target=train, args=(theirs, task, folder, device, data_dir))
        self._process.start()
        theirs.close()  # so that an answer is not waited for if the process has died

    def epoch(self, which: str) -> EpochCost:
        """Trains an epoch with records `on` or `off`, and returns its cost."""
        self._commands.send(which)
        cost: EpochCost = self._commands.recv()
        return cost

    def end(self) -> None:
        """Waits for the process to end."""
        self._commands.send(None)
        self._process.join()


@contextlib.contextmanager
def state(name: str, server: Server, proxy: Proxy) -> Iterator[None]:
    """Keeps the server in state `name` for the duration of the context, then restores it."""
    if name == "killed":
        server.stop()
        yield
        server.start()
        server.wait()
    elif name == "hangs":
        with server.hanging():
            yield
    else:
        proxy.rule = lambda method, number: "error" if name == "answers 500" else "pass"
        yield
        proxy.rule = lambda method, number: "pass"


def show(name: str, off: Sequence[float], on: Sequence[float]) -> str:
    """Returns one line with medians and ranges of both sides, and the median and quartiles of the pairs' ratios."""
    sides = [f"{statistics.median(side):7.3f} s ({min(side):.3f} to {max(side):.3f})" for side in (off, on)]
    ratios = [with_ / without for with_, without in zip(on, off, strict=True)]
    low, median, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else 3 * ratios
    return f"    {name}  off {sides[0]}   on {sides[1]}   on/off {median:.3f} ({low:.3f} to {high:.3f})   n {len(on)}"


def measure(trainer: Trainer, folder: Path, server: Server, proxy: Proxy, rounds: int, states: Sequence[str]) -> float:
    """Prints one model's figures; returns the largest share of training time spent on records over the server's states.

    The share of a state is the median over its epochs, since a single epoch is too short on a busy machine.
    """
    experiment, tracker = folder.name, Tracker(proxy.uri, folder)
    shipper = Shipper(tracker, folder / "run", experiment=experiment, interval_s=SHIPPING_INTERVAL_S)
    shipper.start()
    for which in ("off", "on"):
        trainer.epoch(which)  # to warm up
    share = 0.0
    for name in states:
        took: dict[str, list[EpochCost]] = {"off": [], "on": []}
        with state(name, server, proxy):
            for number in range(rounds):
                for which in ("off", "on") if number % 2 else ("on", "off"):
                    took[which].append(trainer.epoch("off" if name == "twice off" else which))
        print(f"  server {name}")
        for kind in ("wall", "cpu"):
            off, on = ([float(getattr(each, kind)) for each in took[which]] for which in ("off", "on"))
            print(show(f"{kind} time", off, on))
        if name == "twice off":
            continue
        shares = [each.records / each.wall for each in took["on"]]
        num_ticks = sum(each.num_ticks for each in took["on"])
        per_tick = sum(each.records for each in took["on"]) / max(num_ticks, 1) * 1e3
        part = f"{statistics.median(shares):.2%} of the time ({max(shares):.2%} at most)"
        print(f"    records    {part}, {per_tick:.2f} ms a tick")
        share = max(share, statistics.median(shares))
    trainer.end()
    if not shipper.finish(60.0):
        raise SystemExit(f"LOST: {shipper.last_error}")
    direct = Tracker(server.uri, folder)
    num_values = assert_equals_log(direct, only_run(direct, experiment), folder / "run" / "events.jsonl")
    print(f"  all {num_values} values of the event log are in MLflow, once")
    return share


def tasks_of(given: argparse.Namespace) -> list[tuple[str, str, Device]]:
    """Returns title, name and device of each task to train."""
    if given.task is not None:
        load_task(given.task, given.data_dir)  # fails early on a wrong name
        return [(given.task, given.task, given.device)]
    models = [model for model in (Layers3, Layers60) if model.num_layers in given.models]
    return [(f"{each.num_layers} layers", f"{each.__module__}:{each.__name__}", "cpu") for each in models]


def main() -> int:
    """Measures all tasks and prints the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="epochs of each run with the server in each state")
    parser.add_argument("--states", nargs="+", default=STATES, choices=STATES)
    parser.add_argument("--models", type=int, nargs="+", default=[3, 60], help="numbers of layers")
    parser.add_argument("--task", help="a task in place of these models: a bundled one, or package.module:Class")
    parser.add_argument("--data-dir", type=Path, help="folder of that task's data files")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where that task is trained")
    given = parser.parse_args()
    tasks, shares = tasks_of(given), []
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, {given.rounds} epochs a side")
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name))
        server.start()
        try:
            server.wait()
            with proxy_to(server.uri) as proxy:
                for title, task, device in tasks:
                    print(title)
                    folder = Path(name) / title.replace(" ", "-")
                    trainer = Trainer(task, folder / "run", device, given.data_dir)
                    shares.append(measure(trainer, folder, server, proxy, given.rounds, given.states))
        finally:
            server.stop()
    if max(shares) > MAX_RECORDS_SHARE:
        print(f"TOO MUCH: records take {max(shares):.2%} of the training time")
    return int(max(shares) > MAX_RECORDS_SHARE)


if __name__ == "__main__":
    sys.exit(main())
