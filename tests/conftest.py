import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, too

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: the kernels then run on the CPU


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


# Tests of the engine and its kernels need none of the service's packages: a GPU machine may lack them.
collect_ignore = (
    []
    if all(map(_is_installed, ("ray", "mlflow", "optuna", "tyro", "rich")))
    else ["chaos", "service", "search_spaces", "benchmarks", "test_documents.py"]
)

torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way

# Machines that run the tests differ in speed and are shared; how long an example takes says nothing of the code.
settings.register_profile("suite", deadline=None, max_examples=60)
settings.load_profile("suite")


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets of parameters, also in a small model that is updated in the backward pass."""
    monkeypatch.setattr("triaccel_ray.apply.step_in_backward.BUCKET_ELEMENTS", 30)


@pytest.fixture(autouse=True, scope="session")
def _unfrozen_at_the_end() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _only_new_objects_collected(_unfrozen_at_the_end: None) -> None:
    """Whoever makes room collects garbage: among all that a session has imported, half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_gpu(request: pytest.FixtureRequest) -> None:
    """Gives back what earlier tests left on the GPU, a cap on memory included: tests of memory share a process."""
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is not None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


SHARED = ("cluster_address", "starting_server")
"""Fixtures of the service that take seconds to start."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in ("service", "chaos"):
            item.add_marker(pytest.mark.timeout(1800))  # with fixtures; their own deadlines come first and say why
        if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if hasattr(config, "workerinput"):  # one of several processes of pytest-xdist, which take the files in this order
        slow = {item.path for item in items if set(SHARED) & set(getattr(item, "fixturenames", ()))}
        items.sort(key=lambda item: item.path not in slow)
