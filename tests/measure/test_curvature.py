from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.measure import dense_curvature as dense
from triaccel_ray.layers import find_layers
from triaccel_ray.measure.curvature import PowerIteration, top_eigenvalues
from triaccel_ray.measure.curvature.fisher import fisher_grams, gradient_noise
from triaccel_ray.measure.curvature.ggn import ggn_grams
from triaccel_ray.measure.curvature.hessian import power_iteration
from triaccel_ray.measure.curvature.objective import Objective, measuring

METHODS = ("fisher", "ggn", "hessian")
NUM_SAMPLES, NUM_CLASSES, VOCABULARY = 6, 3, 7
# Everything is computed in FP64 and handed over in FP32: what is left is one rounding, relative to the largest value.
ROUNDING = torch.finfo(torch.float32).eps


class ConvNet(nn.Sequential):
    """Piecewise linear in each layer's weights; in-place ReLUs directly behind convolutions and linear layers."""

    def __init__(self, activation: Callable[[], nn.Module] = lambda: nn.ReLU(inplace=True)) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            activation(),
            nn.Conv2d(4, 6, (3, 2), stride=2, groups=2, padding=(1, 0), bias=False),
            activation(),
            nn.Conv2d(6, 4, 2, dilation=2, padding="same"),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
            activation(),
            nn.Linear(5, NUM_CLASSES),
        )


class TokenNet(nn.Module):
    """A linear layer over a sequence as long as the batch, used twice; the table of tokens is also the output map."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 4, padding_idx=2)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, VOCABULARY, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.relu_(self.mix(self.table(tokens)))
        return self.out(self.mix(hidden).mean(dim=1))


class PositionNet(nn.Module):
    """Position vectors are the same for all samples, and as many as there are samples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, 4), nn.Embedding(NUM_SAMPLES, 4)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(torch.tanh(self.token(tokens) + self.position(places)).mean(dim=1))


class AttentionNet(nn.Module):
    """Sequence first, as `nn.MultiheadAttention` has it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.head = nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=0))


class RecurrentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Bilinear(nn.Module):
    """A module of nobody's library, with two weights; `decide` makes it look at its data, which vmap refuses."""

    def __init__(self, *, decide: bool = False) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(5, 3)) for _ in range(2))
        self.decide = decide

    def forward(self, x: Tensor) -> Tensor:
        if self.decide and bool((x > 1e9).any()):
            return x @ self.left
        return (x @ self.left) * (x @ self.right)


class Viewed(nn.Module):
    """Returns a view, which the model then changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).view(len(x), 3, 1).squeeze(2)


class FlattenNet(nn.Module):
    """The linear layer sees samples and positions in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x.reshape(-1, 5))).view(len(x), -1, 4).mean(dim=1))


class LendingNet(nn.Module):
    """The first layer's weight is used once more outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 5), nn.Linear(5, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) @ self.first.weight)


def smooth_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - F.one_hot(targets, outputs.shape[-1])).square().sum(dim=-1).mean()


def images() -> Tensor:
    return torch.randn(NUM_SAMPLES, 2, 8, 9)


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (NUM_SAMPLES, NUM_SAMPLES))


def sequences() -> Tensor:
    return torch.randn(NUM_SAMPLES, 3, 4)


def vectors() -> Tensor:
    return torch.randn(NUM_SAMPLES, 5)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (ConvNet, images),
    "smooth": (lambda: ConvNet(nn.GELU), images),
    "tied_tokens": (TokenNet, tokens),
    "positions": (PositionNet, tokens),
    "attention": (AttentionNet, sequences),
    "recurrent": (RecurrentNet, sequences),
    "foreign": (lambda: nn.Sequential(nn.Linear(5, 5), Bilinear(), nn.Linear(3, 3)), vectors),
    "deciding": (lambda: nn.Sequential(Bilinear(decide=True), nn.Linear(3, 3)), vectors),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2, padding=1), nn.Flatten(), nn.Linear(20, 3)), sequences),
    "circular": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(18, 3)
        ),
        images,
    ),
    "viewed": (lambda: nn.Sequential(Viewed(), nn.ReLU(inplace=True), nn.Linear(3, 3)), vectors),
    "flattened": (FlattenNet, lambda: torch.randn(NUM_SAMPLES, 2, 5)),
    "lent": (LendingNet, vectors),
    "normed": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        vectors,
    ),
}
FALLBACK = {"deciding": ("0",), "recurrent": ("recurrent",)}
"""Which layers of which case nothing but one pass per sample can measure."""


@pytest.fixture(autouse=True)
def _same_draws_everywhere() -> None:
    torch.manual_seed(0)


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """The model in eval mode, with normalisation statistics that do something, inputs and targets."""
    build, draw = CASES[name]
    model = build().to(dtype).eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    inputs = draw()
    num_outputs = VOCABULARY if name == "tied_tokens" else NUM_CLASSES
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return model, inputs, torch.randint(num_outputs, (NUM_SAMPLES,))


def assert_spectrum(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), expected, rtol=0.0, atol=ROUNDING * expected.abs().max().item(), check_dtype=False
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", [smooth_cross_entropy, squared_error])
def test_fisher_is_the_dense_empirical_fisher(name: str, loss: Any) -> None:
    model, inputs, targets = make(name)
    layers = find_layers(model)
    estimate = top_eigenvalues(model, loss, inputs, targets, layers, method="fisher", top_k=4)
    for layer, found in zip(layers, estimate.eigenvalues, strict=True):
        assert_spectrum(found, dense.largest(dense.fisher_block(model, loss, inputs, targets, layer), 4))
    assert estimate.fallback_layers == FALLBACK.get(name, ())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("loss", [smooth_cross_entropy, squared_error])
def test_ggn_is_the_dense_gauss_newton_matrix(name: str, loss: Any) -> None:
    model, inputs, targets = make(name)
    layers = find_layers(model)
    estimate = top_eigenvalues(model, loss, inputs, targets, layers, method="ggn", top_k=4)
    for layer, found in zip(layers, estimate.eigenvalues, strict=True):
        assert_spectrum(found, dense.largest(dense.ggn_block(model, loss, inputs, targets, layer), 4))
    assert estimate.fallback_layers == FALLBACK.get(name, ())
    assert estimate.mean_square_norm is None
    assert estimate.trace_covariance is None


def test_ggn_is_the_hessian_in_a_piecewise_linear_network() -> None:
    model, inputs, targets = make("convolutions")
    layers = find_layers(model)
    found = top_eigenvalues(model, smooth_cross_entropy, inputs, targets, layers, method="ggn", top_k=4).eigenvalues
    for layer, row in zip(layers, found, strict=True):
        block = dense.hessian_block(model, smooth_cross_entropy, inputs, targets, layer)
        assert_spectrum(row, dense.largest(block, 4))


def test_ggn_is_not_the_hessian_in_a_smooth_network() -> None:
    model, inputs, targets = make("smooth")
    layer = find_layers(model)[0]
    found = top_eigenvalues(model, squared_error, inputs, targets, [layer], method="ggn", top_k=4).eigenvalues[0]
    expected = dense.largest(dense.hessian_block(model, squared_error, inputs, targets, layer), 4)
    assert (found - expected).abs().max() > 0.01 * expected.max()


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
        power = PowerIteration(num_iterations=math.ceil(math.log(ROUNDING / (100 * len(block))) / shrinkage))
        found = top_eigenvalues(
            model, smooth_cross_entropy, inputs, targets, [layer], method="hessian", top_k=2, power=power
        ).eigenvalues[0]
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=2 * ROUNDING * magnitudes[0].item())


def test_power_iteration_converges_as_fast_as_the_spectrum_lets_it() -> None:
    spectrum = torch.tensor([-5.0, 4.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    start = torch.ones(1, 5, dtype=torch.float64)
    errors = []
    for num_iterations in (2, 8, 32, 128):
        found = power_iteration(lambda u: spectrum * u, start, PowerIteration(num_iterations=num_iterations))
        errors.append((found[0] + 5).abs().item())
        # The last product is made with the vector of the iteration before.
        bound = 2 * 5 * 4 * (4 / 5) ** (2 * (num_iterations - 1))
        assert errors[-1] <= bound + 1e-14
    assert errors == sorted(errors, reverse=True)


def test_power_iteration_finds_the_next_eigenvalues_by_deflation() -> None:
    spectrum = torch.tensor([-5.0, 4.0, 3.0, 1.0, 0.0], dtype=torch.float64)
    starts = torch.randn(5, 5, dtype=torch.float64)
    found = power_iteration(lambda u: spectrum * u, starts, PowerIteration(num_iterations=200))
    torch.testing.assert_close(found, spectrum)


def test_power_iteration_stops_at_its_tolerance() -> None:
    spectrum = torch.tensor([5.0, 4.0], dtype=torch.float64)
    num_products = 0

    def product(u: Tensor) -> Tensor:
        nonlocal num_products
        num_products += 1
        return spectrum * u

    power = PowerIteration(num_iterations=10_000, tolerance=1e-6)
    found = power_iteration(product, torch.ones(1, 2, dtype=torch.float64), power)
    assert num_products < 100
    torch.testing.assert_close(found, spectrum[:1], rtol=1e-5, atol=0.0)


def test_hessian_starts_from_the_generator() -> None:
    model, inputs, targets = make("smooth")
    layers = find_layers(model)
    power = PowerIteration(num_iterations=1)

    def measure(generator: torch.Generator | None) -> Tensor:
        return top_eigenvalues(
            model, F.cross_entropy, inputs, targets, layers, method="hessian", top_k=1, generator=generator, power=power
        ).eigenvalues

    first, again, other = (measure(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, measure(None))
    assert not torch.equal(first, other)


@pytest.mark.parametrize("method", ["fisher", "ggn"])
@pytest.mark.parametrize("name", CASES)
def test_chunks_change_nothing(name: str, method: str) -> None:
    model, inputs, targets = make(name)
    layers = find_layers(model)
    head = {"fisher": fisher_grams, "ggn": ggn_grams}[method]
    whole, chunked = (
        head(
            Objective(model=model, loss=smooth_cross_entropy, inputs=inputs, targets=targets, chunk_bytes=chunk_bytes),
            layers,
        ).matrices
        for chunk_bytes in (2**28, 200)
    )
    torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize("name", ["convolutions", "attention", "tied_tokens"])
def test_fisher_runs_the_model_twice_once_for_one_sample(name: str) -> None:
    model, inputs, targets = make(name)
    batch_sizes = []
    model.register_forward_hook(lambda module, args, output: batch_sizes.append(len(args[0])))
    top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method="fisher", top_k=1)
    assert batch_sizes == [NUM_SAMPLES, 1]


def test_noise_is_that_of_the_samples_own_gradients() -> None:
    model, inputs, targets = make("smooth")
    layers = find_layers(model)
    rows = torch.cat([dense.sample_gradients(model, F.cross_entropy, inputs, targets, layer) for layer in layers], 1)
    estimate = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=1)
    trace = rows.var(dim=0, correction=1).sum()
    torch.testing.assert_close(estimate.trace_covariance, trace)
    torch.testing.assert_close(
        estimate.mean_square_norm, rows.mean(dim=0).square().sum() - trace / NUM_SAMPLES, atol=1e-12, rtol=1e-9
    )


def test_noise_is_unbiased() -> None:
    # Averaged over all draws of 3 of the 6 samples, an unbiased estimate is what all 6 give.
    model, inputs, _ = make("smooth")
    targets = torch.zeros(NUM_SAMPLES, dtype=torch.long)
    layers = find_layers(model)

    def measure(indices: Any) -> Tensor:
        rows = torch.tensor(indices)
        estimate = top_eigenvalues(
            model, F.cross_entropy, inputs[rows], targets[rows], layers, method="fisher", top_k=1
        )
        return torch.stack([estimate.mean_square_norm, estimate.trace_covariance])

    draws = torch.stack([measure(indices) for indices in itertools.combinations(range(NUM_SAMPLES), 3)])
    assert (draws > 0).all()
    torch.testing.assert_close(draws.mean(dim=0), measure(range(NUM_SAMPLES)))


def test_noise_is_never_negative() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    inputs = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    estimate = top_eigenvalues(
        model, lambda y, _: y.mean(), inputs, inputs, find_layers(model), method="fisher", top_k=1
    )
    assert estimate.mean_square_norm == 0.0
    assert estimate.trace_covariance == 2.0


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "training": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_untouched(model: nn.Module, before: dict[str, Any]) -> None:
    torch.testing.assert_close(snapshot(model), before, rtol=0.0, atol=0.0)


def half_trained(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in training mode with one part held in eval mode, and gradients on some parameters."""
    model, inputs, targets = make(name)
    model.train()
    next(iter(model.children())).eval()
    parameters = list(model.parameters())
    parameters[0].grad = torch.randn_like(parameters[0])
    return model, inputs, targets


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["convolutions", "attention", "recurrent", "positions"])
def test_the_model_is_left_as_it_was(name: str, method: Any) -> None:
    model, inputs, targets = half_trained(name)
    before = snapshot(model)
    top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_left_as_it_was_when_the_loss_raises(method: Any) -> None:
    model, inputs, targets = half_trained("convolutions")
    before = snapshot(model)

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError, match="no loss today"):
        top_eigenvalues(model, broken, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


class Greedy(Bilinear):
    """Runs out of memory from the nth forward pass on."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.num_calls = n, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls >= self.n:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(x)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["fisher", "ggn"])
def test_running_out_of_memory_is_told_and_leaves_the_model_as_it_was(method: Any, n: int) -> None:
    model = nn.Sequential(nn.Linear(5, 5), Greedy(n), nn.Linear(3, NUM_CLASSES)).train()
    inputs, targets = vectors(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    before = snapshot(model)
    with pytest.raises(torch.OutOfMemoryError):
        top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert_untouched(model, before)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_without_a_part_has_no_curvature(method: Any) -> None:
    body = ConvNet()
    model = nn.ModuleDict({"body": body, "spare": nn.Linear(2, 2), "idle": nn.Linear(5, 1)}).eval()
    # One layer is never called, the other's output comes to nothing.
    model.forward = lambda x: (body(x), model["idle"](x[:, 0, 0, :5]))[0]
    inputs, targets = images(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    layers = find_layers(model)
    found = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=5).eigenvalues
    assert [layer.name for layer in layers][-2:] == ["spare", "idle"]
    assert found[-2].tolist()[:4] == [0.0] * 4
    assert found[-2, 4].isnan()
    assert found[-1].tolist() == [0.0] * 5
    assert (found[:-2, 0] > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_ignores_the_model_has_no_curvature(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    estimate = top_eigenvalues(
        model, lambda y, t: t.double().mean(), inputs, targets, find_layers(model), method=method, top_k=2
    )
    assert not estimate.eigenvalues.any()


@pytest.mark.parametrize("method", ["ggn", "hessian"])
def test_a_linear_loss_has_no_curvature(method: Any) -> None:
    model = nn.Linear(5, NUM_CLASSES)
    found = top_eigenvalues(
        model,
        lambda y, t: y.sum() / len(t),
        vectors(),
        torch.zeros(NUM_SAMPLES),
        find_layers(model),
        method=method,
        top_k=2,
    ).eigenvalues
    assert not found.any()


@pytest.mark.parametrize(("method", "num_candidates"), [("fisher", 6), ("ggn", 18), ("hessian", 20)])
def test_places_that_nothing_can_fill_are_nan(method: Any, num_candidates: int) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, NUM_CLASSES), nn.Linear(NUM_CLASSES, NUM_CLASSES))
    layers = find_layers(model)
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    found = top_eigenvalues(model, F.cross_entropy, vectors(), targets, layers, method=method, top_k=25).eigenvalues
    assert found.isfinite().sum(dim=1).tolist() == [
        min(num_candidates, 20),
        min(num_candidates, 12),
        min(num_candidates, 9),
    ]
    assert found[0, :num_candidates].isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_diverged_model_is_a_row_of_nan_and_no_error(method: Any) -> None:
    model, inputs, targets = make("convolutions")
    with torch.no_grad():
        model[8].weight[0, 0] = math.nan
    found = top_eigenvalues(model, F.cross_entropy, inputs, targets, find_layers(model), method=method, top_k=2)
    assert found.eigenvalues.isnan().all()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, NUM_CLASSES), nn.Linear(5, NUM_CLASSES)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.left(left) * self.right(right) * scale


@pytest.mark.parametrize("method", METHODS)
def test_inputs_go_in_by_position_or_by_name(method: Any) -> None:
    model = TwoInputs()
    layers = find_layers(model)
    left, right, targets = vectors(), vectors(), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    found = [
        top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2).eigenvalues
        for inputs in ((left, right, 1.0), [left, right], {"right": right, "left": left, "scale": 1.0})
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_positions_are_measured_whole_when_the_model_takes_a_mapping() -> None:
    model, inputs, targets = make("positions")
    layers = find_layers(model)
    plain = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=2)
    named = top_eigenvalues(model, F.cross_entropy, {"tokens": inputs}, targets, layers, method="fisher", top_k=2)
    torch.testing.assert_close(named.eigenvalues, plain.eigenvalues)
    assert named.fallback_layers == ()


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_modes_do_not_matter(method: Any) -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    layers = find_layers(model)

    def measure() -> Tensor:
        return top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method=method, top_k=2).eigenvalues

    expected = measure()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(measure(), expected)
    with torch.no_grad():
        assert torch.equal(measure(), expected)
    with torch.inference_mode():
        assert torch.equal(measure(), expected)


def assert_fisher(model: nn.Module, inputs: Tensor, targets: Tensor, fallback: tuple[str, ...] = ()) -> None:
    layers = find_layers(model)
    estimate = top_eigenvalues(model, F.cross_entropy, inputs, targets, layers, method="fisher", top_k=3)
    for layer, found in zip(layers, estimate.eigenvalues, strict=True):
        assert_spectrum(found, dense.largest(dense.fisher_block(model, F.cross_entropy, inputs, targets, layer), 3))
    assert estimate.fallback_layers == fallback


@pytest.mark.parametrize("name", ["convolutions", "foreign"])
def test_hooks_of_others_are_respected(name: str) -> None:
    model, inputs, targets = make(name)
    for module in list(model.children())[:2]:
        module.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))
        module.register_forward_hook(lambda module, args, output: 0.5 * output)
    assert_fisher(model, inputs, targets)


def test_a_forward_wrapped_on_the_instance_is_respected() -> None:
    model, inputs, targets = make("convolutions")
    for module in model.children():
        module.forward = (lambda original: lambda *args: original(*args))(module.forward)
    assert_fisher(model, inputs, targets)


def test_an_adapter_around_a_linear_layer_is_seen_through() -> None:
    model, inputs, targets = make("foreign")
    first, adapter = model[0], nn.Linear(5, 5).double()
    model.add_module("adapter", nn.ModuleList([adapter]))
    first.forward = lambda x: F.linear(x, first.weight) + adapter.weight @ adapter.weight[0]
    model.forward = lambda x: model[2](model[1](model[0](x)))
    assert_fisher(model, inputs, targets)


def test_a_penalty_on_weights_in_the_loss_is_part_of_each_samples_loss() -> None:
    model, inputs, targets = make("positions")

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) + model.position.weight.square().sum()

    layers = find_layers(model)
    found = top_eigenvalues(model, penalised, inputs, targets, layers, method="fisher", top_k=3).eigenvalues
    for layer, row in zip(layers, found, strict=True):
        assert_spectrum(row, dense.largest(dense.fisher_block(model, penalised, inputs, targets, layer), 3))


class Stubborn(nn.Module):
    """Keeps a reference to its weight where nobody who wants to replace it would look."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, NUM_CLASSES))
        self.references = (self.weight,)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.references[0]


def test_a_weight_that_cannot_be_replaced_is_measured_sample_by_sample() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Stubborn()).double()
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    assert_fisher(model, vectors().double(), targets, fallback=("2",))


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.head = nn.Linear(5, NUM_CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x + self.head.bias.sum(), use_reentrant=self.use_reentrant))


def test_checkpointed_layers_are_measured() -> None:
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    assert_fisher(Checkpointed(use_reentrant=False).double(), vectors().double(), targets)


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_that_hide_the_graph_are_refused(method: Any) -> None:
    model, targets = Checkpointed(use_reentrant=True), torch.randint(NUM_CLASSES, (NUM_SAMPLES,))
    with pytest.raises(ValueError, match="use_reentrant = True: must be False"):
        top_eigenvalues(model, F.cross_entropy, vectors(), targets, find_layers(model), method=method, top_k=1)


@pytest.mark.parametrize("outputs", ["sequence", "tuple", "flat"])
def test_ggn_needs_one_vector_of_outputs_per_sample(outputs: str) -> None:
    model = nn.Linear(4, NUM_CLASSES)
    shape = {"sequence": lambda y: y, "tuple": lambda y: (y, y), "flat": lambda y: y.flatten(0, 1)}[outputs]
    model.register_forward_hook(lambda module, args, output: shape(output))
    with pytest.raises(ValueError, match=r"outputs have shape .*: ggn needs \[6, C\].*use method fisher"):
        top_eigenvalues(model, F.cross_entropy, sequences(), torch.zeros(6), find_layers(model), method="ggn", top_k=1)


def test_bad_options_are_refused() -> None:
    model = nn.Linear(5, NUM_CLASSES)
    layers, inputs, targets = find_layers(model), vectors(), torch.zeros(NUM_SAMPLES, dtype=torch.long)

    def measure(inputs: Any = inputs, targets: Any = targets, layers: Any = layers, **options: Any) -> None:
        options = {"method": "fisher", "top_k": 1, **options}
        top_eigenvalues(model, options.pop("loss", F.cross_entropy), inputs, targets, layers, **options)

    with pytest.raises(ValueError, match="curvature method = 'newton': must be one of"):
        measure(method="newton")
    with pytest.raises(ValueError, match="top_k = 0"):
        measure(top_k=0)
    with pytest.raises(ValueError, match=r"layers = \[\]: must name at least one"):
        measure(layers=[])
    with pytest.raises(ValueError, match="number of samples = 1: fisher needs at least 2"):
        measure(inputs[:1], targets[:1])
    with pytest.raises(ValueError, match=r"shapes \[\(6, 5\), \(4,\)\]: dimension 0"):
        measure(inputs, targets[:4])
    with pytest.raises(ValueError, match=r"shapes \[\(6, 5\), \(\), \(6,\)\]: dimension 0"):
        measure((inputs, torch.ones(())), targets)
    with pytest.raises(ValueError, match=r"loss returned shape \(6,\): must be the mean"):
        measure(loss=lambda y, t: F.cross_entropy(y, t, reduction="none"))
    with pytest.raises(ValueError, match="num_iterations = 0"):
        PowerIteration(num_iterations=0)
    with pytest.raises(ValueError, match="tolerance = 0"):
        PowerIteration(tolerance=0.0)


def test_hessian_takes_a_single_sample() -> None:
    model, inputs, targets = make("convolutions")
    found = top_eigenvalues(
        model, F.cross_entropy, inputs[:1], targets[:1], find_layers(model), method="hessian", top_k=1
    )
    assert found.eigenvalues.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_measures_what_a_cpu_does(name: str, method: Any) -> None:
    model, inputs, targets = make(name)
    power = PowerIteration(num_iterations=3)

    def measure(device: str) -> Tensor:
        model.to(device)
        estimate = top_eigenvalues(
            model,
            F.cross_entropy,
            inputs.to(device),
            targets.to(device),
            find_layers(model),
            method=method,
            top_k=2,
            power=power,
        )
        assert estimate.eigenvalues.device.type == device
        return estimate.eigenvalues.cpu()

    torch.testing.assert_close(measure("cuda"), measure("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_host_does_not_wait_for_gram_matrices() -> None:
    model, inputs, targets = make("convolutions", torch.float32)
    model, inputs, targets = model.cuda(), inputs.cuda(), targets.cuda()
    objective = Objective(model=model, loss=F.cross_entropy, inputs=inputs, targets=targets)
    fisher_grams(objective, find_layers(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        with measuring(model):
            gradient_noise(fisher_grams(objective, find_layers(model)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
