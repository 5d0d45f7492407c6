import gc
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
    assert_blocks,
    directly,
    make,
    mean_output,
    quadratic_samples,
    smooth_cross_entropy,
    squared_error,
)
from triaccel_ray.measure.budget import Limits
from triaccel_ray.model.layers import find_layers
from triaccel_ray.model.pytree import tensors_in


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", [smooth_cross_entropy, squared_error])
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_fisher_and_ggn_are_the_dense_blocks(method: str, name: str, loss: Any) -> None:
    model, inputs, targets = make(name)
    estimate = directly(model, inputs, targets, method, 4, loss=loss)
    assert_blocks(estimate, model, inputs, targets, method, loss)
    assert tuple(estimate.fallbacks) == FALLBACK.get(name, ())
    assert (estimate.noise is None) == (method == "ggn")


@pytest.mark.parametrize("name", ["convolutions", "tied_tokens", "attention"])
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


@pytest.mark.parametrize(
    ("top_k", "spectrum", "expected"),
    [
        # With as many vectors as eigenvalues wanted, k = 1 gave 0.91 for such a pair, and more iterations no better.
        (1, [1.0, -1.0, 0.8, -0.8, *torch.linspace(0.3, -0.3, 40)], [1.0]),
        (3, [1.0, -1.0, 0.8, -0.8, *torch.linspace(0.3, -0.3, 40)], [1.0, 1.0, 0.8]),
        (1, [1.0, -0.999, 0.998, *torch.linspace(0.3, -0.3, 40)], [1.0]),
        (5, [-5.0, 4.0, 3.0, 1.0, 0.0], [5.0, 4.0, 3.0, 1.0, 0.0]),
    ],
)
def test_power_iteration_finds_eigenvalues_of_either_sign_and_equal_magnitude(
    top_k: int, spectrum: list[float], expected: list[float]
) -> None:
    values = torch.tensor(spectrum, dtype=torch.float64)
    samples, model = quadratic_samples(values), Quadratic(len(values))
    found = directly(model, *samples, "hessian", top_k, loss=mean_output, num_iterations=20).eigenvalues[0]
    assert found.abs().sort(descending=True).values.tolist() == pytest.approx(expected, abs=2e-3)
    assert found.tolist() == sorted(found.tolist(), reverse=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_limits_of_memory_change_nothing(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    whole = directly(model, inputs, targets, method, num_iterations=4)
    assert not whole.matrices.requires_grad  # no graph is kept
    little, much = (400, 200), (2**30, 2**28)
    for chunk_samples, (kept_bytes, block_bytes) in ((None, little), (4, little), (4, much), (1, much)):
        limits = Limits(chunk_samples=chunk_samples, kept_bytes=kept_bytes, block_bytes=block_bytes)
        found = directly(model, inputs, targets, method, num_iterations=4, limits=limits)
        torch.testing.assert_close(found.matrices, whole.matrices)
        torch.testing.assert_close(found.noise, whole.noise)


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
    directly(model, inputs, targets, method, 1, num_iterations=2, limits=Limits(chunk_samples=2))
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


def test_noise_is_that_of_the_samples_own_gradients_and_unbiased() -> None:
    model, inputs, targets = make("smooth")
    rows = [dense.sample_gradients(model, F.cross_entropy, inputs, targets, layer) for layer in find_layers(model)]
    gradients = torch.cat(rows, dim=1)
    trace = gradients.var(dim=0, correction=1).sum()
    expected = torch.stack([gradients.mean(dim=0).square().sum() - trace / NUM_SAMPLES, trace])
    torch.testing.assert_close(directly(model, inputs, targets).noise, expected, atol=1e-12, rtol=1e-9)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    estimate = directly(nn.Linear(2, 1, bias=False).double(), opposite, opposite, loss=mean_output)
    assert estimate.noise.tolist() == [-1.0, 2.0]  # two opposite gradients: the only pair's product


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
