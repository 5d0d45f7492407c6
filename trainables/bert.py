"""BERT-base, of Hugging Face's transformers, on Python source code: it learns the lexical class of every byte."""

from __future__ import annotations

import io
import keyword
import token
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from triaccel_ray.config import require
from triaccel_ray.model.metrics import ACCURACY, Metric
from triaccel_ray.trainables.task import Recipe, SizeByDevice
from triaccel_ray.trainables.text import NUM_BYTES, TextGpt, Windows


class LexicalClass(IntEnum):
    """What a byte of Python source code is part of; `SPACE` is what lies between tokens."""

    SPACE = 0
    NAME = 1
    KEYWORD = 2
    NUMBER = 3
    STRING = 4
    COMMENT = 5
    OPERATOR = 6


_CLASS_OF_TOKEN = {
    "NUMBER": LexicalClass.NUMBER,
    "STRING": LexicalClass.STRING,
    "COMMENT": LexicalClass.COMMENT,
    "OP": LexicalClass.OPERATOR,
}


def lexical_classes(code: bytes) -> bytes | None:
    """Returns the `LexicalClass` of every byte; None if `code` is not Python in ASCII."""
    if not code.isascii():
        return None
    classes, starts = bytearray(len(code)), [0]
    for line in io.BytesIO(code):
        starts.append(starts[-1] + len(line))
    try:
        # Not by bytes: those would be decoded as a comment says.
        for found in tokenize.generate_tokens(io.StringIO(code.decode("ascii")).readline):
            kind = token.tok_name[found.type]
            if kind == "ERRORTOKEN":  # in place of an error, before Python 3.12
                return None
            if kind == "NAME":
                label = LexicalClass.KEYWORD if keyword.iskeyword(found.string) else LexicalClass.NAME
            elif kind.startswith(("FSTRING", "TSTRING")):  # since Python 3.12 and 3.14
                label = LexicalClass.STRING
            else:
                label = _CLASS_OF_TOKEN.get(kind, LexicalClass.SPACE)
            if label is not LexicalClass.SPACE:
                (row, column), (last_row, last_column) = found.start, found.end
                begin, end = starts[row - 1] + column, starts[last_row - 1] + last_column
                if kind.endswith("STRING_MIDDLE") and code[end - 1 : end + 1] in (b"{{", b"}}"):
                    end += 1  # the second of two braces, which stand for one
                classes[begin:end] = bytes([label]) * (end - begin)
    except (SyntaxError, tokenize.TokenError):
        return None
    return bytes(classes)


@dataclass(frozen=True, eq=False)
class ClassifiedWindows(Windows):
    """Windows of `context` bytes of source code; targets are the bytes' classes, int64 [b, context]."""

    classes: Tensor
    """uint8 [n]: the class of each byte of `text`."""

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`; there is no augmentation."""
        positions = self.positions(indices)[:, :-1]
        return self.text[positions].long(), self.classes[positions].long()

    def to(self, device: torch.device) -> ClassifiedWindows:
        """Returns the same windows on `device`."""
        return ClassifiedWindows(self.text.to(device), self.context, self.most, self.classes.to(device))


class Bert(nn.Module):
    """`BertForTokenClassification` for windows without padding; its output is the logits."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        """Draws the weights from torch's global generator.

        Raises:
            ValueError: transformers is not installed.
        """
        super().__init__()
        try:
            from transformers import BertConfig, BertForTokenClassification
        except ModuleNotFoundError as error:
            raise ValueError("text-bert needs Hugging Face's transformers: pip install transformers") from error
        self.bert = BertForTokenClassification(
            BertConfig(
                vocab_size=NUM_BYTES, pad_token_id=None, max_position_embeddings=context, num_hidden_layers=layers,
                hidden_size=width, intermediate_size=4 * width, num_attention_heads=heads, num_labels=len(LexicalClass),
            )
        )  # fmt: skip

    def forward(self, text: Tensor) -> Tensor:
        """Returns logits [b, t, 7] of the class of every byte of text, int64 [b, t] with t <= context."""
        logits: Tensor = self.bert(text).logits
        return logits


class TextBert(TextGpt):
    """BERT-base on the `*.py` files of `TextGpt`, 85 million weights on a GPU and 0.1 million on a CPU.

    Files that are not Python in ASCII are left out. The metric is the percentage of bytes whose class is right.
    """

    pattern: ClassVar[str] = "*.py"
    layers = SizeByDevice(gpu=12, cpu=2)
    width = SizeByDevice(gpu=768, cpu=64)
    heads = SizeByDevice(gpu=12, cpu=4)
    context = SizeByDevice(gpu=128, cpu=64)
    most_windows = SizeByDevice(gpu=1 << 16, cpu=1 << 11)
    recipe: ClassVar[Recipe] = Recipe(epochs=2, lr=1e-4, warmup_epochs=0.2, weight_decay=0.01, amp="bf16")
    metrics: ClassVar[Mapping[str, Metric]] = {"accuracy": ACCURACY}
    objective: ClassVar[str] = "accuracy"

    def model(self) -> nn.Module:
        """Returns the network.

        Raises:
            ValueError: transformers is not installed.
        """
        return Bert(**self._shape())

    def samples(self, paths: Sequence[Path], most: int) -> Windows:
        """Returns the first windows of the files at `paths`, at most `most`: it takes 0.8 s to classify a MB.

        Raises:
            ValueError: no file is Python in ASCII.
        """
        text, classes, context = bytearray(), bytearray(), self.context
        for path in paths:
            code = path.read_bytes() + b"\n"
            if (found := lexical_classes(code)) is not None:
                text += code
                classes += found
            if len(text) > most * context:
                break
        require(bool(text), "files", len(paths), "must hold some that are Python in ASCII; name another --data-dir")
        as_numbers = partial(torch.frombuffer, dtype=torch.uint8)
        return ClassifiedWindows(as_numbers(text), context, most, as_numbers(classes))
