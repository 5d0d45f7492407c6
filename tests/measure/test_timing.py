import time

import pytest
import torch

from triaccel_ray.measure import timing
from triaccel_ray.measure.timing import EpochClock, StepTimer, TimeShare

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def clock(request: pytest.FixtureRequest) -> EpochClock:
    return EpochClock(torch.device(request.param))


def spend(seconds: float = 0.01) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_it_counts_from_start_to_finish(clock: EpochClock) -> None:
    spend()
    assert clock.seconds() == 0.0
    outside = time.perf_counter()
    clock.start()
    inside = time.perf_counter()
    spend()
    least = time.perf_counter() - inside
    seconds = clock.finish()
    assert 0.01 <= least <= seconds <= time.perf_counter() - outside
    assert clock.seconds() == 0.0


def test_what_was_timed_before_a_checkpoint_is_carried_over(clock: EpochClock) -> None:
    clock.start()
    clock.restore(100.0)
    spend()
    assert clock.seconds() == 100.0
    clock.start()
    spend()
    assert 100.01 <= clock.finish() < 200.0
    clock.start()
    assert clock.finish() < 100.0


@pytest.fixture(params=DEVICES)
def timer(request: pytest.FixtureRequest) -> StepTimer:
    return StepTimer(torch.device(request.param))


def step(timer: StepTimer, seconds: float, *, counts: bool = True) -> None:
    timer.begin()
    end = time.thread_time() + seconds  # of the processor: others may hold it meanwhile
    while time.thread_time() < end:
        pass
    timer.end(counts=counts)


def median_of(timer: StepTimer) -> float | None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # as the loop does before it reads
    return timer.read()()


def test_a_timer_gives_the_median_of_the_steps_that_count(timer: StepTimer) -> None:
    for seconds in (0.2, 0.2, 0.01, 0.01, 0.05, 0.01, 0.01):  # the first two prepare
        step(timer, seconds)
    step(timer, 0.2, counts=False)
    timer.interrupt()
    spend(0.1)
    step(timer, 0.01)
    median = median_of(timer)
    assert median is not None
    assert 9.0 < median < 40.0
    for _ in range(2):
        for _ in range(2):
            step(timer, 0.01)
        late = median_of(timer)
        assert late is None or late > 9.0  # of two steps nothing is told, of four it is
    assert late is not None


def test_steps_before_a_restart_do_not_count(timer: StepTimer) -> None:
    for _ in range(8):
        step(timer, 0.05)
    timer.restart()
    for _ in range(6):
        step(timer, 0.01)
    assert (median_of(timer) or 0.0) < 40.0


def test_work_beside_the_training_keeps_within_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    share = TimeShare(torch.device("cpu"), 0.25)
    assert share.allows
    with share.timed(counts=False):
        now += 5.0  # another piece would take as long, hence 20 s from the start on
    assert (share.allows, share.seconds_to_wait) == (False, 15.0)
    now += 15.0
    assert share.allows
    with share.timed():
        now += 6.0
    assert share.seconds_to_wait == 4 * (6 + 6) - 26
    now += 22.0
    assert share.allows


def test_without_a_share_all_is_allowed() -> None:
    share = TimeShare(torch.device("cpu"), None)
    with share.timed():
        spend()
    assert share.allows
