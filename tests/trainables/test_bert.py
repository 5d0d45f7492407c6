from __future__ import annotations

import sys

import pytest
import torch

from triaccel_ray.trainables.bert import IGNORED, MASK, MaskedWindows, TextBert
from triaccel_ray.trainables.task import Purpose


def windows(count: int = 200, context: int = 40) -> MaskedWindows:
    generator = torch.Generator().manual_seed(3)
    return MaskedWindows(
        torch.randint(0, 256, (count * context + 1,), generator=generator).to(torch.uint8), context, count
    )


@pytest.mark.parametrize("seed", [None, 0])
def test_every_window_has_as_many_masked_bytes_and_they_are_the_targets(seed: int | None) -> None:
    source = windows()
    inputs, targets = source.batch(torch.arange(200), None if seed is None else torch.Generator().manual_seed(seed))
    masked = inputs == MASK
    assert (masked.sum(1) == 6).all()
    assert torch.equal(masked, targets != IGNORED)
    assert torch.equal(torch.where(masked, targets, inputs), source.text[:-1].view(200, 40).long())
    per_place = masked.sum(0).float()  # 30 are expected, with a standard deviation of 5
    assert per_place.min() > 5
    assert per_place.max() < 55
    assert (masked[:, 1:] & masked[:, :-1]).sum() > 50  # 152 are expected


def test_masks_are_fixed_without_a_generator_and_new_with_one() -> None:
    source, generator = windows(), torch.Generator().manual_seed(0)
    backwards, _ = source.batch(torch.arange(199, -1, -1), None)
    assert torch.equal(source.batch(torch.arange(200), None)[0], backwards.flip(0))
    one, other = (source.batch(torch.arange(200), generator)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert isinstance(source.to(torch.device("cpu")), MaskedWindows)


def test_bytes_on_both_sides_of_a_mask_change_its_logits() -> None:
    torch.manual_seed(0)
    task = TextBert()
    model = task.model().eval()
    inputs, targets = task.data(Purpose.SEARCH).held_out.batch(torch.arange(2), None)
    logits = model(inputs)
    assert logits.shape == (2, 64, 257)
    assert task.loss(logits, targets, task.recipe).item() == pytest.approx(5.55, abs=0.2)  # ln 257
    for changed_place in (0, 63):
        changed = inputs.clone()
        changed[:, changed_place] = (changed[:, changed_place] + 1) % 256
        assert not torch.allclose(model(changed)[:, 31], logits[:, 31])


def test_without_transformers_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"text-bert needs .*: pip install 'triaccel-ray\[transformers\]'"):
        TextBert().model()
