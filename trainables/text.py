"""A byte-level GPT on text files: trains anywhere, without a download, on the source of Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, require
from triaccel_ray.data.sources import DataSource
from triaccel_ray.model.metrics import BITS_PER_BYTE, PERPLEXITY, Metric
from triaccel_ray.trainables.task import WITHIN_BUDGET, Purpose, Recipe, SizeByDevice, Splits, Task, parameter_groups

NUM_BYTES = 256
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders of the standard library that hold other packages, or its tests, which not every installation has."""
_SHARE_HELD_OUT = 0.1
"""Share of the bytes for validation, and as much for testing."""
PARTS = ("test", "validation", "train")


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then an MLP of four times the width, both residual."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        """Initializes one block of `layers`; residual projections start smaller in deeper models (GPT-2)."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for linear in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for linear in (self.out, self.down):
            nn.init.normal_(linear.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [b, t, width] for x [b, t, width]."""
        x = x + self.attend(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y

    def attend(self, x: Tensor) -> Tensor:
        """Returns causal multi-head self-attention [b, t, width] of x [b, t, width]."""
        # each [b, heads, t, width / heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class GPT(nn.Module):
    """Byte-level GPT that predicts the next byte at every position; embedding and output share their weight."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        """Draws the weights from torch's global generator.

        Raises:
            ValueError: the heads do not divide the width.
        """
        super().__init__()
        require(width % heads == 0, "width", width, f"must be a multiple of heads = {heads}")
        self.bytes, self.places = nn.Embedding(NUM_BYTES, width), nn.Embedding(context, width)
        for embedding in (self.bytes, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self.head.weight = self.bytes.weight

    def forward(self, text: Tensor) -> Tensor:
        """Returns logits [b, t, 256] of the byte that follows each in text, int64 [b, t] with t <= context."""
        x = self.bytes(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text_files(folder: Path | None, pattern: str = "*") -> dict[str, Path]:
    """Returns the files below `folder` by their sorted relative paths, without hidden and empty files.

    Only those whose names match `pattern`. If `folder` is None, these are the modules of the standard library.

    Raises:
        FileNotFoundError: there is no such folder, or it holds fewer than three files, one for each part.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder.expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder: name one that holds text")
    found = {}
    for path in sorted(root.rglob("*.py" if folder is None else pattern)):
        parts = path.relative_to(root).parts
        is_hidden = any(part.startswith(".") for part in parts)
        is_wanted = _SKIPPED_FOLDERS.isdisjoint(parts) if folder is None else not is_hidden
        if is_wanted and path.is_file() and path.stat().st_size:
            found["/".join(parts)] = path
    if len(found) < len(PARTS):
        raise FileNotFoundError(
            f"{root} holds {len(found)} files with text{'' if pattern == '*' else f', named {pattern}'}: must hold at "
            f"least {len(PARTS)}, for training, validation and testing, each file in one of them; cut a large one "
            "(`split -n l/20 FILE`), or name another --data-dir"
        )
    return found


def split_by_file(sizes: Mapping[str, int]) -> dict[str, list[str]]:
    """Splits files, given by name and size in bytes, into parts; returns the file names of each part.

    Files are sorted by a hash of their names. The first that make up a tenth of the bytes are for testing, the next
    tenth is for validation. Each part has at least one file.
    """
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    wanted = _SHARE_HELD_OUT * sum(sizes.values())
    split = {}
    for num_after, part in ((2, "test"), (1, "validation")):
        count, taken = 1, sizes[order[0]]
        while taken < wanted and count < len(order) - num_after:
            taken += sizes[order[count]]
            count += 1
        split[part], order = order[:count], order[count:]
    return {**split, "train": order}


def read_bytes(paths: Sequence[Path]) -> Tensor:
    """Returns the concatenated bytes of the files, each followed by a zero byte: uint8 [n]."""
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() + b"\0" for path in paths)), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Windows(DataSource):
    """Windows of `context` + 1 bytes: inputs are the first `context` of each, targets the last, int64 [b, context].

    These are all consecutive windows or, if there are more than `most`, that many spread evenly over the text.
    """

    text: Tensor
    """uint8 [n]"""
    context: int
    most: int

    def __post_init__(self) -> None:
        rule = f"must hold at least {self.context + 1} bytes, one window; give more text or a smaller context"
        require(len(self.text) > self.context, "text (bytes)", len(self.text), rule)

    def __len__(self) -> int:
        """Returns the number of windows."""
        return min((len(self.text) - 1) // self.context, self.most)

    @property
    def is_resident(self) -> bool:
        """True: `batch` works on the device alone."""
        return True

    def batch(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns the windows at `indices`; there is no augmentation."""
        windows = self.text[self.positions(indices)].long()
        return windows[:, :-1], windows[:, 1:]

    def positions(self, indices: Tensor) -> Tensor:
        """Returns where the bytes of the windows at `indices` lie in the text: int64 [b, context + 1]."""
        device, stride = self.text.device, (len(self.text) - 1) // len(self)
        return indices.to(device)[:, None] * stride + torch.arange(self.context + 1, device=device)

    def to(self, device: torch.device) -> Windows:
        """Returns the same windows of bytes on `device`."""
        return Windows(self.text.to(device), self.context, self.most)


class TextGpt(Task):
    """A byte-level GPT on text, split by file into 80 % training, 10 % validation and 10 % test text.

    The text is the modules of the installed Python's standard library, or the files below `--data-dir`. The library
    differs between Python versions, so their results are not comparable. A subclass may set the size. Defaults are
    10.8 million weights and all of the text on a GPU, 0.1 million and 2,048 windows of 64 bytes on a CPU.
    """

    pattern: ClassVar[str] = "*"
    """The names of files below `--data-dir` that are text."""
    layers = SizeByDevice(gpu=6, cpu=2)
    """Number of transformer blocks."""
    width = SizeByDevice(gpu=384, cpu=64)
    """Features at every position."""
    heads = SizeByDevice(gpu=6, cpu=4)
    """Attention heads; must divide `width`."""
    context = SizeByDevice(gpu=256, cpu=64)
    """Context length, bytes."""
    most_windows = SizeByDevice(gpu=1 << 20, cpu=1 << 11)
    """Maximum of training windows of `context` bytes in an epoch, spread over the text; an eighth of it to evaluate."""
    recipe: ClassVar[Recipe] = Recipe(epochs=5, lr=2e-3, warmup_epochs=0.5, weight_decay=0.1, amp="bf16")
    control: ClassVar[ControlConfig] = ControlConfig(
        **WITHIN_BUDGET,
        every_steps=20,
        curvature=CurvatureConfig(every_steps=200, num_samples=8),
        batch=BatchConfig(start=32, minimum=16, maximum=64, granularity=16, lr_rule="sqrt", bound_by_noise_scale=True),
    )
    metrics: ClassVar[Mapping[str, Metric]] = {"bits_per_byte": BITS_PER_BYTE, "perplexity": PERPLEXITY}
    objective: ClassVar[str] = "bits_per_byte"
    unread: ClassVar[Collection[str]] = ("momentum", "nesterov")

    def _shape(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("layers", "width", "heads", "context")}

    def model(self) -> nn.Module:
        """Returns the network."""
        return GPT(**self._shape())

    def data(self, purpose: Purpose) -> Splits:
        """Returns the samples for `purpose`; test files are read only for FINAL.

        Raises:
            FileNotFoundError: the folder holds fewer than three files with text.
        """
        files = text_files(self.data_dir, self.pattern)
        split = split_by_file({name: path.stat().st_size for name, path in files.items()})
        most = self.most_windows
        train, held_out = split["train"], split["validation"]
        if purpose is Purpose.FINAL:
            train, held_out = train + held_out, split["test"]
        return Splits(
            train=self.samples([files[name] for name in train], most),
            held_out=self.samples([files[name] for name in held_out], max(most // 8, 1)),
        )

    def samples(self, paths: Sequence[Path], most: int) -> Windows:
        """Returns the windows of the files at `paths`, at most `most`."""
        return Windows(read_bytes(paths), self.context, most)

    def loss(self, outputs: Any, targets: Tensor, recipe: Recipe) -> Tensor:
        """Returns the mean cross-entropy per byte, in nats: outputs [b, t, 256], targets [b, t]."""
        smoothing = recipe.label_smoothing
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), label_smoothing=smoothing)

    def optimizer(self, model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
        """Returns AdamW with weight decay on embeddings and matrices, but not on norms and biases."""
        return torch.optim.AdamW(parameter_groups(model, recipe), lr=recipe.lr, betas=(0.9, 0.95), fused=True)
