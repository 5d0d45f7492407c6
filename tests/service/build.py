"""Event logs as runs write them: real records from the real policy, on a simulated device."""

import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.decide.build import USUAL
from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import decide, initial_decision
from triaccel_ray.measure.score import BYTES_PER_GB, efficiency_score
from triaccel_ray.records.events import End, Epoch, EventLog, Interruption, Record, Start, Tick, read_events
from triaccel_ray.records.plan import Applied, Fault, FaultKind, Plan
from triaccel_ray.records.signals import LayerSignal, MemorySignal, Observation

RESNET = (
    "conv1",
    *(
        f"layer{stage}.{block}.{part}"
        for stage in (1, 2, 3, 4)
        for block in (0, 1)
        for part in ("conv1", "conv2", *(["downsample.0"] if stage > 1 and block == 0 else []))
    ),
    "fc",
)
"""The 21 layers of a ResNet-18."""

SMALL = ("features.0", "features.2", "head")

CONTROL = ControlConfig(
    precision=PrecisionConfig(tau_low=3e-7, tau_high=2e-5),
    curvature=CurvatureConfig(every_steps=200, alpha=0.05, tau_curv=30.0),
    batch=BatchConfig(start=96, minimum=32, maximum=512, rho_low=0.6, rho_high=0.85, oom_cooldown_ticks=8),
)

LIMIT_BYTES = 4 * 2**30


@dataclass
class SimulatedRun:
    """Writes the log of one run: variances fall, eigenvalues rise, memory follows the batch, one step fails."""

    folder: Path
    names: tuple[str, ...] = SMALL
    control: ControlConfig = CONTROL
    capacity: int = 416
    """Largest batch that fits."""
    seed: int = 0
    steps_per_epoch: int = 200
    has_pictures: bool = True
    """Whether pictures lie in the folder when the run ends; drawing them takes longer than anything else."""
    info: dict[str, str] = field(
        default_factory=lambda: {"task": "cifar10-resnet18", "method": "triaccel", "seed": "0"}
    )
    parameters: dict[str, float | int | str | bool | None] = field(
        default_factory=lambda: {"recipe.lr": 0.1, "recipe.epochs": 4, "budget": None}
    )

    def __post_init__(self) -> None:
        self.path = self.folder / "events.jsonl"
        self.num_records = 0
        self._chance = random.Random(self.seed)
        first = initial_decision(self.control, [(name, USUAL) for name in self.names])
        self._plan, self._state = first.plan, first.state
        self._peak = 0
        self.step = self.tick = self.epoch = 0

    def append(self, *records: Record) -> None:
        """Writes records as a process does that opens the log for each of them, and holds no file in between."""
        log = EventLog(self.path, keep=self.num_records)
        for record in records:
            log.append(record)
        self.num_records = log.num_records
        log.close()

    def resume(self, *, keep: int) -> list[Record]:
        """Cuts the log back to its first `keep` records, as a run that resumes from a checkpoint.

        Returns those cut off, which it will write again.
        """
        lost = [event.record for event in read_events(self.path)][keep:]
        self.num_records = keep
        self.append()
        return [record for record in lost if not isinstance(record, End)]

    def go_back(self, *, epochs: int) -> None:
        """Cuts the log back to its first epochs; what follows is another attempt, with other batches and memory."""
        events = list(read_events(self.path))
        last = max(
            (event.record.epoch, place)
            for place, event in enumerate(events)
            if isinstance(event.record, Epoch) and event.record.epoch <= epochs
        )[1]
        ticks = [event.record for event in events[:last] if isinstance(event.record, Tick)]
        self.resume(keep=last + 1)
        self.step, self.tick, self.epoch = ticks[-1].observation.step, len(ticks), epochs
        self._plan, self._state = ticks[-1].decision.plan, ticks[-1].decision.state
        self.append(Interruption(cause="preempted", message="the process was lost", epoch=epochs))

    def start(self, *, epochs: int = 0) -> None:
        """The beginning of the log, and that many epochs."""
        self.append(Start(control=self.control, info=self.info, parameters=self.parameters))
        self.train(epochs)

    def train(self, epochs: int) -> None:
        """That many epochs, a tick every `every_steps` steps."""
        for _ in range(epochs):
            ticks = [self.make_tick() for _ in range(self.steps_per_epoch // self.control.every_steps)]
            self.epoch += 1
            self.append(*ticks, self.make_epoch())

    def end(self, status: str = "finished", cause: str = "", message: str = "") -> None:
        results = {"accuracy": 91.5, "score": 7.25} if status == "finished" else {}
        self.append(End(status=status, cause=cause, message=message, results=results))
        if self.has_pictures:
            (self.folder / "figures").mkdir(exist_ok=True)
            (self.folder / "figures" / "overview.png").write_bytes(b"not looked at")

    def complete(self, epochs: int = 2) -> Path:
        """A whole finished run; returns its folder."""
        self.start(epochs=epochs)
        self.end()
        return self.folder

    def make_tick(self) -> Tick:
        self.step += self.control.every_steps
        observation = self._observe()
        decision = decide(self.control, observation, self._state)
        self._plan, self._state = decision.plan, decision.state
        self.tick += 1
        return Tick(observation=observation, decision=decision, applied=Applied(plan=decision.plan))

    def make_epoch(self) -> Epoch:
        accuracy = 94.0 - 60.0 * math.exp(-self.epoch / 4.0)
        seconds = 6.0 + 400.0 / self._plan.batch_size
        return Epoch(
            epoch=self.epoch,
            step=self.step,
            train_loss=self._loss(),
            held_out_metrics={"accuracy": accuracy},
            held_out_loss=self._loss() + 0.08 + 0.004 * self.epoch,
            seconds=seconds,
            images_per_second=50_000 / seconds,
            batch_size=self._plan.batch_size,
            peak_bytes=self._peak,
            allocated_peak_bytes=self._peak // 2,
            num_skipped=1,
            score=efficiency_score(accuracy, seconds, self._peak / BYTES_PER_GB),
        )

    def _observe(self) -> Observation:
        size, step = self._plan.batch_size, self.step - 7
        fault = Fault(kind=FaultKind.OUT_OF_MEMORY, step=step, phase="forward_backward", batch_size=size)
        measured = self.step % self.control.curvature.every_steps == 0
        return Observation(
            step=self.step,
            tick=self.tick,
            epoch=self.step / self.steps_per_epoch,
            plan=self._plan,
            layers=tuple(self._signal(row, name, measured=measured) for row, name in enumerate(self.names)),
            memory=self._memory(self._plan),
            loss=self._loss(),
            loss_scale=2.0**16,
            num_skipped=1 if self.tick > 3 else 0,
            faults=(replace(fault, micro_batch_size=size // 2),) if size > self.capacity else (),
        )

    def _signal(self, row: int, name: str, *, measured: bool) -> LayerSignal:
        depth = row / max(len(self.names) - 1, 1)
        size = 10.0 ** (-3.6 - 1.8 * math.sin(math.pi * depth) - 2.4 * min(self.step / 3000, 1.0))
        variance = size * self._chance.lognormvariate(0.0, 0.35)
        top = 60.0 * (1.2 - depth) * (1.0 - math.exp(-self.step / 1500)) * self._chance.lognormvariate(0.0, 0.3)
        eigenvalues = tuple(top / (rank + 1) for rank in range(3)) if measured else None
        return LayerSignal(name=name, variance=variance, eigenvalues=eigenvalues)

    def _memory(self, plan: Plan) -> MemorySignal:
        words = sum(level.bytes_per_element for level in plan.precision.values()) / (4 * len(plan.precision))
        used = int(0.9e9 + 1.1e7 * words * plan.batch_size * self._chance.uniform(0.98, 1.02))
        used = min(used, LIMIT_BYTES)
        self._peak = max(self._peak, used)
        return MemorySignal(
            used_bytes=int(0.95 * used),
            window_peak_bytes=used,
            peak_bytes=self._peak,
            limit_bytes=LIMIT_BYTES,
            allocated_bytes=used // 2,
            allocated_peak_bytes=self._peak // 2,
        )

    def _loss(self) -> float:
        return 2.3 * math.exp(-self.step / 900) + 0.05 + 0.03 * self._chance.random()
