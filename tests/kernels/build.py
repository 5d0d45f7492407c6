"""Where the kernels' tests run, beside what, and within which errors."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Without a GPU the kernels run on the CPU, through Triton's interpreter."""
ROUNDING = {FP32: 2.0**-23, FP16: 2.0**-11, BF16: 2.0**-8 if DEVICE.type == "cuda" else 2.0**-7}
"""Relative error of a store: half a unit in the last place; the interpreter truncates to BF16."""
both = pytest.mark.parametrize(
    "kernel",
    [True, pytest.param(False, marks=pytest.mark.skipif(DEVICE.type == "cuda", reason="the reference runs on a CPU"))],
)
"""The kernel and its reference."""
interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""For kernels that meet NaN and infinity: Triton's interpreter computes by NumPy, which warns of them."""


@pytest.fixture
def poison() -> Iterator[None]:
    """Fills every new tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_close(actual: Tensor, exact: Tensor, rounding: float, arithmetic: float) -> None:
    """Asserts an error within the rounding of each value, and `arithmetic` of the largest one."""
    assert actual.isfinite().all()
    allowed = rounding * exact.abs() + arithmetic * exact.abs().max()
    assert ((actual.double() - exact).abs() <= allowed).all(), ((actual.double() - exact).abs() / allowed).max()


def assert_replays(step: Callable[[], tuple[Tensor, ...]], reset: Callable[[], object] = lambda: None) -> None:
    """Asserts that a CUDA graph of `step` computes what the step computes eagerly, bit for bit, after each `reset`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    reset()
    expected = [tensor.clone() for tensor in step()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(20):
        reset()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(map(torch.equal, captured, expected))
