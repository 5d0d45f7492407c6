"""Values that the policy's tests are made of: short builders, a simulated machine, and random configurations."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, PrecisionConfig
from triaccel_ray.decide import ControlState, Decision, decide, initial_decision
from triaccel_ray.records.plan import Fault, FaultKind, Plan, Precision, ReasonCode
from triaccel_ray.records.signals import LayerSignal, MemorySignal, NoiseSignal, Observation

LIMIT = 1000
IN_BAND = 0.8
FP8, FP16, BF16, FP32 = Precision
USUAL = FP16, BF16, FP32
"""Precisions of a layer to which FP8 is not offered."""


def plan_of(batch_size: int = 96, num_micro_batches: int = 1, **precision: Precision) -> Plan:
    return Plan(batch_size=batch_size, num_micro_batches=num_micro_batches, precision=precision or {"conv": BF16})


def memory_signal(used_bytes: int, limit_bytes: int, free_bytes: int | None = None) -> MemorySignal:
    """Memory of which as much was used throughout the interval."""
    used = dict.fromkeys(("used_bytes", "window_peak_bytes", "peak_bytes"), used_bytes)
    return MemorySignal(**used, limit_bytes=limit_bytes, free_bytes=free_bytes)


def memory_of(share: float = IN_BAND) -> MemorySignal:
    return memory_signal(round(share * LIMIT), LIMIT)


def observation_of(
    plan: Plan, *layers: LayerSignal, share: float = IN_BAND, tick: int = 0, **others: Any
) -> Observation:
    """An observation of `plan`; layers that are not given have no statistic."""
    named = {signal.name: signal for signal in layers}
    others.setdefault("memory", memory_of(share))
    all_layers = tuple(named.get(name, LayerSignal(name=name)) for name in plan.precision)
    return Observation(step=50 * (tick + 1), tick=tick, epoch=0.0, plan=plan, layers=all_layers, **others)


def out_of_memory(batch_size: int, micro_batch_size: int = 0, phase: str = "forward_backward") -> Fault:
    return Fault(
        kind=FaultKind.OUT_OF_MEMORY, step=1, phase=phase, batch_size=batch_size, micro_batch_size=micro_batch_size
    )


def capture_out_of_memory(batch_size: int, micro_batch_size: int | None = None) -> Fault:
    at_once = batch_size if micro_batch_size is None else micro_batch_size
    kind = FaultKind.CAPTURE_OUT_OF_MEMORY
    return Fault(kind=kind, step=1, phase="capture", batch_size=batch_size, micro_batch_size=at_once)


def lowering_refused(*layers: str) -> Fault:
    return Fault(
        kind=FaultKind.LOWERING_REFUSED, step=1, phase="precision", layers=layers, detail="the loss would rise"
    )


def apply_failed(batch_size: int = 0) -> Fault:
    return Fault(kind=FaultKind.APPLY_FAILED, step=1, phase="apply", batch_size=batch_size, detail="no step for it")


def codes(decision: Decision, subject: str) -> list[ReasonCode]:
    return [reason.code for reason in decision.reasons if reason.subject == subject]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device whose memory use is affine in the samples that pass at once and in the bytes of each layer."""

    names: tuple[str, ...] = ("conv", "block", "head")
    supported: tuple[Precision, ...] = USUAL
    fixed_bytes: int = 1000
    bytes_per_sample: int = 10
    """Bytes a sample takes in each layer at two bytes an element."""
    limit_bytes: int = 10_000
    capacity_bytes: float = math.inf
    """What a step cannot exceed without running out of memory."""
    capturable_bytes: float = math.inf
    """What a step cannot exceed as a CUDA graph."""
    free_bytes: int | None = None

    def used_bytes(self, plan: Plan, samples_at_once: int) -> int:
        words = sum(level.bytes_per_element // 2 for level in plan.precision.values())
        return self.fixed_bytes + samples_at_once * self.bytes_per_sample * words

    def run(self, plan: Plan) -> dict[str, Any]:
        """What is seen of an interval under `plan`; faults are what ran out of memory: the step or its capture."""
        at_once = largest = math.ceil(plan.batch_size / plan.num_micro_batches)
        while at_once > 1 and self.used_bytes(plan, at_once) > self.capacity_bytes:
            at_once //= 2
        used = self.used_bytes(plan, at_once)
        memory = memory_signal(used, self.limit_bytes, self.free_bytes)
        faults = (out_of_memory(plan.batch_size, at_once),) if at_once < largest else ()
        if used > self.capturable_bytes:
            faults = (capture_out_of_memory(plan.batch_size, at_once), *faults)
        return {"memory": memory, "faults": faults, "step_ms": float(plan.batch_size)}


@dataclass
class Run:
    """A closed loop of the policy and a machine; the machine may be exchanged between ticks."""

    config: ControlConfig
    machine: Any = field(default_factory=Machine)
    regions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        layers = [(name, self.machine.supported) for name in self.machine.names]
        self.decision = initial_decision(self.config, layers, self.regions)
        self.plan = self.decision.plan
        self.log: list[tuple[Observation, Decision]] = []

    def step(self, *layers: LayerSignal, apply_fails: bool = False, **others: Any) -> tuple[Observation, Decision]:
        """One interval and its tick; with `apply_fails` the plan in force stays and the next tick hears of it."""
        seen = self.machine.run(self.plan)
        faults = (*seen.pop("faults"), *others.pop("faults", ()))
        observation = observation_of(self.plan, *layers, tick=len(self.log), faults=faults, **{**seen, **others})
        self.decision = decide(self.config, observation, self.decision.state)
        if not apply_fails:
            self.plan = self.decision.plan
        self.log.append((observation, self.decision))
        return self.log[-1]

    def batch_sizes(self, ticks: int) -> list[int]:
        """The batch sizes decided by that many quiet ticks."""
        return [self.step()[1].plan.batch_size for _ in range(ticks)]


MIDDLE = LayerSignal(name="conv", variance=1e-5)


class Loop(Run):
    """The policy on a device where a step takes what `cost` says of its plan, in milliseconds."""

    def __init__(
        self, config: ControlConfig, cost: Callable[[Plan], float | None], layer: LayerSignal = MIDDLE
    ) -> None:
        super().__init__(config, Machine(names=("conv",)))
        self.cost, self.layer, self.share = cost, layer, 0.8

    def tick(self, **others: Any) -> Decision:
        return self.step(self.layer, memory=memory_of(self.share), step_ms=self.cost(self.plan), **others)[1]

    def run(self, num_ticks: int) -> list[Decision]:
        return [self.tick() for _ in range(num_ticks)]

    @property
    def state(self) -> ControlState:
        return self.decision.state


def eventful_run(
    config: ControlConfig, machine: Machine, seed: int, ticks: int
) -> Iterator[tuple[Observation, Decision]]:
    """A run in which variances walk, eigenvalues come now and then, memory is taken and given back, things fail,
    FP16 overflows, captures find no memory, and lower precisions are refused."""
    chance, aside, captures, timing, refusals = (random.Random(seed + i) for i in range(5))
    is_captured = timing.random() < 0.7
    spent = 0.5 * is_captured
    num_skipped = 0
    variances = {name: 10.0 ** chance.uniform(-8, -2) for name in machine.names}
    run = Run(config, machine)
    pending: tuple[Fault, ...] = ()
    for tick in range(ticks):
        measured = tick % 4 == 3
        layers = []
        for name in machine.names:
            variances[name] *= 10.0 ** chance.gauss(0.0, 0.7)
            eigenvalues = tuple(chance.lognormvariate(1.0, 2.0) for _ in range(3)) if measured else None
            variance = variances[name] if tick > 0 else None
            layers.append(
                LayerSignal(name=name, variance=variance, eigenvalues=eigenvalues, supported=machine.supported)
            )
        noise = NoiseSignal(mean_square_norm=chance.gauss(1.0, 1.0), trace_covariance=chance.uniform(0.0, 500.0))
        if chance.random() < 0.2:
            taken = chance.choice([None, 0, 100, 1000])
            capacity = machine.limit_bytes * chance.choice([0.2, 0.5, 1.0])
            capturable = machine.limit_bytes * captures.choice([0.5, 0.7, 1.0])
            run.machine = replace(machine, free_bytes=taken, capacity_bytes=capacity, capturable_bytes=capturable)
        fails = chance.random() < 0.1
        before = run.plan.precision
        overflows = FP16 in run.plan.precision.values() and aside.random() < 0.3
        num_skipped += 40 * overflows
        yield run.step(
            *layers,
            noise=noise if measured else None,
            num_skipped=num_skipped,
            loss_scale=1.0 if overflows else 1024.0,
            faults=pending,
            apply_fails=fails,
            step_ms=None if timing.random() < 0.2 else timing.gauss(1.0, 0.02) + 0.01 * run.plan.batch_size,
            adapting_ms=spent,
            samples_left=timing.choice([0, 10**4, 10**7]),
        )
        pending = (apply_failed(run.decision.plan.batch_size),) if fails else ()
        lowered = [name for name, level in run.plan.precision.items() if level.rank < before[name].rank]
        if refused := tuple(name for name in lowered if refusals.random() < 0.3):
            kept = {name: before[name] for name in refused}
            run.plan = replace(run.plan, precision={**run.plan.precision, **kept})
            pending = (*pending, lowering_refused(*refused))
        spent += timing.random() * is_captured


@st.composite
def precision_configs(draw: st.DrawFn, **fixed: Any) -> PrecisionConfig:
    low, high = sorted(draw(st.lists(st.floats(1e-8, 1e-1), min_size=2, max_size=2, unique=True)))
    bounds = {"dwell_ticks": (0, 4), "patience_ticks": (1, 4), "overflow_bar_ticks": (1, 6)}
    drawn: dict[str, Any] = {name: draw(st.integers(*each)) for name, each in bounds.items()}
    initial = draw(st.sampled_from(USUAL))
    return PrecisionConfig(**{"initial": initial, "tau_low": low, "tau_high": high, **drawn, **fixed})


@st.composite
def batch_configs(draw: st.DrawFn, **fixed: Any) -> BatchConfig:
    granularity = draw(st.integers(1, 40))
    rungs = draw(st.integers(1, 20))
    minimum = draw(st.integers(1, 50))
    rho_low = draw(st.floats(0.0, 0.9))
    return BatchConfig(
        **{
            "enabled": draw(st.booleans()),
            "accumulate": draw(st.integers(1, min(minimum, 3))),
            "granularity": granularity,
            "minimum": minimum,
            "start": minimum + granularity * draw(st.integers(0, rungs - 1)),
            "maximum": minimum + granularity * (rungs - 1) + draw(st.integers(0, granularity - 1)),
            "step_up": granularity * draw(st.integers(1, 3)),
            "step_down": granularity * draw(st.integers(1, 3)),
            "rho_low": rho_low,
            "rho_high": draw(st.floats(rho_low + 0.05, 1.0)),
            "dwell_ticks": draw(st.integers(0, 3)),
            "oom_cooldown_ticks": draw(st.integers(1, 12)),
            "lr_rule": draw(st.sampled_from(["none", "sqrt", "linear", "adascale"])),
            "bound_by_noise_scale": draw(st.booleans()),
            **fixed,
        }
    )


@st.composite
def control_configs(draw: st.DrawFn, **batch: Any) -> ControlConfig:
    precision = draw(precision_configs(enabled=draw(st.sampled_from([True, True, True, False]))))
    alpha, tau_curv = draw(st.floats(0.0, 1.0)), draw(st.sampled_from([0.5, 5.0, 50.0, math.inf]))
    curvature = CurvatureConfig(alpha=alpha, tau_curv=tau_curv, smoothing=draw(st.floats(0.0, 0.9)))
    return ControlConfig(precision=precision, curvature=curvature, batch=draw(batch_configs(**batch)))


def machines(**fixed: Any) -> st.SearchStrategy[Machine]:
    """Machines on which some batch sizes fit and some do not."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "supported": st.sampled_from([USUAL, tuple(Precision), (FP8, BF16, FP32), (FP16, FP32), (BF16, FP32), (FP32,)]),
        "fixed_bytes": st.integers(0, 5000),
        "bytes_per_sample": st.integers(0, 100),
        "limit_bytes": st.integers(5000, 50_000),
    }
    return st.builds(Machine, **(drawn | {name: st.just(value) for name, value in fixed.items()}))
