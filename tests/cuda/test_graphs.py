import gc
import weakref

import pytest
import torch

from tests.build import RerunPool
from triaccel_ray.cuda.graphs import Graph, GraphPool


class Owner:
    """Keeps graphs until the pool asks for them."""

    def __init__(self, pool: GraphPool) -> None:
        self.graphs: list[Graph] = []
        pool.on_release(self.graphs.clear)


def test_a_pool_knows_whether_any_graph_is_left_and_none_survives_a_capture_that_fails() -> None:
    pool = RerunPool(None, None, RuntimeError("broken off"))
    first, second = Owner(pool), Owner(pool)
    assert not pool.holds_graphs
    for owner in (first, second):
        owner.graphs.append(pool.capture(lambda: None))
    lingering = first.graphs.pop()
    assert pool.holds_graphs
    with pytest.raises(RuntimeError, match="broken off"):
        pool.capture(lambda: None)
    assert (second.graphs, pool.holds_graphs) == ([], False)  # what lingers calls for no release again and again
    lingering.replay()
    second.graphs.append(pool.capture(lambda: None))
    assert pool.holds_graphs
    second.graphs.clear()
    gc.collect()
    assert not pool.holds_graphs


@pytest.mark.gpu
def test_an_aborted_capture_raises_its_first_error_and_holds_nothing() -> None:
    pool, made = GraphPool(torch.device("cuda")), []

    def work() -> None:
        values = torch.ones(8, device="cuda")
        made.append(weakref.ref(values))
        values.sum().item()

    gc.collect()
    gc.disable()
    try:
        text = ""
        try:
            pool.capture(work)
        except RuntimeError as error:
            text = str(error)
        assert "not permitted when stream is capturing" in text
        assert made[0]() is None
    finally:
        gc.enable()
    pool.release()


@pytest.mark.gpu
def test_a_release_waits_for_graphs_that_still_replay() -> None:
    device = torch.device("cuda")
    values = torch.zeros(1, device=device)
    stream = torch.cuda.Stream(device)
    pool = GraphPool(device)
    owner = Owner(pool)

    def work() -> None:
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so
        values.add_(1.0)

    with torch.cuda.stream(stream):
        owner.graphs.append(pool.capture(work))
        torch.cuda.synchronize()
        is_done = []
        pool.on_release(lambda: is_done.append(stream.query()))
        owner.graphs[0].replay()
        pool.release()
    assert is_done == [True]
    assert float(values) == 1.0
