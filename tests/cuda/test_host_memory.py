import pytest
import torch

from triaccel_ray.cuda.host_memory import in_host_memory
from triaccel_ray.data.sources import TensorSource, delivered

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_a_gpu_sees_the_values_and_holds_none_of_them(dtype: torch.dtype) -> None:
    values = torch.randint(0, 2, (3, 1000, 512)).to(dtype).transpose(0, 1)
    before = torch.cuda.memory_allocated()
    there = in_host_memory(values, CUDA)
    assert torch.cuda.memory_allocated() == before
    assert (there.device.type, there.dtype, there.shape) == ("cuda", dtype, values.shape)
    rows = torch.tensor([999, 0, 3], device=CUDA)
    assert torch.equal(there[rows].cpu(), values[rows.cpu()])


def test_the_memory_lives_as_long_as_what_is_made_of_it() -> None:
    row = in_host_memory(torch.arange(1 << 20), CUDA)[-1:]
    others = [torch.zeros(1 << 20, dtype=torch.int64).pin_memory() for _ in range(4)]
    assert row.item() == (1 << 20) - 1
    assert len(others) == 4


def test_nothing_at_all_is_no_mistake() -> None:
    assert in_host_memory(torch.zeros(0, 3), CUDA).shape == (0, 3)


def test_a_source_kept_on_the_host_is_part_of_a_graph() -> None:
    inputs, targets = torch.arange(64.0).view(32, 2), torch.arange(32)
    source = delivered(TensorSource(inputs, targets), CUDA, "host")
    assert source.is_resident
    assert delivered(source, CUDA, "host").batch(torch.tensor([1], device=CUDA), None)[1].item() == 1
    indices = torch.tensor([3, 1], device=CUDA)
    source.batch(indices, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn, labels = source.batch(indices, None)
    indices.copy_(torch.tensor([31, 30]))
    graph.replay()
    assert drawn.tolist() == [[62.0, 63.0], [60.0, 61.0]]
    assert labels.tolist() == [31, 30]
