"""Text as bytes: finds text files, splits them into parts, and cuts samples from their bytes."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triaccel_ray.config import require
from triaccel_ray.data.sources import DataSource

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
"""Folders of the standard library that hold other packages, or its tests, which not every installation has."""
_SHARE_HELD_OUT = 0.1
"""Share of the bytes for validation, and as much for testing."""
PARTS = ("test", "validation", "train")


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
