import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.host_sync import no_host_sync
from triaccel_ray.kernels.multi_tensor import DTYPE_CODES, Chunks, TensorTable, have_equal_dense_strides

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 200), max_size=8), st.sampled_from([16, 32, 64]))
def test_chunks_cover_each_element_once(sizes: list[int], chunk_size: int) -> None:
    chunks = Chunks(sizes, CPU, chunk_size)
    seen = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for tensor, start, length in zip(chunks.tensor, chunks.start, chunks.length, strict=True):
        assert 0 < length <= chunk_size
        assert start % chunk_size == 0
        seen[tensor][start : start + length] += 1
    assert all((times == 1).all() for times in seen)
    assert chunks.num_chunks == len(chunks.tensor) == sum(-(-size // chunk_size) for size in sizes)


def test_chunks_of_more_elements_than_32_bits_count() -> None:
    chunks = Chunks([2**33 + 1], CPU, 2**20)
    assert (chunks.num_chunks, chunks.start[0].item(), chunks.length[0].item()) == (2**13 + 1, 2**33, 1)
    assert (chunks.tensor.dtype, chunks.start.dtype, chunks.length.dtype) == (torch.int32, torch.int64, torch.int32)


def test_a_table_names_tensors_and_absent_ones_and_is_uploaded_when_something_changed() -> None:
    tensors = [torch.ones(3), None, torch.ones(2, dtype=torch.bfloat16), torch.ones(1, dtype=torch.float16), None]
    table = TensorTable(5, CPU)
    assert table.addresses.tolist() == table.codes.tolist() == [0] * 5
    assert (table.codes.data_ptr() - table.addresses.data_ptr()) % 16 == 0
    table.point_to(tensors)
    assert table.addresses.tolist() == [0 if t is None else t.data_ptr() for t in tensors]
    assert table.codes.tolist() == [0 if t is None else DTYPE_CODES[t.dtype] for t in tensors]
    assert all(kept is given for kept, given in zip(table.tensors, tensors, strict=True))
    assert table.dtypes == {torch.float32, torch.bfloat16, torch.float16}
    table.codes.fill_(7)
    table.point_to(tensors)
    assert table.codes.tolist() == [7] * 5
    table.point_to([None] * 5)
    assert table.addresses.tolist() == table.codes.tolist() == [0] * 5
    with pytest.raises(RuntimeError, match="keeps no reference"):
        _ = TensorTable(1, torch.device("meta")).tensors


@pytest.mark.parametrize(("tensors", "says"), [
    ([torch.ones(3)], "1 tensors for a table of 2"),
    ([None, torch.ones(4)], "tensor 1 has 4 elements: must have 2"),
    ([torch.ones(3, dtype=torch.float64), None], "tensor 0 is torch.float64: this table takes torch.bfloat16, torch.f"),
    ([torch.ones(3, device="meta"), None], "tensor 0 is on meta"),
    ([None, torch.ones(4)[::2]], r"tensor 1 of shape \(2,\) and strides \(2,\)"),
])  # fmt: skip
def test_tensors_that_a_kernel_could_not_read_are_refused(tensors: list[Tensor | None], says: str) -> None:
    table = TensorTable(2, CPU, sizes=[3, 2])
    with pytest.raises(ValueError, match=says):
        table.point_to(tensors)


PLAIN, LAST = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
POINT = torch.zeros(4, 3, 1, 1)  # 1 x 1 convolutions: both layouts are the same memory


@pytest.mark.parametrize(("tensors", "expected"), [
    ([torch.zeros(())], True),
    ([torch.zeros(0, 3)], True),
    ([torch.zeros(3, 4).t()], True),
    ([torch.zeros(4, 1, 3).transpose(0, 2)], True),
    ([torch.zeros(3, 4)[:, :2]], False),
    ([torch.zeros(3, 1).expand(3, 4)], False),
    ([PLAIN, PLAIN.half(), PLAIN.clone()], True),
    ([LAST, LAST.bfloat16()], True),
    ([PLAIN, LAST], False),
    ([PLAIN, PLAIN.view(2, 3, 20)], False),
    ([torch.zeros(6)[::2], torch.zeros(6)[::2]], False),
    ([POINT, POINT.contiguous(memory_format=torch.channels_last)], True),
])  # fmt: skip
def test_tensors_are_each_one_stretch_of_memory_and_of_equal_strides_or_not(
    tensors: list[Tensor], expected: bool
) -> None:
    assert have_equal_dense_strides(*tensors) is expected


@pytest.mark.gpu
def test_addresses_that_are_not_uploaded_outlive_their_tensors_and_reach_the_gpu_later() -> None:
    device = torch.device("cuda")
    table = TensorTable(2, device)
    tensor = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    seen = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.cuda.graph(graph):
        table.point_to([tensor, None], upload=False)
        seen.copy_(table.addresses)
    address = tensor.data_ptr()
    del tensor
    table.forget()
    graph.replay()
    assert seen.tolist() == [0, 0]
    table.upload_named()
    graph.replay()
    assert seen.tolist() == [address, 0]


@pytest.mark.gpu
def test_naming_tensors_does_not_wait_for_the_gpu() -> None:
    device = torch.device("cuda")
    table = TensorTable(3, device, sizes=[4, 4, 4])
    lists = [[torch.ones(4, device=device, dtype=dtype) for _ in range(3)] for dtype in DTYPE_CODES]
    torch.cuda.synchronize()
    snapshots = []
    with no_host_sync():
        # Many uploads on their way at once: none may overtake another or change what it carries.
        for tensors in lists * 20:
            table.point_to(tensors)
            snapshots.append((table.addresses.clone(), table.codes.clone()))
    for tensors, (addresses, codes) in zip(lists * 20, snapshots, strict=True):
        assert addresses.tolist() == [tensor.data_ptr() for tensor in tensors]
        assert codes.tolist() == [DTYPE_CODES[tensor.dtype] for tensor in tensors]
