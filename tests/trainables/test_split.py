import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triaccel_ray.trainables.split import stratified_split


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=120), data=st.data())
def test_parts_are_disjoint_complete_and_of_the_size_asked(labels: list[int], data: st.DataObject) -> None:
    num_held_out = data.draw(st.integers(1, len(labels) - 1))
    kept, held_out = stratified_split(torch.tensor(labels), num_held_out, seed=data.draw(st.integers(0, 3)))
    assert len(held_out) == num_held_out
    assert sorted([*kept.tolist(), *held_out.tolist()]) == list(range(len(labels)))


@settings(max_examples=60, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=120), data=st.data())
def test_every_class_is_held_out_in_its_share_to_within_one_sample(labels: list[int], data: st.DataObject) -> None:
    num_held_out = data.draw(st.integers(1, len(labels) - 1))
    _, held_out = stratified_split(torch.tensor(labels), num_held_out, seed=0)
    for label in set(labels):
        share = num_held_out * labels.count(label) / len(labels)
        assert abs(sum(labels[i] == label for i in held_out.tolist()) - share) < 1


def test_equal_classes_are_held_out_equally() -> None:
    labels = torch.arange(1000) % 10
    _, held_out = stratified_split(labels, 100, seed=7)
    assert torch.bincount(labels[held_out]).tolist() == [10] * 10


def test_the_split_is_the_same_on_every_machine_and_another_for_another_seed() -> None:
    labels = torch.arange(20) % 2
    pinned = [4, 6, 7, 8, 11, 17]
    assert stratified_split(labels, 6, seed=1)[1].tolist() == pinned
    assert stratified_split(labels, 6, seed=2)[1].tolist() != pinned


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    stratified_split(torch.arange(20) % 2, 6, seed=1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("num_held_out", [0, 4, -1])
def test_a_split_that_leaves_one_part_empty_is_refused(num_held_out: int) -> None:
    with pytest.raises(ValueError, match=rf"num_held_out = {num_held_out}: must lie between 1 and 3"):
        stratified_split(torch.tensor([0, 0, 1, 1]), num_held_out, seed=0)


def test_labels_that_are_no_vector_are_refused() -> None:
    with pytest.raises(ValueError, match=r"labels = \(2, 3\): must be a vector"):
        stratified_split(torch.zeros(2, 3), 1, seed=0)
