import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.host_sync import no_host_sync
from tests.kernels.build import DEVICE, both, interpreted
from triaccel_ray.kernels.grad_stats.api import GradStats
from triaccel_ray.kernels.multi_tensor import TensorTable

pytestmark = interpreted

# A chunk's squares are added in fp32, pairwise or in vector lanes: good to a few roundings.
RTOL = 16 * torch.finfo(torch.float32).eps

SIZES = [1, 4096, 4097, 12_301, 7, 9000, 64]
GROUPS = [0, 1, 2, 2, 5, 3, 5]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32]


def draw(seed: int, *, mean: float = 0.1, factor: float = 1.0) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (factor * (mean + torch.randn(size, generator=generator))).to(DEVICE, dtype)
        for size, dtype in zip(SIZES, DTYPES, strict=True)
    ]


def stats_of(kernel: bool, beta: float = 0.9) -> GradStats:
    return GradStats(SIZES, GROUPS, num_groups=6, beta=beta, device=DEVICE, kernel=kernel)


def update(stats: GradStats, gradients: Sequence[Tensor | None], loss_scale: float = 1.0) -> float:
    """Updates with outputs poisoned before; the caller holds the gradients until results are read."""
    table = TensorTable(len(gradients), DEVICE)
    table.point_to(gradients)
    for output in (stats.found_nonfinite, stats.sum, stats.sum_squares_about_mean):
        output.fill_(math.nan)
    stats.num_elements.fill_(-1)
    found = stats.update(table, torch.tensor(loss_scale, device=DEVICE))
    assert found is stats.found_nonfinite
    return found.item()


def elements(gradients: Sequence[Tensor | None], group: int) -> Tensor:
    return torch.cat([
        g.double().cpu().flatten() for g, of in zip(gradients, GROUPS, strict=True) if of == group and g is not None
    ])  # fmt: skip


@both
def test_raw_statistics_agree_with_fp64(kernel: bool) -> None:
    stats, gradients = stats_of(kernel), draw(0)
    assert update(stats, gradients) == 0.0
    for group in range(4):
        expected = elements(gradients, group)
        mean_size = expected.abs().mean().item()
        assert stats.num_elements[group] == expected.numel()
        assert stats.sum[group].item() == pytest.approx(expected.sum().item(), abs=RTOL * mean_size * expected.numel())
        squares = expected.sub(expected.mean()).square().sum().item()
        assert stats.sum_squares_about_mean[group].item() == pytest.approx(squares, rel=RTOL)
    # A group without tensors.
    assert [values[4].item() for values in (stats.num_elements, stats.sum)] == [0, 0]
    assert stats.average[4] == stats.count[4] == 0


@both
def test_buckets_that_arrive_one_after_another_amount_to_one(kernel: bool) -> None:
    buckets = [[6, 3, 0], [], [5, 2], [1, 4]]
    whole = stats_of(kernel)
    parts = GradStats(SIZES, GROUPS, num_groups=6, beta=0.9, device=DEVICE, buckets=buckets, kernel=kernel)
    for step in range(3):
        gradients = draw(step)
        gradients[3 if step == 1 else 2] = None
        if step == 2:
            gradients[5][17] = math.inf  # type: ignore[index]
        expected = update(whole, gradients, loss_scale=2.0)
        parts.begin()
        found = []
        for index, bucket in enumerate(buckets):
            table = TensorTable(len(bucket), DEVICE)
            held = [gradients[tensor] for tensor in bucket]
            table.point_to(held)
            found.append(parts.reduce(table, index).item())
        assert found == ([0.0, 0.0, 1.0, 1.0] if step == 2 else [0.0] * 4)  # from the first non-finite one on
        assert parts.combine(torch.tensor(2.0, device=DEVICE)).item() == expected
        for mine, theirs in ((parts.average, whole.average), (parts.count, whole.count), (parts.sum, whole.sum)):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0.0, equal_nan=True)
        assert torch.equal(parts.num_elements, whole.num_elements)
    with pytest.raises(ValueError, match="a table of 2 gradients: must be of 3"):
        parts.reduce(TensorTable(2, DEVICE), 0)


@both
@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_the_average_follows_its_formula(kernel: bool, beta: float) -> None:
    stats, average = stats_of(kernel, beta), torch.zeros(4, dtype=torch.float64)
    for step in range(3):
        gradients = draw(step, factor=1.0 + step)
        update(stats, gradients, loss_scale=3.0)
        variance = torch.stack([elements(gradients, group).var(correction=0) for group in range(4)]) / 9.0
        average = beta * average + (1.0 - beta) * variance
    torch.testing.assert_close(stats.average[:4].cpu(), average, rtol=RTOL, atol=0.0)
    assert stats.count.tolist() == [3, 3, 3, 3, 0, 3]


@both
@pytest.mark.parametrize("ratio", [1e2, 1e6])
def test_a_mean_far_from_0_costs_no_digits(kernel: bool, ratio: float) -> None:
    stats, gradients = stats_of(kernel), draw(1)
    gradients[3] = (ratio + torch.randn(SIZES[3], generator=torch.Generator().manual_seed(2))).to(DEVICE)
    gradients[2] = None
    update(stats, gradients)
    expected = elements(gradients, 2).var(correction=0).item() * SIZES[3]
    assert stats.sum_squares_about_mean[2].item() == pytest.approx(expected, rel=RTOL)


@both
@pytest.mark.parametrize("scale", [2.0**-4, 2.0**24])
def test_the_loss_scale_is_divided_out(kernel: bool, scale: float) -> None:
    plain, scaled = stats_of(kernel), stats_of(kernel)
    for step in range(2):
        # fp16 has no room for the largest scales.
        gradients = [g.float() for g in draw(step) if g is not None]
        update(plain, gradients)
        update(scaled, [g * scale for g in gradients], loss_scale=scale)
    assert torch.equal(plain.average, scaled.average)  # a power of two costs no rounding
    stats, gradients = stats_of(kernel), draw(0)
    gradients[1] = torch.where(torch.arange(4096) % 2 == 0, 65504.0, -65504.0).to(DEVICE, torch.float16)
    assert update(stats, gradients, loss_scale=scale) == 0.0  # near the end of FP16's range
    assert stats.average[1].item() == pytest.approx(0.1 * (65504.0 / scale) ** 2, rel=RTOL)


@both
@pytest.mark.parametrize(("bad", "index"), [(math.nan, 1), (-math.inf, 2), (math.inf, 4)])
def test_a_non_finite_element_is_found_and_its_group_left_out(kernel: bool, bad: float, index: int) -> None:
    stats, clean = stats_of(kernel), stats_of(kernel)
    gradients, group = draw(0), GROUPS[index]
    gradients[index][-1] = bad  # type: ignore[index]
    absent = [None if of == group else g for g, of in zip(gradients, GROUPS, strict=True)]
    before = draw(1)
    for each in (stats, clean):
        assert update(each, before) == 0.0
    assert update(stats, gradients) == 1.0
    assert update(clean, absent) == 0.0
    assert torch.equal(stats.average, clean.average)
    assert torch.equal(stats.count, clean.count)
    assert stats.sum.isfinite().tolist() == [each != group for each in range(6)]
    assert update(stats, before) == 0.0  # nothing sticks


@both
def test_absent_tensors_leave_the_others_of_their_group(kernel: bool) -> None:
    stats, gradients = stats_of(kernel), draw(0)
    gradients[0] = gradients[2] = None
    update(stats, gradients)
    assert stats.count.tolist() == [0, 1, 1, 1, 0, 1]
    assert stats.num_elements.tolist() == [0, SIZES[1], SIZES[3], SIZES[5], 0, SIZES[4] + SIZES[6]]
    assert stats.average[2].item() == pytest.approx(0.1 * elements(gradients, 2).var(correction=0).item(), rel=RTOL)
    restored = stats_of(kernel)
    restored.average.copy_(stats.average)
    restored.count.copy_(stats.count)
    assert update(stats, [None] * len(SIZES)) == 0.0  # changes nothing
    later = draw(1)
    for each in (stats, restored):
        update(each, later)
    assert torch.equal(stats.average, restored.average)
    assert torch.equal(stats.count, restored.count)


def test_tensors_may_begin_at_any_element() -> None:
    stats, aligned = stats_of(True), stats_of(True)
    gradients = draw(0)
    shifted = [torch.cat([g.new_full((3,), math.nan), g])[3:] for g in gradients if g is not None]
    assert update(aligned, gradients) == update(stats, shifted) == 0.0
    torch.testing.assert_close(stats.average, aligned.average, rtol=RTOL, atol=0.0)


@both
def test_more_chunks_than_are_read_at_once(kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triaccel_ray.kernels.grad_stats.triton.SLOTS_PER_READ", 16)
    # Tensors of one chunk each, groups not side by side, then one of none.
    sizes = [3] * 100 + [0]
    stats = GradStats(sizes, [i % 2 for i in range(101)], num_groups=2, beta=0.0, device=DEVICE, kernel=kernel)
    table = TensorTable(101, DEVICE, sizes=sizes)
    values = torch.randn(100, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    values[94, 2] = math.inf
    table.point_to([*values, values.new_zeros(0)])
    assert stats.update(table, torch.ones((), device=DEVICE)).item() == 1.0
    expected = values[1::2].double().var(correction=0).item()
    assert stats.average.tolist() == [0.0, pytest.approx(expected, rel=RTOL)]


class TestOnAGpu:
    pytestmark = pytest.mark.gpu

    def test_a_captured_update_reads_tables_and_scale_anew_and_waits_for_nothing(self) -> None:
        captured, eager, idle = (stats_of(True) for _ in range(3))
        table, scale = TensorTable(len(SIZES), DEVICE), torch.ones((), device=DEVICE)
        for stats in (captured, idle):
            stats.update(table, scale)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured.update(table, scale)
        inputs = [draw(step) for step in range(4)]
        inputs[1] = [None if g is None else g.float() for g in inputs[1]]  # another precision plan
        inputs[2][3][17] = math.inf  # type: ignore[index]
        for step, gradients in enumerate(inputs):
            expected = update(eager, gradients, loss_scale=2.0**step)
            with no_host_sync():
                table.point_to(gradients)
                scale.fill_(2.0**step)
                graph.replay()
                idle.update(table, scale)  # eagerly
            assert captured.found_nonfinite.item() == expected == float(step == 2)
            for name in ("average", "count", "sum", "sum_squares_about_mean"):
                ours, theirs = getattr(captured, name), getattr(eager, name)
                torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)

    def test_more_elements_than_32_bits_count(self) -> None:
        size = 2**31 + 4099
        stats = GradStats([5, size], [0, 1], num_groups=2, beta=0.0, device=DEVICE)
        gradient = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
        gradient[-4100:] = 2.0
        table = TensorTable(2, DEVICE, sizes=[5, size])
        table.point_to([None, gradient])
        stats.update(table, torch.ones((), device=DEVICE))
        assert stats.num_elements.tolist() == [0, size]
        assert stats.sum.tolist() == [0.0, 8200.0]
        assert stats.sum_squares_about_mean[1].item() == pytest.approx(4 * 4100 - 8200**2 / size, rel=1e-6)
        assert stats.found_nonfinite.item() == 0.0
        gradient[-1] = math.nan
        stats.update(table, torch.ones((), device=DEVICE))
        assert stats.found_nonfinite.item() == 1.0
