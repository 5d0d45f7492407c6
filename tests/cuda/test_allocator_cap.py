"""Caps on a GPU's memory that follow one another, with the functions of PyTorch that a machine without a GPU lacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triaccel_ray.cuda.allocator import AllocatorCap, caps_removed_on_error

GPU = torch.device("cuda", 0)
TOTAL_BYTES = 1001


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> SimpleNamespace:
    """A GPU whose allocator has a cap in whole bytes."""
    gpu = SimpleNamespace(bytes=TOTAL_BYTES, uuid=f"GPU of {request.node.name}")

    def set_fraction(fraction: float, device: torch.device | None = None) -> None:
        gpu.bytes = int(fraction * TOTAL_BYTES)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: gpu.bytes / TOTAL_BYTES)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", set_fraction)
    return gpu


def test_a_cap_ends_when_it_is_removed(gpu: SimpleNamespace) -> None:
    cap = AllocatorCap(GPU)
    cap.set(0.5)
    assert gpu.bytes == 500
    cap.remove()
    cap.remove()
    assert gpu.bytes == TOTAL_BYTES


@pytest.mark.parametrize("last", ["first", "second"])
def test_the_cap_that_was_set_last_is_in_force_and_none_comes_back_that_was_removed(
    gpu: SimpleNamespace, last: str
) -> None:
    first, second = AllocatorCap(GPU), AllocatorCap(GPU)
    first.set(0.25)
    second.set(0.5)
    assert gpu.bytes == 500
    first.set(0.2)
    assert gpu.bytes == 200
    removed, left = (second, first) if last == "first" else (first, second)
    removed.remove()
    assert gpu.bytes == (200 if last == "first" else 500)
    left.remove()
    assert gpu.bytes == TOTAL_BYTES


def test_caps_set_before_an_error_are_removed_but_not_those_that_were_there(gpu: SimpleNamespace) -> None:
    AllocatorCap(GPU).set(0.5)

    @caps_removed_on_error()
    def fail() -> None:
        AllocatorCap(GPU).set(0.25)
        assert gpu.bytes == 250
        raise ValueError("the model has no layer")

    with pytest.raises(ValueError, match="no layer"):
        fail()
    assert gpu.bytes == 500


def test_a_users_cap_is_never_exceeded_and_stays(gpu: SimpleNamespace) -> None:
    torch.cuda.set_per_process_memory_fraction(0.4, GPU)
    cap = AllocatorCap(GPU)
    cap.set(0.9)
    assert gpu.bytes == 400
    cap.set(0.3)
    cap.remove()
    assert gpu.bytes == pytest.approx(400, abs=1)


def test_a_cap_that_the_user_sets_meanwhile_is_heeded(gpu: SimpleNamespace) -> None:
    cap = AllocatorCap(GPU)
    cap.set(0.5)
    torch.cuda.set_per_process_memory_fraction(0.1, GPU)
    cap.set(0.5)
    assert gpu.bytes == pytest.approx(100, abs=1)
    torch.cuda.set_per_process_memory_fraction(0.7, GPU)
    cap.remove()
    assert gpu.bytes == 700
