"""Small models that are awkward to measure, each in its own way; shared by the tests of curvature."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.build import Wired
from tests.measure import dense_curvature as dense
from triaccel_ray.config import CurvatureConfig
from triaccel_ray.measure.budget import Limits
from triaccel_ray.measure.curvature.gram import GramMethod
from triaccel_ray.measure.curvature.hessian import BlockPower
from triaccel_ray.measure.curvature.meter import CurvatureMeter
from triaccel_ray.measure.curvature.objective import Objective, measuring
from triaccel_ray.measure.curvature.spectrum import CurvatureEstimate
from triaccel_ray.model.layers import Layer, Loss, find_layers

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
        hidden = F.relu(self.mix(self.table(tokens)))
        return self.out(self.mix(hidden).mean(dim=1))


def position_net() -> nn.Module:
    """Position vectors are the same for all samples, and as many as there are samples."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(torch.tanh(self.token(tokens) + self.position(places)).mean(dim=1))

    token, position = nn.Embedding(VOCABULARY, 4), nn.Embedding(NUM_SAMPLES, 4)
    return Wired(forward, token=token, position=position, head=nn.Linear(4, NUM_CLASSES))


def attention_net() -> nn.Module:
    """Sequence first, as `nn.MultiheadAttention` has it by default."""

    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=0))

    return Wired(forward, attention=nn.MultiheadAttention(4, 2), head=nn.Linear(4, NUM_CLASSES))


def recurrent_net() -> nn.Module:
    recurrent, head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, NUM_CLASSES)
    return Wired(lambda self, x: self.head(self.recurrent(x)[0][:, -1]), recurrent=recurrent, head=head)


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


def flatten_net() -> nn.Module:
    """The linear layer sees samples and positions in one dimension."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x.reshape(-1, 5))).view(len(x), -1, 4).mean(dim=1))

    return Wired(forward, first=nn.Linear(5, 4), head=nn.Linear(4, NUM_CLASSES))


def lending_net() -> nn.Module:
    """The first layer's weight is used once more outside it."""
    first, head = nn.Linear(5, 5), nn.Linear(5, NUM_CLASSES)
    return Wired(lambda self, x: self.head(torch.tanh(self.first(x)) @ self.first.weight), first=first, head=head)


class Quadratic(nn.Module):
    """Whose mean output over `quadratic_samples` has a diagonal Hessian with their spectrum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight[:, 0].square()).sum(dim=1)


def quadratic_samples(spectrum: Tensor, count: int = 3) -> tuple[Tensor, Tensor]:
    return (spectrum.double() / 2).repeat(count, 1), torch.zeros(count)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


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


def classes() -> Tensor:
    return torch.randint(NUM_CLASSES, (NUM_SAMPLES,))


def vectors() -> Tensor:
    return torch.randn(NUM_SAMPLES, 5)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolutions": (ConvNet, images),
    "smooth": (lambda: ConvNet(nn.GELU), images),
    "tied_tokens": (TokenNet, tokens),
    "positions": (position_net, tokens),
    "attention": (attention_net, sequences),
    "recurrent": (recurrent_net, sequences),
    "foreign": (lambda: nn.Sequential(nn.Linear(5, 5), Bilinear(), nn.Linear(3, 3)), vectors),
    "deciding": (lambda: nn.Sequential(Bilinear(decide=True), nn.Linear(3, 3)), vectors),
    "transposed": (lambda: nn.Sequential(Conv1D(5, 4), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)), sequences),
    "circular": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 2, 3, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(18, 3)
        ),
        images,
    ),
    "flattened": (flatten_net, lambda: torch.randn(NUM_SAMPLES, 2, 5)),
    "lent": (lending_net, vectors),
    "normed": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3)),
        vectors,
    ),
}
FALLBACK = {"deciding": ("0",), "recurrent": ("recurrent",)}
"""Which layers of which case nothing but one pass per sample can measure."""


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """The model in eval mode, with normalization statistics that do something, inputs and targets."""
    build, draw = CASES[name]
    model = build().to(dtype).eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    inputs = draw()
    num_outputs = VOCABULARY if name == "tied_tokens" else NUM_CLASSES
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return model, inputs, torch.randint(num_outputs, (NUM_SAMPLES,))


def directly(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    method: Any = "fisher",
    top_k: int = 2,
    *,
    loss: Loss = F.cross_entropy,
    layers: Sequence[Layer] | None = None,
    generator: torch.Generator | None = None,
    num_iterations: int | None = None,
    limits: Limits | None = None,
) -> CurvatureEstimate:
    """One measurement with nothing known before, as a meter's first."""
    objective = Objective(model=model, loss=loss, inputs=inputs, targets=targets, limits=limits or Limits())
    objective.require_samples(method)
    layers = find_layers(model) if layers is None else layers
    measured = BlockPower(layers, top_k) if method == "hessian" else GramMethod(layers, method, top_k)
    with measuring(model, loss, strict_fp32=method != "hessian"):
        return measured.measure(objective, generator or draws(), num_iterations)


def meter_of(
    model: nn.Module, method: Any = "fisher", top_k: int = 2, *, loss: Loss = F.cross_entropy, device: str = "cpu",
    **options: Any,
) -> CurvatureMeter:  # fmt: skip
    config = CurvatureConfig(method=method, top_k=top_k)
    return CurvatureMeter(model, loss, find_layers(model), config, device=torch.device(device), **options)


def draws(device: str = "cpu", *, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def assert_blocks(
    estimate: CurvatureEstimate, model: nn.Module, inputs: Any, targets: Any, method: str, loss: Loss = F.cross_entropy
) -> None:
    """Asserts that the estimate's eigenvalues of each layer are the largest of its dense block."""
    block = dense.fisher_block if method == "fisher" else dense.ggn_block
    for layer, found in zip(find_layers(model), estimate.eigenvalues, strict=True):
        expected = dense.largest(block(model, loss, inputs, targets, layer), len(found))
        assert found.dtype == torch.float32
        atol = ROUNDING * expected.abs().max().item()
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=atol, check_dtype=False)
