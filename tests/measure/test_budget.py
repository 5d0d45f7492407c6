import pytest

from triaccel_ray.measure.budget import Limits, Probe, limits_within, predicted_seconds

MIB = 2**20


def probe(num_samples: int, limits: Limits) -> Probe:
    """10 MiB and 40 more for each sample; 8 s for the result, and 1 s for each pass and each sample in it."""
    at_once = limits.chunk_samples or num_samples
    num_passes = num_samples // at_once
    seconds = 8.0 + num_passes * (1.0 + at_once)
    return Probe(num_samples=at_once, num_bytes=(10 + 40 * at_once) * MIB, seconds=seconds, num_passes=num_passes)


def taking(num_samples: int, seconds: float) -> Probe:
    return Probe(num_samples=num_samples, num_bytes=1, seconds=seconds)


PAIR = [taking(2, 3.0), taking(4, 5.0)]


def limited(budget_bytes: int | None, bytes_of_two: int = 0, **others: int) -> tuple[Limits, list[Probe]]:
    sizes = {"num_samples": 32, "most_samples": 32, "kept_bytes": None, **others}
    return limits_within(budget_bytes, probe, bytes_of_two=bytes_of_two, **sizes)


@pytest.mark.parametrize(
    ("budget_mib", "most", "chunk"),
    [(10 + 40 * 32, 32, None), (10 + 40 * 32 - 1, 32, 16), (960, 8, 8), (300, 32, 4), (1, 32, 1)],
)
def test_chunks_are_as_large_and_as_equal_as_the_budget_allows(budget_mib: int, most: int, chunk: int | None) -> None:
    limits, probes = limited(budget_mib * MIB, most_samples=most)
    assert [each.num_samples for each in probes] == [2, 4]
    assert limits.chunk_samples == chunk
    if chunk not in (None, 1):
        assert (10 + 40 * chunk) * MIB + limits.kept_bytes <= budget_mib * MIB
    assert 8 * MIB <= limits.block_bytes <= Limits.block_bytes


def test_what_a_method_keeps_is_left_to_it() -> None:
    assert limited(400 * MIB, kept_bytes=300 * MIB)[0].chunk_samples == 2


@pytest.mark.parametrize(
    ("budget_bytes", "bytes_of_two", "num_samples", "sizes"),
    [
        (100 * MIB, 0, 32, [2, 4]),
        (100 * MIB, 50 * MIB, 32, [2, 4]),
        (100 * MIB, 51 * MIB, 32, [1]),
        (100 * MIB, 51 * MIB, 4, []),
        (None, 51 * MIB, 32, []),
    ],
)
def test_one_sample_is_probed_where_four_would_not_fit(
    budget_bytes: int | None, bytes_of_two: int, num_samples: int, sizes: list[int]
) -> None:
    limits, probes = limited(budget_bytes, bytes_of_two, num_samples=num_samples, most_samples=2)
    assert [each.num_samples for each in probes] == sizes
    assert limits.chunk_samples in (1, 2)


def test_the_time_of_a_pass_is_that_of_two_samples_that_pass_one_by_one() -> None:
    _, probes = limited(100 * MIB, 51 * MIB)
    assert predicted_seconds(probes, samples_at_once=1, num_passes=32) == 32 * (8 + 2 * 2) / 2


def test_time_grows_with_samples_and_passes() -> None:
    assert predicted_seconds(PAIR, samples_at_once=32, num_passes=1) == 33.0
    assert predicted_seconds(PAIR, samples_at_once=2, num_passes=3) == 15.0  # as long as four take
    assert predicted_seconds([taking(1, 0.5)], samples_at_once=4, num_passes=2) == 4.0
    assert predicted_seconds([taking(2, 3.0), taking(4, 2.9)], samples_at_once=32, num_passes=1) == 2.9
    twice = Probe(num_samples=1, num_bytes=1, seconds=1.0, num_passes=2)
    assert predicted_seconds([twice], samples_at_once=1, num_passes=10) == 5.0
