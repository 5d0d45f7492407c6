import pytest
import torch
from torch import Tensor, nn

from triaccel_ray.apply.fused_norm import RecomputedInput, format_refusal
from triaccel_ray.kernels.batch_norm_act import RunningStatistics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _step(layer: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """Returns a convolution's output on a fused norm's, and where that was."""
    from triaccel_ray.kernels.batch_norm_act.launch import Call, launch

    running = RunningStatistics(mean=torch.zeros(8, device=DEVICE), var=torch.ones(8, device=DEVICE))
    call = Call(running=running, eps=1e-5, activation="relu", output_dtype=torch.float32)
    y = launch(call, x, torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), None)
    return layer(y), y.data_ptr()


def test_a_recomputed_input_is_not_kept_and_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 4, 3, padding=1).to(DEVICE, memory_format=torch.channels_last)
    data = torch.randn(4, 8, 6, 6, device=DEVICE).to(memory_format=torch.channels_last)
    gradients = []
    for layer in (conv, RecomputedInput(conv)):
        x = data.clone().requires_grad_()
        out, address = _step(layer, x)
        other = torch.empty_like(data)  # takes the place of what was freed, if it was
        kept = out.grad_fn._saved_input  # type: ignore[union-attr]
        assert (kept.data_ptr() == address) == (layer is conv)
        del other, kept
        gradients.append(torch.autograd.grad(out.square().sum(), [x, conv.weight]))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("fits", [True, False])
def test_another_memory_format_is_refused_with_the_way_out(fits: bool) -> None:
    x = torch.zeros(2, 3, 4, 5)
    laid_out = x.to(memory_format=torch.channels_last)
    assert format_refusal(laid_out, None) == format_refusal(laid_out, laid_out) == ""
    assert format_refusal(x[:, :1].contiguous(), None) == ""  # the same in both formats
    refusal = format_refusal(laid_out, x) if fits else format_refusal(x, laid_out)
    assert "shape (2, 3, 4, 5) have strides (60, 20, 5, 1)" in refusal
    assert "keep activations in that memory format" in refusal
