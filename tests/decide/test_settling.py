"""Memory that follows from the batch size alone, over many ticks: where the batch comes to rest."""

from dataclasses import replace

from hypothesis import assume, given

from tests.decide.build import Machine, Run, batch_configs, machines
from triaccel_ray.config import BatchConfig, ControlConfig
from triaccel_ray.decide.batch import ladder

CONFIG = BatchConfig(rho_low=0.7, rho_high=0.9)
"""Start 96, rungs 32, 64, ..., 512; one rung up, two down."""


@given(batch_configs(enabled=True, bound_by_noise_scale=False), machines())
def test_a_batch_that_took_too_much_does_not_come_back_within_the_cap(config, machine):
    run = Run(ControlConfig(batch=config), machine)
    closed: dict[int, int] = {}  # batch size -> tick of the last shrink from it or from a smaller one
    for tick in range(120):
        size = run.plan.batch_size
        _, decision = run.step()
        after = decision.plan.batch_size
        if after < size:
            closed.update({rung: tick for rung in ladder(config) if rung >= size})
        if after > size and after in closed:
            assert tick - closed[after] >= config.oom_cooldown_ticks


@given(batch_configs(enabled=True, bound_by_noise_scale=False, oom_cooldown_ticks=7), machines())
def test_constant_memory_settles_for_good_where_the_band_is_wider_than_a_step(config, machine):
    band = (config.rho_high - config.rho_low) * machine.limit_bytes
    assume(config.step_up * machine.bytes_per_sample * len(machine.names) * 2 < band)
    run = Run(ControlConfig(batch=config), machine)
    sizes = run.batch_sizes(20 * (config.dwell_ticks + 1) + 60)
    assert set(sizes[-40:]) == {sizes[-1]}


def test_a_ladder_step_wider_than_the_band_swings_once_a_cap():
    config = replace(CONFIG, oom_cooldown_ticks=10, start=32)
    # 64 samples use 0.65 of the memory, 96 use 0.97: no size lies in the band.
    run = Run(ControlConfig(batch=config), Machine(fixed_bytes=100, bytes_per_sample=33, limit_bytes=10_000))
    assert run.batch_sizes(34) == [64, *[96, 32, *[64] * 9] * 3]


def test_the_batch_grows_back_when_memory_frees():
    run = Run(ControlConfig(batch=CONFIG), Machine(limit_bytes=10_000, bytes_per_sample=10, fixed_bytes=1000))
    assert run.batch_sizes(10)[-1] == 224
    run.machine = replace(run.machine, free_bytes=0)
    assert run.batch_sizes(10)[-1] == 32
    run.machine = replace(run.machine, free_bytes=None)
    assert run.batch_sizes(40)[-1] == 224
