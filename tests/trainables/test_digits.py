import torch
from torch import Tensor

from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose


def _all(source: DataSource) -> tuple[Tensor, Tensor]:
    return source.batch(torch.arange(len(source)), None)


def _images(source: DataSource) -> set[bytes]:
    return {image.numpy().tobytes() for image in _all(source)[0]}


def test_splits_are_disjoint_complete_stratified_and_the_same_for_every_seed() -> None:
    search, final = Digits().data(Purpose.SEARCH), Digits().data(Purpose.FINAL)
    torch.manual_seed(2)
    assert all(
        torch.equal(a, b) for a, b in zip(_all(search.train), _all(Digits().data(Purpose.SEARCH).train), strict=True)
    )
    train, validation, test = _images(search.train), _images(search.held_out), _images(final.held_out)
    assert (len(train), len(validation), len(test)) == (1079, 359, 359)
    assert len(train | validation | test) == 1797
    assert _images(final.train) == train | validation
    everything = torch.bincount(_all(final.train)[1]) + torch.bincount(_all(final.held_out)[1])
    for part in (search.held_out, final.held_out):
        assert (torch.bincount(_all(part)[1]) - everything * 359 / 1797).abs().max() <= 1


def test_nothing_that_a_search_holds_reaches_a_test_sample() -> None:
    search, test = Digits().data(Purpose.SEARCH), _images(Digits().data(Purpose.FINAL).held_out)
    for source in (search.train, search.held_out):
        assert isinstance(source, TensorSource)
        # the memory behind the tensor, not only what the tensor shows of it
        behind = torch.tensor(source.inputs.untyped_storage(), dtype=torch.uint8).numpy().tobytes()
        assert len(behind) == len(source) * 64 * 4
        assert not any(image in behind for image in test)
