import time

import pytest
import torch

from triaccel_ray.measure import timing
from triaccel_ray.measure.timing import StepTimer, TimeShare


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
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
    for seconds in (0.1, 0.1, 0.01, 0.01, 0.05, 0.01, 0.01):  # the first two prepare
        step(timer, seconds)
    step(timer, 0.1, counts=False)
    timer.interrupt()
    time.sleep(0.1)
    step(timer, 0.01)
    median = median_of(timer)
    assert 9.0 < median < 40.0
    for _ in range(2):
        for _ in range(2):
            step(timer, 0.01)
        late = median_of(timer)
        assert late is None or late > 9.0  # of two steps nothing is told, of four it is
    assert late is not None


@pytest.mark.parametrize(("num_threads", "expected"), [(1, 5.0), (2, 1.0)])
def test_with_several_threads_the_shortest_step_counts(
    num_threads: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(timing.time, "thread_time", lambda: now)
    timer, num_threads_before = StepTimer(torch.device("cpu")), torch.get_num_threads()
    for milliseconds in (50, 50, 9, 5, 1, 9, 3):
        timer.begin()
        now += milliseconds / 1e3
        timer.end(counts=True)
    torch.set_num_threads(num_threads)
    try:
        assert timer.read()() == pytest.approx(expected)
    finally:
        torch.set_num_threads(num_threads_before)


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
    share, free = (TimeShare(torch.device("cpu"), part) for part in (0.25, None))
    assert share.seconds_to_wait == 0.0
    with free.timed(), share.timed(counts=False):
        now += 5.0  # another piece would take as long, hence 20 s from the start on
    assert share.seconds_to_wait == 15.0
    share.expect(10.0)
    assert share.seconds_to_wait == 35.0
    now += 35.0
    assert share.seconds_to_wait == 0.0
    with share.timed():
        now += 6.0
    assert share.seconds_to_wait == 4 * (6 + 6) - 46
    now += 2.0
    assert share.seconds_to_wait == free.seconds_to_wait == 0.0
