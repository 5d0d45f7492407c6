"""What a graph, read once, would not compute the same."""

import contextlib
import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.apply.fusible import Block, layers_of
from triaccel_ray.apply.fuse import fuse
from triaccel_ray.apply.trace import Refusal


class Optional(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x)


class Variable(Block):
    def forward(self, *x: Tensor) -> Any:
        return super().forward(*x)


def _first(does: Callable[[Block, Tensor], Any]) -> Callable[[Block, Tensor], Tensor]:
    """Does something before what can be fused."""

    def rest(block: Block, x: Tensor) -> Tensor:
        does(block, x)
        return block.norm(block.conv(x))

    return rest


def _hides_errors(block: Block, x: Tensor) -> None:
    with contextlib.suppress(Exception):
        block.last = x  # type: ignore[assignment]


def _without_gradients(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = block.conv(x)
    return block.norm(x)


def _autocast(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.norm(block.conv(x))


def _keeping_nothing(block: Block, x: Tensor) -> Tensor:
    return checkpoint(lambda x: block.norm(block.conv(x)), x, use_reentrant=False)


def _named(block: Block, x: Tensor) -> Any:
    return OrderedDict(y=block.norm(block.conv(x)))


REFUSED: dict[str, tuple[Callable[[Block, Tensor], Any], str]] = {
    "decision": (lambda b, x: b.norm(b.conv(x if x.sum() > 0 else -x)), "cannot be traced: TraceError"),
    "type": (lambda b, x: b.norm(b.conv(x)) if isinstance(x, Tensor) else x, "checks the type of a tensor"),
    "chance": (lambda b, x: b.norm(b.conv(x)) * float(torch.rand(())), "draws random numbers"),
    "plain chance": (lambda b, x: b.norm(b.conv(x)) * random.random(), "draws random numbers"),
    "own tensor": (lambda b, x: b.norm(b.conv(x)) + torch.ones(4, 1, 1), "makes tensors of its own"),
    "attribute": (_first(lambda b, x: setattr(b, "last", x)), "assigns last of Block"),
    "attribute by its dict": (_first(lambda b, x: b.__dict__.update(last=x)), "assigns last of Block"),
    "attribute by object": (_first(lambda b, x: object.__setattr__(b, "last", x)), "assigns last of Block"),
    "attribute deleted": (_first(lambda b, x: delattr(b, "once")), "deletes once of Block"),
    "attribute, errors caught": (_first(_hides_errors), "assigns last of Block"),
    "list": (_first(lambda b, x: b.seen.append(x)), "changes a list"),  # type: ignore[operator, union-attr]
    "no gradients": (_without_gradients, "switches gradients, autocast"),
    "autocast": (_autocast, "switches gradients, autocast"),
    "recomputation": (_keeping_nothing, "switches gradients, autocast or saved-tensor hooks"),
    "mapping": (_named, "makes a OrderedDict"),
    "no norm": (lambda b, x: b.conv(x), "calls no BatchNorm2d"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused_and_leaves_no_trace(name: str) -> None:
    rest, reason = REFUSED[name]
    model = Block(rest)
    model.seen, model.once = [], 1  # type: ignore[assignment]
    torch.manual_seed(5)
    state, plain_state, attributes = torch.get_rng_state(), random.getstate(), set(model.__dict__)
    refusal = fuse(model, layers_of(model))
    assert isinstance(refusal, Refusal)
    assert reason in refusal.reason
    assert torch.equal(state, torch.get_rng_state())
    assert plain_state == random.getstate()
    assert set(model.__dict__) == attributes
    assert model.seen == []


def test_a_forward_function_that_is_not_the_models_alone_is_refused() -> None:
    hooked, replaced = Block(), Block()
    hooked.register_forward_hook(lambda module, args, output: None)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    for model, reason in [
        (Optional(), "optional parameter, mask"), (Variable(), "takes *x"), (hooked, "hooks"),
        (replaced, "a forward function of its own"), (nn.DataParallel(Block()), "a DataParallel"),
    ]:  # fmt: skip
        refusal = fuse(model, layers_of(model))
        assert isinstance(refusal, Refusal)
        assert reason in refusal.reason
