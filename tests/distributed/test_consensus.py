"""On what all ranks decide: one observation, merged from their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.decide.build import BF16, FP32, apply_failed, observation_of, out_of_memory, plan_of
from triaccel_ray.control.consensus import merged
from triaccel_ray.records.signals import LayerSignal, MemorySignal, NoiseSignal


def memory(used: int, window_peak: int, free: int | None, **others: int) -> MemorySignal:
    return MemorySignal(
        used_bytes=used, window_peak_bytes=window_peak, peak_bytes=window_peak, free_bytes=free, **others
    )


def layer(name: str, *eigenvalues: float) -> LayerSignal:
    return LayerSignal(name=name, variance=1e-3, eigenvalues=eigenvalues or None)


def test_the_rank_with_the_least_room_and_the_slowest_one_decide() -> None:
    plan = plan_of(16, conv=BF16, head=FP32)
    first = observation_of(
        plan, memory=memory(100, 300, 600, limit_bytes=900, idle_bytes=10), step_ms=5.0, adapting_ms=70.0
    )
    second = observation_of(
        plan, memory=memory(200, 250, 50, limit_bytes=800, idle_bytes=20), step_ms=7.0, adapting_ms=30.0
    )
    seen = merged([first, second])
    assert (seen.step_ms, seen.adapting_ms) == (7.0, 70.0)
    assert (seen.memory.used_bytes, seen.memory.window_peak_bytes, seen.memory.idle_bytes) == (200, 300, 10)
    assert (seen.memory.limit_bytes, seen.memory.attainable_bytes) == (800, 250)
    assert merged([first, replace(second, step_ms=None)]).step_ms == 5.0
    assert merged([first, replace(second, memory=memory(200, 250, None, limit_bytes=800))]).memory.free_bytes is None


def test_eigenvalues_and_noise_are_means_over_the_ranks_that_measured_them() -> None:
    plan = plan_of(16, conv=BF16, head=FP32)
    first = observation_of(
        plan, layer("conv", 4.0, 2.0), layer("head"), noise=NoiseSignal(mean_square_norm=1.0, trace_covariance=8.0)
    )
    second = observation_of(plan, layer("conv", 2.0, 1.0), layer("head", 3.0))
    third = replace(second, noise=NoiseSignal(mean_square_norm=3.0, trace_covariance=4.0))
    seen = merged([first, second, third])
    assert seen.noise == NoiseSignal(mean_square_norm=2.0, trace_covariance=6.0)
    conv, head = seen.layers
    assert conv.eigenvalues == pytest.approx((8 / 3, 4 / 3))
    assert head.eigenvalues == (3.0,)
    assert conv.variance == 1e-3  # equal on all ranks: that of the global batch's gradient
    assert merged([second, second]).noise is None


def test_a_fault_of_several_ranks_counts_once_and_that_of_another_names_its_rank() -> None:
    shared, own = out_of_memory(16, 8), out_of_memory(16, 4)
    plan = plan_of(16)
    seen = merged([observation_of(plan, faults=(shared,)), observation_of(plan, faults=(shared, own))])
    assert [(fault.micro_batch_size, fault.detail) for fault in seen.faults] == [(8, ""), (4, "rank 1: ")]
    both = apply_failed(), replace(apply_failed(), detail="nor for that one")
    assert merged([observation_of(plan, faults=both)] * 2).faults == both
