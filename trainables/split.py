"""Splits a training set into samples to keep and to hold out, reproducibly."""

from __future__ import annotations

import hashlib

from torch import Tensor, tensor

from triaccel_ray.config import require

SPLIT_SEED = 2026
"""Seed of the splits, the same for all runs: whatever its own seed, a run is judged by the same samples."""


def stratified_split(labels: Tensor, num_held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the samples kept and of those held out, both ascending int64 [n - h] and [h].

    `labels` is an integer tensor [n], h is `num_held_out`. Of the n_c samples of class c, h n_c / n are held out. The
    largest-remainder method rounds these numbers, so that they add up to h.

    A hash of `seed` and a sample's index decides which samples of a class are held out. Unlike a random generator's
    stream, it is the same in every version of every library, so results stay comparable.

    Raises:
        ValueError: labels are not a vector, or `num_held_out` leaves one part empty.
    """
    require(labels.dim() == 1, "labels", tuple(labels.shape), "must be a vector, one label per sample")
    num_samples = len(labels)
    rule = f"must lie between 1 and {num_samples - 1}, so that both parts of the {num_samples} samples have some"
    require(0 < num_held_out < num_samples, "num_held_out", num_held_out, rule)
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(index)
    counts = {label: num_held_out * len(indices) // num_samples for label, indices in members.items()}
    by_remainder = sorted(members, key=lambda label: (-(num_held_out * len(members[label]) % num_samples), label))
    for label in by_remainder[: num_held_out - sum(counts.values())]:
        counts[label] += 1
    held_out: set[int] = set()
    for label, indices in members.items():
        ordered = sorted(indices, key=lambda index: _rank(seed, index))
        held_out.update(ordered[: counts[label]])
    kept = [index for index in range(num_samples) if index not in held_out]
    return tensor(kept), tensor(sorted(held_out))


def _rank(seed: int, index: int) -> bytes:
    return hashlib.sha256(f"{seed}:{index}".encode()).digest()
