from collections.abc import Iterator

import pytest

from tests.distributed.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Three processes on the CPU."""
    workers = WorkerPool(3)
    yield workers
    workers.close()
