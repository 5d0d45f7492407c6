from __future__ import annotations

import gc
import itertools
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.measure import dense_curvature as dense
from tests.measure.curvature_models import (
    CASES,
    FALLBACK,
    METHODS,
    NUM_SAMPLES,
    ROUNDING,
    Quadratic,
    assert_spectrum,
    directly,
    draws,
    make,
    mean_output,
    quadratic_samples,
    smooth_cross_entropy,
    squared_error,
)
from tests.waiting import no_waiting
from triaccel_ray.measure.curvature.columns import model_columns, sample_columns
from triaccel_ray.measure.curvature.gram import GramMethod, explore_structure, layer_grams
from triaccel_ray.measure.curvature.objective import (
    Limits,
    Objective,
    fisher_head,
    ggn_head,
    measuring,
    tensors_in,
)
from triaccel_ray.model.layers import find_layers


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", [smooth_cross_entropy, squared_error])
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_fisher_and_ggn_are_the_dense_blocks(method: str, name: str, loss: Any) -> None:
    model, inputs, targets = make(name)
    block = dense.fisher_block if method == "fisher" else dense.ggn_block
    estimate = directly(model, inputs, targets, method, 4, loss=loss)
    for layer, found in zip(find_layers(model), estimate.eigenvalues, strict=True):
        assert_spectrum(found, dense.largest(block(model, loss, inputs, targets, layer), 4))
    assert tuple(estimate.fallbacks) == FALLBACK.get(name, ())
    assert (estimate.trace_covariance is None) == (estimate.mean_square_norm is None) == (method == "ggn")


def test_ggn_is_the_hessian_in_a_piecewise_linear_network() -> None:
    model, inputs, targets = make("convolutions")
    found = directly(model, inputs, targets, "ggn", 4, loss=smooth_cross_entropy).eigenvalues
    for layer, row in zip(find_layers(model), found, strict=True):
        assert_spectrum(row, dense.largest(dense.hessian_block(model, smooth_cross_entropy, inputs, targets, layer), 4))


@pytest.mark.parametrize("name", ["convolutions", "smooth", "tied_tokens", "attention", "recurrent"])
def test_hessian_is_the_dense_hessian(name: str) -> None:
    model, inputs, targets = make(name)
    for layer in find_layers(model):
        block = dense.hessian_block(model, smooth_cross_entropy, inputs, targets, layer)
        expected = dense.largest(block, 2, by_magnitude=True)
        # What is left of the other directions after T steps: (|l_2 / l_1|^T tan)^2, with tan^2 about n at a random
        # start; one start in 100 or so is worse than 100 n.
        magnitudes = dense.largest(block, 3, by_magnitude=True).abs().sort(descending=True).values
        shrinkage = 2 * (magnitudes[1:] / magnitudes[:-1]).max().log().item()
        count = math.ceil(math.log(ROUNDING / (100 * len(block))) / shrinkage)
        found = directly(
            model, inputs, targets, "hessian", loss=smooth_cross_entropy, layers=[layer], num_iterations=count
        ).eigenvalues[0]
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=2 * ROUNDING * magnitudes[0].item())


def eigenvalues_of(spectrum: list[float], top_k: int, num_iterations: int) -> Tensor:
    """By power iteration on a layer whose Hessian is diagonal."""
    values = torch.tensor(spectrum, dtype=torch.float64)
    samples = quadratic_samples(values)
    model = Quadratic(len(values))
    return directly(
        model, *samples, "hessian", top_k, loss=mean_output, num_iterations=num_iterations
    ).eigenvalues[0]  # fmt: skip


def test_power_iteration_converges_as_fast_as_the_spectrum_lets_it() -> None:
    errors = []
    for num_iterations in (2, 8, 16, 32):
        found = eigenvalues_of([-5.0, 4.5, 4.4, 4.0, 1.0, 0.0], 1, num_iterations=num_iterations)
        errors.append((found[0] + 5).abs().item())
        # Three vectors: what is left is the fourth. The last product is made with the vectors of the one before.
        assert errors[-1] <= 100 * (4 / 5) ** (2 * (num_iterations - 1)) + 1e-6
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_power_iteration_finds_eigenvalues_of_either_sign_and_equal_magnitude(top_k: int) -> None:
    """With as many vectors as eigenvalues wanted, k = 1 gave 0.91 for such a pair, and more iterations no better."""
    spectrum = [1.0, -1.0, 0.8, -0.8, *torch.linspace(0.3, -0.3, 40).tolist()]
    found = eigenvalues_of(spectrum, top_k, num_iterations=20)
    assert found.abs().sort(descending=True).values.tolist() == pytest.approx([1.0, 1.0, 0.8][:top_k], abs=1e-3)
    near = eigenvalues_of([1.0, -0.999, 0.998, *torch.linspace(0.3, -0.3, 40).tolist()], 1, num_iterations=20)
    assert near[0] == pytest.approx(1.0, abs=2e-3)
    all_of_them = eigenvalues_of([-5.0, 4.0, 3.0, 1.0, 0.0], 5, num_iterations=200)
    torch.testing.assert_close(all_of_them, torch.tensor([4.0, 3.0, 1.0, 0.0, -5.0]))


def test_hessian_starts_from_the_generator() -> None:
    model, inputs, targets = make("smooth")
    default, first, again, other = (
        directly(model, inputs, targets, "hessian", 1, generator=generator, num_iterations=1).eigenvalues
        for generator in (None, draws(), draws(), draws(seed=1))
    )
    assert torch.equal(first, again)
    assert torch.equal(first, default)
    assert not torch.equal(first, other)


def grams_of(model: nn.Module, inputs: Any, targets: Any, head: Any, **limits: Any) -> list[Tensor]:
    layers = find_layers(model)
    objective = Objective(
        model=model, loss=smooth_cross_entropy, inputs=inputs, targets=targets, limits=Limits(**limits)
    )
    with measuring(model):
        grams = dict(layer_grams(objective, head, explore_structure(objective, layers, head)))
    return [grams[layer] for layer in layers]


@pytest.mark.parametrize("num_samples", [1, NUM_SAMPLES])
def test_columns_keep_no_more_memory_than_the_elements_asked_for(num_samples: int) -> None:
    model, inputs, targets = make("foreign")
    layer = find_layers(model)[1]
    objective = Objective(model=model, loss=smooth_cross_entropy, inputs=inputs, targets=targets)
    part = objective.part(slice(0, num_samples))
    with measuring(model):
        whole = sample_columns(part, ggn_head, [(layer, slice(None))])[0]
        for found in (
            *sample_columns(part, ggn_head, [(layer, slice(3, 7))]),
            *model_columns(part, ggn_head, [(layer, slice(3, 7))], batched=True),
        ):
            torch.testing.assert_close(found, whole[:, 3:7])
            assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize("head", [fisher_head, ggn_head])
@pytest.mark.parametrize("name", CASES)
def test_limits_of_memory_change_nothing(name: str, head: Any) -> None:
    model, inputs, targets = make(name)
    whole = grams_of(model, inputs, targets, head)
    for chunk_samples in (None, 4):
        for kept_bytes, block_bytes in ((400, 200), (2**30, 2**28)):
            found = grams_of(
                model, inputs, targets, head,
                chunk_samples=chunk_samples, kept_bytes=kept_bytes, block_bytes=block_bytes,
            )  # fmt: skip
            torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["smooth", "tied_tokens", "positions", "deciding"])
def test_chunks_of_samples_give_the_same_estimate(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    whole, *chunked = (directly(model, inputs, targets, method, 3, chunk_samples=size) for size in (None, 1, 4, 5))
    assert not any(estimate.matrices.requires_grad for estimate in (whole, *chunked))  # no graph is kept
    for estimate in chunked:
        torch.testing.assert_close(estimate.eigenvalues, whole.eigenvalues, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(estimate.trace_covariance, whole.trace_covariance)
        torch.testing.assert_close(estimate.mean_square_norm, whole.mean_square_norm)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_hold_the_activations_of_one_chunk_at_a_time(method: Any) -> None:
    model, inputs, targets = make("smooth")
    alive, most = [], 0

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal most
        alive.append((len(output), weakref.ref(output.untyped_storage())))
        gc.collect()
        most = max(most, sum(size for size, ref in alive if ref() is not None))

    model[0].register_forward_hook(note)
    directly(model, inputs, targets, method, 1, chunk_samples=2, num_iterations=2)
    assert {size for size, _ in alive} <= {1, 2}
    assert most <= 3  # two samples and one while it looks where samples lie


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in([out]):
            self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize(("channels", "size"), [(64, 32), (256, 8)])
def test_a_column_a_sample_takes_no_larger_pieces_than_a_training_step(channels: int, size: int) -> None:
    """All patches of one convolution, or all its columns, would be 72 MiB: more than a captured step leaves free."""
    convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(memory_format=torch.channels_last)
    inputs, targets = torch.randn(32, channels, size, size), torch.randint(channels, (32,))
    with _Largest() as largest:
        directly(model, inputs, targets)
    assert largest.num_bytes <= 20 * 2**20


@pytest.mark.parametrize("groups", [1, 2])
def test_the_order_of_channels_in_memory_does_not_matter(groups: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, stride=(2, 1), groups=groups), nn.Tanh(),
        nn.Conv2d(8, 6, (2, 3), dilation=(1, 2), groups=groups), nn.Flatten(), nn.LazyLinear(3),
    )  # fmt: skip
    inputs, targets = torch.randn(NUM_SAMPLES, 8, 7, 9), torch.randint(3, (NUM_SAMPLES,))
    model(inputs)
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model.to(memory_format=memory_format)
        for method in ("fisher", "ggn"):
            estimate = directly(model, inputs.contiguous(memory_format=memory_format), targets, method)
            assert not estimate.fallbacks
            found.append(estimate.eigenvalues)
    torch.testing.assert_close(found[:2], found[2:])
    block = dense.fisher_block(model.double(), F.cross_entropy, inputs.double(), targets, find_layers(model)[0])
    torch.testing.assert_close(found[2][0].double(), dense.largest(block, 2), rtol=1e-4, atol=1e-7)


def test_images_of_one_pixel_are_measured() -> None:
    """The convolutions of squeeze-and-excitation, in FP32 and in whatever order their channels lie."""
    gate = nn.Conv2d(8, 4, 1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), gate, nn.Sigmoid(), nn.Flatten())
    inputs, targets = torch.randn(NUM_SAMPLES, 3, 5, 5), torch.randint(4, (NUM_SAMPLES,))
    estimate = directly(model, inputs, targets)
    block = dense.fisher_block(model.double(), F.cross_entropy, inputs.double(), targets, find_layers(model)[1])
    torch.testing.assert_close(estimate.eigenvalues[1].double(), dense.largest(block, 2), rtol=1e-4, atol=1e-7)


def test_noise_is_that_of_the_samples_own_gradients() -> None:
    model, inputs, targets = make("smooth")
    rows = [dense.sample_gradients(model, F.cross_entropy, inputs, targets, layer) for layer in find_layers(model)]
    gradients = torch.cat(rows, dim=1)
    estimate = directly(model, inputs, targets)
    trace = gradients.var(dim=0, correction=1).sum()
    torch.testing.assert_close(estimate.trace_covariance, trace)
    torch.testing.assert_close(
        estimate.mean_square_norm, gradients.mean(dim=0).square().sum() - trace / NUM_SAMPLES, atol=1e-12, rtol=1e-9
    )


def test_noise_is_unbiased_also_below_zero() -> None:
    # Averaged over all draws of 3 of the 6 samples, an unbiased estimate is what all 6 give.
    model, inputs, _ = make("smooth")

    def measure(indices: Any) -> Tensor:
        estimate = directly(model, inputs[list(indices)], torch.zeros(len(indices), dtype=torch.long))
        return torch.stack([estimate.mean_square_norm, estimate.trace_covariance])

    all_draws = torch.stack([measure(indices) for indices in itertools.combinations(range(NUM_SAMPLES), 3)])
    assert (all_draws > 0).all()
    torch.testing.assert_close(all_draws.mean(dim=0), measure(range(NUM_SAMPLES)))
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    estimate = directly(nn.Linear(2, 1, bias=False).double(), opposite, opposite, loss=mean_output)
    assert estimate.mean_square_norm == -1.0  # two opposite gradients: the only pair's product
    assert estimate.trace_covariance == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_measures_what_a_cpu_does(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    found = []
    for device in ("cuda", "cpu"):
        estimate = directly(model.to(device), inputs.to(device), targets.to(device), method, num_iterations=3)
        assert estimate.eigenvalues.device.type == device
        found.append(estimate.eigenvalues.cpu())
    torch.testing.assert_close(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_a_gpu_reduces_large_matrices_as_a_cpu_solves_them(method: Any) -> None:
    model, _, _ = make("convolutions")
    inputs, targets = torch.randn(40, 2, 8, 9, dtype=torch.float64), torch.randint(3, (40,))
    expected = directly(model, inputs, targets, method).eigenvalues
    found = directly(model.cuda(), inputs.cuda(), targets.cuda(), method).eigenvalues
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=0.0)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_gram_matrices() -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    objective = Objective(model=model, loss=F.cross_entropy, inputs=inputs, targets=targets)
    method = GramMethod(find_layers(model), "fisher", 2)
    with measuring(model):
        method.prepare(objective)
        with no_waiting():
            method.prepare(objective)
