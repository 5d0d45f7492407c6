from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.host_sync import no_host_sync
from triaccel_ray.config import DataPlace
from triaccel_ray.data.sampler import Sampler
from triaccel_ray.data.sources import delivered
from triaccel_ray.trainables.images import ImageSource, Preparation

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PLAIN = Preparation(mean=MEAN, std=STD)
AUGMENTED = replace(PLAIN, augment=True)
INDICES = torch.tensor([3, 0, 3])


def _images(num: int = 8) -> Tensor:
    return torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8, generator=_generator(0))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _source(preparation: Preparation, num: int = 8) -> ImageSource:
    return ImageSource(_images(num), torch.arange(num), preparation)


def test_normalized_per_channel_against_float64() -> None:
    images, targets = _source(PLAIN).batch(INDICES, None)
    mean, std = (torch.tensor(values, dtype=torch.float64).reshape(1, 3, 1, 1) for values in (MEAN, STD))
    expected = (_images()[INDICES].double() / 255 - mean) / std
    assert torch.equal(targets, INDICES)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    # two roundings of values up to 2 (the mean's shift) and 4 (the scaled pixel)
    assert (images - expected).abs().max() < 4 * 3 * torch.finfo(torch.float32).eps


def test_augmented_where_preparation_and_generator_say_so_by_the_generator_alone() -> None:
    source, plain = _source(AUGMENTED).to(torch.device("cpu")), _source(PLAIN).batch(INDICES, None)[0]
    assert torch.equal(plain, _source(PLAIN).batch(INDICES, _generator(0))[0])
    assert torch.equal(plain, source.batch(INDICES, None)[0])
    generator, resumed = _generator(2), torch.Generator()
    first = source.batch(INDICES, generator)[0]
    resumed.set_state(generator.get_state())
    second = source.batch(INDICES, generator)[0]
    torch.manual_seed(2)
    assert torch.equal(first, source.batch(INDICES, _generator(2))[0])
    assert torch.equal(second, source.batch(INDICES, resumed)[0])
    assert not torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert torch.equal(source.inputs, _images())
    assert source.is_resident


def test_images_to_be_judged_are_shown_mirrored_too_where_the_preparation_says_so() -> None:
    source = _source(replace(PLAIN, mirror_views=True)).to(torch.device("cpu"))
    images, _ = source.batch(INDICES, None)
    as_they_are, mirrored = source.views(images)
    assert torch.equal(as_they_are, images)
    assert torch.equal(mirrored[..., 0], images[..., -1])
    assert torch.equal(mirrored.flip(-1), images)
    assert len(_source(PLAIN).views(images)) == 1


@pytest.mark.parametrize(("name", "change"), [("mean", {"mean": (0.5,)}), ("std", {"std": (0.5,)})])
def test_constants_of_other_channels_are_refused(name: str, change: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(ValueError, match=f"{name} has 1 entries: the images have 3 channels"):
        _source(replace(PLAIN, **change))  # type: ignore[arg-type]  # fields by name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("data_on", ["device", "host"])
@pytest.mark.parametrize("size", [None, 64])
def test_a_captured_batch_is_what_an_eager_one_is(size: int | None, data_on: DataPlace) -> None:
    device = torch.device("cuda")
    source = _source(replace(AUGMENTED, size=size), 64)
    source = delivered(source, device, data_on)
    sampler = Sampler(source, seed=0, device=device)
    indices = sampler.take(16).clone()
    source.batch(indices, sampler.generator)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(sampler.generator)
    with torch.cuda.graph(graph):
        images, targets = source.batch(indices, sampler.generator)
    torch.cuda.synchronize()  # capture wrote the generator's offset on its own stream
    state = sampler.generator.get_state()
    replayed = []
    with no_host_sync():
        for _ in range(5):  # into the second epoch
            indices.copy_(sampler.take(16))
            graph.replay()
            replayed.append((indices.clone(), images.clone(), targets.clone()))
        source.batch(sampler.take(16), sampler.generator)
    sampler.generator.set_state(state)
    for position, (taken, seen, labels) in enumerate(replayed):
        source.set_epoch((position + 1) // 4)  # the first batch went before
        again, _ = source.batch(taken, sampler.generator)
        differing = [i for i in range(len(taken)) if not torch.equal(seen[i], again[i])]
        assert not differing, f"batch {position}"
        assert torch.equal(labels, taken)
    assert not torch.equal(replayed[0][1], replayed[1][1])


@pytest.mark.gpu
@pytest.mark.parametrize("data_on", ["device", "host"])
def test_a_gpu_makes_what_the_cpu_makes(data_on: DataPlace) -> None:
    on_cpu = _source(PLAIN).batch(INDICES, None)[0]
    on_gpu = delivered(_source(PLAIN), torch.device("cuda"), data_on).batch(INDICES, None)[0]
    assert (on_gpu.cpu() - on_cpu).abs().max() < 4 * 3 * torch.finfo(torch.float32).eps
