"""BERT-base, of Hugging Face's transformers, on text files: it learns to restore masked bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from triaccel_ray.trainables.task import Recipe
from triaccel_ray.trainables.text import NUM_BYTES, TextGpt
from triaccel_ray.trainables.text_files import Windows

MASK = NUM_BYTES
"""The token that stands for a masked byte."""
IGNORED = -100
"""The target of a byte that is not masked, which losses and metrics ignore."""
_MASKED_SHARE = 0.15


@dataclass(frozen=True, eq=False)
class MaskedWindows(Windows):
    """Windows of `context` bytes, 15 % of them masked: targets are the masked bytes, `IGNORED` elsewhere.

    Every window has the same number of masked bytes, so that each sample has the same weight in a batch's mean. (BERT
    leaves some of them as they are, and replaces others by wrong ones.)
    """

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`, int64 [b, context]; without a generator, their masks are fixed."""
        text, _ = super().batch(indices, None)
        if generator is None:
            places = indices.to(text.device)[:, None] * self.context + torch.arange(self.context, device=text.device)
            order = places * 2654435761 % 2**32
            order = (order ^ order >> 15) * 2246822519 % 2**32  # a hash; of one product, places would be evenly spaced
        else:
            order = torch.rand(text.shape, generator=generator, device=text.device)
        # [b, context]
        masked = torch.zeros_like(text, dtype=torch.bool)
        masked.scatter_(1, order.argsort(1)[:, : max(round(_MASKED_SHARE * self.context), 1)], True)
        return text.masked_fill(masked, MASK), text.masked_fill(~masked, IGNORED)

    def to(self, device: torch.device) -> MaskedWindows:
        """Returns the same windows of bytes on `device`."""
        return MaskedWindows(self.text.to(device), self.context, self.most)


class Bert(nn.Module):
    """`BertForMaskedLM` on windows without padding, which returns the logits alone."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        """Draws the weights from torch's global generator.

        Raises:
            ModuleNotFoundError: transformers is not installed.
        """
        super().__init__()
        try:
            from transformers import BertConfig, BertForMaskedLM
        except ModuleNotFoundError as error:
            hint = "the task text-bert needs Hugging Face's transformers: pip install 'triaccel-ray[transformers]'"
            raise ModuleNotFoundError(hint, name=error.name) from error
        self.bert = BertForMaskedLM(
            BertConfig(
                vocab_size=NUM_BYTES + 1, pad_token_id=None, max_position_embeddings=context, num_hidden_layers=layers,
                hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads,
            )
        )  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        """Returns logits [b, t, 257] of the byte at every position of text, int64 [b, t] with t <= context."""
        logits: Tensor = self.bert(text).logits
        return logits


class TextBert(TextGpt):
    """BERT-base on the text of `TextGpt`: 85 million weights on a GPU, 0.1 million on a CPU; needs transformers."""

    name: ClassVar[str] = "text-bert"
    windows: ClassVar[type[Windows]] = MaskedWindows
    on_gpu: ClassVar[Mapping[str, int]] = {
        "layers": 12, "width": 768, "heads": 12, "context": 128, "most_windows": 1 << 16,
    }  # fmt: skip
    recipe: ClassVar[Recipe] = Recipe(epochs=3, lr=2e-4, warmup_epochs=0.3, weight_decay=0.01, amp="bf16")

    def model(self) -> nn.Module:
        """Returns the network."""
        return Bert(**self._shape())
