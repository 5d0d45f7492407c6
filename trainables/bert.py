"""BERT-base, of Hugging Face's transformers, on Python source code: it learns the lexical class of every byte."""

from __future__ import annotations

import io
import keyword
import token
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from triaccel_ray.config import require
from triaccel_ray.model.metrics import ACCURACY, Metric
from triaccel_ray.trainables.task import Recipe
from triaccel_ray.trainables.text import NUM_BYTES, TextGpt
from triaccel_ray.trainables.text_files import Windows


class Lexical(IntEnum):
    """What a byte of Python source code is part of; `SPACE` is what lies between tokens."""

    SPACE = 0
    NAME = 1
    KEYWORD = 2
    NUMBER = 3
    STRING = 4
    COMMENT = 5
    OPERATOR = 6


_CLASSES = {"NUMBER": Lexical.NUMBER, "STRING": Lexical.STRING, "COMMENT": Lexical.COMMENT, "OP": Lexical.OPERATOR}


def lexical_classes(code: bytes) -> bytes | None:
    """Returns the `Lexical` class of every byte; None if `code` is not Python in ASCII."""
    if not code.isascii():
        return None
    classes, starts = bytearray(len(code)), [0]
    for line in io.BytesIO(code):
        starts.append(starts[-1] + len(line))
    try:
        for each in tokenize.tokenize(io.BytesIO(code).readline):
            kind = token.tok_name[each.type]
            if kind == "ERRORTOKEN":  # in place of an error, before Python 3.12
                return None
            if kind == "NAME":
                found = Lexical.KEYWORD if keyword.iskeyword(each.string) else Lexical.NAME
            elif kind.startswith(("FSTRING", "TSTRING")):  # since Python 3.12 and 3.14
                found = Lexical.STRING
            else:
                found = _CLASSES.get(kind, Lexical.SPACE)
            if found is not Lexical.SPACE:
                (row, column), (last_row, last_column) = each.start, each.end
                begin, end = starts[row - 1] + column, starts[last_row - 1] + last_column
                classes[begin:end] = bytes([found]) * (end - begin)
    except (SyntaxError, tokenize.TokenError):
        return None
    return bytes(classes)


@dataclass(frozen=True, eq=False)
class ClassifiedWindows(Windows):
    """Windows of `context` bytes of source code, int64 [b, context]; targets are their classes, alike."""

    classes: Tensor
    """uint8 [n], those of the text."""

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`; there is no augmentation."""
        places = self.places(indices)[:, :-1]
        return self.text[places].long(), self.classes[places].long()

    def to(self, device: torch.device) -> ClassifiedWindows:
        """Returns the same windows on `device`."""
        return ClassifiedWindows(self.text.to(device), self.context, self.most, self.classes.to(device))


class Bert(nn.Module):
    """`BertForTokenClassification` on windows without padding, which returns the logits alone."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        """Draws the weights from torch's global generator.

        Raises:
            ModuleNotFoundError: transformers is not installed.
        """
        super().__init__()
        try:
            from transformers import BertConfig, BertForTokenClassification
        except ModuleNotFoundError as error:
            hint = "the task text-bert needs Hugging Face's transformers: pip install 'triaccel-ray[transformers]'"
            raise ModuleNotFoundError(hint, name=error.name) from error
        self.bert = BertForTokenClassification(
            BertConfig(
                vocab_size=NUM_BYTES, pad_token_id=None, max_position_embeddings=context, num_hidden_layers=layers,
                hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads, num_labels=len(Lexical),
            )
        )  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        """Returns logits [b, t, 7] of the class of every byte of text, int64 [b, t] with t <= context."""
        logits: Tensor = self.bert(text).logits
        return logits


class TextBert(TextGpt):
    """BERT-base on the Python files of `TextGpt`, 85 million weights on a GPU and 0.1 million on a CPU.

    Files that are not Python in ASCII are left out. The metric is the percentage of bytes whose class is right.
    """

    name: ClassVar[str] = "text-bert"
    on_gpu: ClassVar[Mapping[str, int]] = {
        "layers": 12, "width": 768, "heads": 12, "context": 128, "most_windows": 1 << 16,
    }  # fmt: skip
    recipe: ClassVar[Recipe] = Recipe(epochs=2, lr=1e-4, warmup_epochs=0.2, weight_decay=0.01, amp="bf16")
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY}
    objective: ClassVar[str] = "accuracy"

    def model(self) -> nn.Module:
        """Returns the network."""
        return Bert(**self._shape())

    def samples(self, paths: Sequence[Path], most: int) -> Windows:
        """Returns the windows of the files at `paths`, at most `most`.

        Raises:
            ValueError: no file is Python in ASCII.
        """
        codes = [path.read_bytes() + b"\n" for path in paths]
        known = [(code, classes) for code in codes if (classes := lexical_classes(code)) is not None]
        require(bool(known), "files", len(paths), "must hold some that are Python in ASCII; name another --data-dir")
        text, targets = (b"".join(part) for part in zip(*known, strict=True))
        return ClassifiedWindows(_bytes(text), self._size("context"), most, _bytes(targets))


def _bytes(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.uint8)
