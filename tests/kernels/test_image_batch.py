from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from triaccel_ray.kernels.image_batch import image_batch
from triaccel_ray.kernels.image_batch.reference import draw, draw_centers, mirrored_in
from triaccel_ray.kernels.image_batch.reference import image_batch as by_pytorch

MEAN, STD = (0.4914, 0.4822, 0.4465, 0.5), (0.2470, 0.2435, 0.2616, 0.25)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the kernel runs: without a GPU, through Triton's interpreter."""


HOW: dict[str, Any] = {"epoch": None, "padding": 4, "reflect": False, "cutout": 0, "dtype": torch.float32}


def kernel(*args: Any, **options: Any) -> Tensor:
    """The kernel itself, through Triton's interpreter where the tensors are on a CPU."""
    from triaccel_ray.kernels.image_batch.triton import image_batch as launch

    return launch(*args, **{**HOW, **options})


def reference(*args: Any, **options: Any) -> Tensor:
    return by_pytorch(*args, **{**HOW, **options})


def constants(channels: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Returns scale and shift, float32 [channels] each."""
    mean, std = torch.tensor(MEAN[:channels]), torch.tensor(STD[:channels])
    return (1 / (255 * std)).to(device), (-mean / std).to(device)


def noise(num: int, channels: int, height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (num, channels, height, width), dtype=torch.uint8, generator=generator(0))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def places(num: int) -> Tensor:
    """Returns images in which every pixel's value tells its place: row * 8 + column + 1, never zero."""
    return (torch.arange(64, dtype=torch.uint8) + 1).reshape(1, 1, 8, 8).repeat(num, 1, 1, 1)


def tolerance(dtype: torch.dtype) -> float:
    """Of values up to 3: two roundings in float32, one in the output (through the interpreter a bf16 one truncates)."""
    return 4 * 2 * torch.finfo(torch.float32).eps + (0 if dtype is torch.float32 else 2 * 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "padding", "reflect"),
    [((7, 3, 5, 9), 4, False), ((5, 1, 8, 8), 7, True), ((3, 4, 20, 17), 0, False), ((4, 2, 1, 3), 6, False)],
)
@pytest.mark.parametrize("augmented", [True, False])
def test_the_kernel_makes_what_float64_makes(
    dtype: torch.dtype, shape: tuple[int, ...], padding: int, reflect: bool, augmented: bool
) -> None:
    images = noise(*shape)
    indices = torch.tensor([2, 0, 2, 1, 2])
    key = torch.tensor(2**62 - 12345) if augmented else None
    expected = images[indices]
    if key is not None:
        rows, columns, mirrored = draw(key, 5, padding)
        padded = F.pad(expected.double(), (padding,) * 4, mode="reflect" if reflect else "constant")
        windows = [
            image[:, row : row + shape[2], column : column + shape[3]]
            for image, row, column in zip(padded, rows.tolist(), columns.tolist(), strict=True)
        ]
        flips = zip(windows, mirrored.tolist(), strict=True)
        expected = torch.stack([window.flip(-1) if flip else window for window, flip in flips])
    factor, summand = (constant.view(1, -1, 1, 1).double() for constant in constants(shape[1]))
    exact = expected.double() * factor + summand
    on_device = [t.to(DEVICE) for t in (images, indices, *constants(shape[1]))]
    here = None if key is None else key.to(DEVICE)
    poison = torch.full((5 * images[0].numel(),), torch.nan, dtype=dtype, device=DEVICE)
    del poison  # a GPU's allocator hands the same bytes out again: what the kernel leaves unwritten shows
    for make in (kernel, reference):
        batch = make(*on_device, key=here, padding=padding, reflect=reflect, dtype=dtype)
        assert batch.dtype is dtype
        assert batch.is_contiguous(memory_format=torch.channels_last)
        assert (batch.cpu().double() - exact).abs().max() <= tolerance(dtype)


@pytest.mark.parametrize("key", [0, 2**32, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
def test_kernel_and_reference_draw_the_same_by_the_key_alone(key: int) -> None:
    arguments = [t.to(DEVICE) for t in (places(12), torch.arange(12), torch.ones(1), torch.zeros(1))]
    this, other = torch.tensor(key, device=DEVICE), torch.tensor(key ^ 1, device=DEVICE)
    expected = reference(*arguments, key=this)
    torch.rand(1)
    assert torch.equal(kernel(*arguments, key=this), expected)
    assert not torch.equal(reference(*arguments, key=other), expected)


@pytest.mark.parametrize(("make", "num"), [(kernel, 48), (image_batch, 2048)])
def test_in_two_epochs_every_image_is_seen_both_ways_wherever_it_stands(make: Callable[..., Tensor], num: int) -> None:
    key, indices, images = torch.tensor(5, device=DEVICE), torch.randperm(num, generator=generator(1)), places(num)
    arguments = (images.to(DEVICE), indices.to(DEVICE), torch.ones(1, device=DEVICE), torch.zeros(1, device=DEVICE))
    seen = []
    for epoch in (0, 1, 2**40 + 2):
        batch = make(*arguments, key=key, epoch=torch.tensor(epoch, device=DEVICE), padding=0).cpu()
        mirrored = batch[:, 0, 0, 0] == 8  # whose first pixel is the last of the first row
        assert torch.equal(batch, torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images).float())
        by_index = torch.zeros(num, dtype=torch.bool)
        by_index[indices] = mirrored
        seen.append(by_index)
    assert torch.equal(seen[0], mirrored_in(torch.tensor(0), torch.arange(num)))
    assert torch.equal(seen[1], ~seen[0])
    assert torch.equal(seen[2], seen[0])
    # Half of them, and neighbors in the data set have nothing to do with one another.
    for chosen in (seen[0], seen[0][1:] ^ seen[0][:-1]):
        assert abs(int(chosen.sum()) - num / 2) < 5 * (num / 4) ** 0.5


@pytest.mark.parametrize("cutout", [1, 4, 40])
@pytest.mark.parametrize("reflect", [True, False])
def test_a_square_is_cut_out_of_the_finished_image(cutout: int, reflect: bool) -> None:
    num, height, width = 16, 12, 9
    images, indices, key = noise(num, 3, height, width), torch.arange(num), torch.tensor(2**40 + 7)
    on_device = [t.to(DEVICE) for t in (images, indices, *constants(3))]
    how: dict[str, Any] = {"key": key.to(DEVICE), "reflect": reflect}
    rows, columns = draw_centers(key, num, height, width)
    for make in (kernel, image_batch):
        whole, cut = make(*on_device, **how).cpu(), make(*on_device, **how, cutout=cutout).cpu()
        for image, found, row, column in zip(whole, cut, rows.tolist(), columns.tolist(), strict=True):
            top, left = row - cutout // 2, column - cutout // 2
            image[:, max(top, 0) : max(top + cutout, 0), max(left, 0) : max(left + cutout, 0)] = 0
            assert torch.equal(image, found)


def assert_uniform(drawn: Tensor, size: int) -> None:
    """Asserts by a chi-square test that each of `size` outcomes was drawn equally often."""
    counts = torch.bincount(drawn, minlength=size).double()
    found = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    # Its mean is the degrees of freedom, its variance twice that; five standard deviations.
    assert abs(found - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("by", ["place", "key"])
def test_offsets_are_uniform_and_independent_of_each_other(padding: int, by: str) -> None:
    num = 100_000
    if by == "place":
        rows, columns, mirrored = draw(torch.tensor(7), num, padding)
    else:  # the first image of many batches, keys as a generator gives them
        keys = torch.randint(2**63 - 1, (num,), generator=generator(3))
        rows, columns, mirrored = (drawn.flatten() for drawn in draw(keys.view(-1, 1), 1, padding))
    span = 2 * padding + 1
    assert_uniform((rows * span + columns) * 2 + mirrored.long(), 2 * span**2)
    # Neighbors in the batch, and the same place under neighboring keys, have nothing to do with one another.
    assert_uniform(rows[:-1] * span + rows[1:], span**2)


def test_no_index_gives_no_image() -> None:
    images, empty = noise(2, 3, 8, 8), torch.empty(0, dtype=torch.int64)
    assert image_batch(images, empty, *constants(3), key=torch.tensor(1)).shape == (0, 3, 8, 8)
    on_device = [tensor.to(DEVICE) for tensor in (images, empty, *constants(3))]
    assert kernel(*on_device, key=None).shape == (0, 3, 8, 8)


def test_the_kernel_reads_nothing_outside_the_images() -> None:
    images, (factor, summand) = noise(3, 3, 4, 4).to(DEVICE)[1:2], constants(3, DEVICE)
    batch = kernel(images, torch.tensor([-1, 0, 1], device=DEVICE), factor, summand, key=None)
    black = summand.view(3, 1, 1).expand(3, 4, 4)
    assert torch.equal(batch[0], black)
    assert torch.equal(batch[2], black)
    assert not torch.equal(batch[1], black)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": torch.zeros(4, 3, 8, 8)}, TypeError, "images is torch.float32: must be torch.uint8"),
        ({"dtype": torch.float64}, TypeError, "dtype = torch.float64: must be one of torch.float32"),
        ({"images": noise(4, 3, 8, 8)[0]}, ValueError, r"images have shape \[3, 8, 8\]: must be \[n, channels"),
        ({"images": noise(4, 3, 8, 8)[..., ::2]}, ValueError, "images have strides .* must be contiguous"),
        ({"indices": torch.arange(4)[::2]}, ValueError, r"indices have shape \[2\]: must be a contiguous vector"),
        ({"indices": torch.ones(2, 2).long()}, ValueError, r"indices have shape \[2, 2\]: must be a contiguous vector"),
        ({"padding": 8, "reflect": True}, ValueError, r"padding = 8: must be less than the images' edges, \[8, 8\]"),
    ],
)
def test_what_it_cannot_take_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"images": noise(4, 3, 8, 8), "indices": torch.arange(2), "key": torch.tensor(1), **change}
    with pytest.raises(error, match=message):
        image_batch(scale=torch.ones(3), shift=torch.ones(3), **given)


@pytest.mark.gpu
def test_a_captured_batch_follows_its_generator_and_its_indices() -> None:
    images = noise(64, 3, 32, 32).cuda()
    factor, summand = constants(3, "cuda")
    drawing = torch.Generator(device="cuda").manual_seed(3)
    indices = torch.arange(16, device="cuda")

    def make() -> Tensor:
        key = torch.randint(2**63 - 1, (), generator=drawing, device="cuda")
        return image_batch(images, indices, factor, summand, key=key, dtype=torch.float16)

    make()  # compiles, which a capture could not
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(drawing)
    with torch.cuda.graph(graph):
        captured = make()
    state = drawing.get_state()
    seen = []
    for start in (0, 16, 32):
        indices.copy_(torch.arange(start, start + 16))
        graph.replay()
        seen.append(captured.clone())
    drawing.set_state(state)
    for start, replayed in zip((0, 16, 32), seen, strict=True):
        indices.copy_(torch.arange(start, start + 16))
        assert torch.equal(replayed, make())
