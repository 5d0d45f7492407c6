from triaccel_ray.service.runs.pace import Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace_after(took: float) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(clock)
    assert pace.is_due
    with pace.timed():
        clock.now += took
    return pace, clock


def test_what_takes_a_moment_is_always_due() -> None:
    pace, _ = pace_after(0.2)
    assert pace.is_due


def test_what_takes_long_waits_until_it_is_a_twentieth_of_the_time() -> None:
    pace, clock = pace_after(1.0)
    clock.now += 18.9
    assert not pace.is_due
    clock.now += 0.2
    assert pace.is_due
    with pace.timed():
        clock.now += 0.1
    assert pace.is_due
