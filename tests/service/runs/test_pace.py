from triaccel_ray.service.runs.pace import Pace


def test_what_takes_long_waits_until_it_is_a_twentieth_of_the_time() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])
    assert pace.is_due
    for took, waited, is_due in ((0.2, 0.0, True), (1.0, 18.9, False), (0.1, 0.0, True), (1.0, 19.1, True)):
        with pace.timed():
            now[0] += took
        now[0] += waited
        assert pace.is_due == is_due
