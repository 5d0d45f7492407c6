import pytest
import torch

from trainables.images import PrepareImages, random_crop_and_flip


def _images(num: int = 256) -> torch.Tensor:
    """Returns images in which every pixel's value tells its place: row * 8 + column + 1, never zero."""
    return (torch.arange(64, dtype=torch.uint8) + 1).reshape(1, 1, 8, 8).repeat(num, 3, 1, 1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_shape_dtype_and_memory_format(dtype: torch.dtype) -> None:
    images = torch.ones(5, 3, 10, 8, dtype=dtype)
    augmented = random_crop_and_flip(images, _generator(0))
    assert augmented.shape == images.shape
    assert augmented.dtype == dtype
    assert augmented.is_contiguous(memory_format=torch.channels_last)


def test_every_result_is_a_window_of_the_padded_image_or_its_mirror_image() -> None:
    images = _images()
    padded = torch.nn.functional.pad(images[0], (2, 2, 2, 2))
    windows = {}
    for row in range(5):
        for column in range(5):
            window = padded[:, row : row + 8, column : column + 8]
            windows[window.numpy().tobytes()] = (row, column, False)
            windows[window.flip(-1).contiguous().numpy().tobytes()] = (row, column, True)
    seen = [
        windows[image.contiguous().numpy().tobytes()]
        for image in random_crop_and_flip(images, _generator(0), padding=2)
    ]
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(5))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_half_of_the_images_are_mirrored() -> None:
    images = _images(4000)
    mirrored = (random_crop_and_flip(images, _generator(1), padding=0) != images).flatten(1).any(1)
    assert abs(mirrored.float().mean().item() - 0.5) < 4 * 0.5 / 4000**0.5  # four standard errors


def test_the_generator_alone_decides() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8, generator=_generator(5))
    torch.manual_seed(1)
    first = random_crop_and_flip(images, _generator(2))
    torch.manual_seed(2)
    assert torch.equal(first, random_crop_and_flip(images, _generator(2)))
    assert not torch.equal(first, random_crop_and_flip(images, _generator(3)))


def test_successive_batches_differ() -> None:
    images, generator = _images(), _generator(2)
    assert not torch.equal(random_crop_and_flip(images, generator), random_crop_and_flip(images, generator))


def test_normalised_per_channel_against_float64() -> None:
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=_generator(0))
    prepared = PrepareImages(mean, std)(images)
    m, s = (torch.tensor(values, dtype=torch.float64).reshape(1, 3, 1, 1) for values in (mean, std))
    expected = (images.double() / 255 - m) / s
    assert prepared.dtype == torch.float32
    assert prepared.is_contiguous(memory_format=torch.channels_last)
    # two roundings of values up to 2 (the mean's shift) and 4 (the scaled pixel)
    assert (prepared - expected).abs().max() < 4 * 3 * torch.finfo(torch.float32).eps


def test_resized_images_keep_their_mean_and_memory_format() -> None:
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=_generator(0))
    plain = PrepareImages((0.5,) * 3, (0.25,) * 3)(images)
    large = PrepareImages((0.5,) * 3, (0.25,) * 3, size=224)(images)
    assert large.shape == (2, 3, 224, 224)
    assert large.is_contiguous(memory_format=torch.channels_last)
    assert (large.mean() - plain.mean()).abs() < 0.01


def test_the_raw_images_are_left_as_they_are() -> None:
    images = _images(2)
    random_crop_and_flip(images, _generator(0))
    PrepareImages((0.5,) * 3, (0.25,) * 3)(images)
    assert torch.equal(images, _images(2))
