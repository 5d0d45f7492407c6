"""Collectives between ranks, and the error when a rank is lost."""

from __future__ import annotations

import pytest
import torch

import triaccel_ray.distributed.ranks
from tests.distributed.worker_pool import WorkerPool
from triaccel_ray.distributed.ranks import LostRankError, Ranks, _naming_aborts


def shared(rank: int) -> list[bytes | None]:
    """What a rank gets of rank 0's values, the last of which travels in several parts."""
    triaccel_ray.distributed.ranks.BROADCAST_BYTES = 300
    ranks = Ranks.of_default_group()
    return [ranks.broadcast_bytes(None if rank else value) for value in (b"a checkpoint", None, bytes(range(256)) * 4)]


def test_all_ranks_get_the_bytes_of_rank_0(workers: WorkerPool) -> None:
    assert workers.run(3, shared) == [[b"a checkpoint", None, bytes(range(256)) * 4]] * 3
    assert workers.run(1, shared) == [[b"a checkpoint", None, bytes(range(256)) * 4]]


def left(rank: int) -> str:
    ranks = Ranks.of_default_group()
    ranks.any(False)
    if rank == 1:
        del ranks
        torch.distributed.destroy_process_group()
        return ""
    with pytest.raises(LostRankError) as raised:
        ranks.all_gather_object("anyone there?")
    return str(raised.value)


def test_a_rank_that_is_lost_is_named_as_such(workers: WorkerPool) -> None:
    first, _ = workers.run(2, left)
    assert first.startswith("another rank was lost: ")


ABORTED = "NCCL communicator was aborted on rank 0. "


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (ABORTED, LostRankError),
        ("NCCL error: unhandled cuda error", torch.distributed.DistBackendError),
        (f"{ABORTED} Original reason for failure was: x", torch.distributed.DistBackendError),
    ],
)
def test_only_nccls_error_in_a_group_that_was_ended_is_a_lost_rank(text: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=text.strip()), _naming_aborts():
        raise torch.distributed.DistBackendError(text)
