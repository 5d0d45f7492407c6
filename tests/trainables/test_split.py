import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.trainables.split import stratified_split


@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=120), data=st.data())
def test_parts_are_disjoint_and_every_class_is_held_out_in_its_share(labels: list[int], data: st.DataObject) -> None:
    num_held_out, before = data.draw(st.integers(1, len(labels) - 1)), torch.get_rng_state()
    kept, held_out = stratified_split(torch.tensor(labels), num_held_out, seed=data.draw(st.integers(0, 3)))
    assert torch.equal(before, torch.get_rng_state())
    assert len(held_out) == num_held_out
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(len(labels)))
    for label in set(labels):
        share = num_held_out * labels.count(label) / len(labels)
        assert abs(sum(labels[i] == label for i in held_out.tolist()) - share) < 1


def test_the_split_is_the_same_on_every_machine_and_another_for_another_seed() -> None:
    labels = torch.arange(20) % 2
    pinned = [4, 6, 7, 8, 11, 17]
    assert stratified_split(labels, 6, seed=1)[1].tolist() == pinned
    assert stratified_split(labels, 6, seed=2)[1].tolist() != pinned


def test_what_cannot_be_split_is_refused() -> None:
    for num_held_out in (0, 4):
        with pytest.raises(ValueError, match=rf"num_held_out = {num_held_out}: must lie between 1 and 3"):
            stratified_split(torch.tensor([0, 0, 1, 1]), num_held_out, seed=0)
    with pytest.raises(ValueError, match=r"labels = \(2, 3\): must be a vector"):
        stratified_split(torch.zeros(2, 3), 1, seed=0)
