from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.apply.evaluate import measured
from triaccel_ray.model.layers import find_layers
from triaccel_ray.model.metrics import as_metrics
from triaccel_ray.trainables.task import Purpose
from triaccel_ray.trainables.text import GPT, PARTS, TextGpt, Windows, read_bytes, split_by_file, text_files


class Small(TextGpt):
    layers, width, heads, context, most_windows = 1, 16, 2, 8, 64


def folder_of(folder: Path, count: int = 12) -> Path:
    """Files of whom each repeats its own letter 40 times."""
    for index in range(count):
        path = folder / ("a" if index % 2 else "b") / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(chr(ord("A") + index) * 40)
    return folder


def letters(source: object) -> set[int]:
    assert isinstance(source, Windows)
    return set(source.text.tolist()) - {0}


def test_the_parts_share_no_file_and_tests_are_read_at_the_end_alone(tmp_path: Path) -> None:
    task = Small(folder_of(tmp_path / "one"))
    search, final = task.data(Purpose.SEARCH), task.data(Purpose.FINAL)
    train, validation, test = letters(search.train), letters(search.held_out), letters(final.held_out)
    assert train | validation | test == {ord("A") + index for index in range(12)}
    assert len(train) + len(validation) + len(test) == 12
    assert letters(final.train) == train | validation
    torch.manual_seed(2)
    elsewhere = Small(folder_of(tmp_path / "elsewhere")).data(Purpose.SEARCH)
    assert torch.equal(elsewhere.train.text, search.train.text)  # type: ignore[attr-defined]  # Windows


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=40))
def test_every_file_is_in_one_part_and_held_out_ones_have_a_tenth_of_the_bytes(num_bytes: list[int]) -> None:
    sizes = {str(number): size for number, size in enumerate(num_bytes)}
    split = split_by_file(sizes)
    assert sorted(name for part in PARTS for name in split[part]) == sorted(sizes)
    assert all(split[part] for part in PARTS)
    assert split == split_by_file(dict(reversed(sizes.items())))
    for part in PARTS[:2]:
        without_last = sum(sizes[name] for name in split[part][:-1])
        assert without_last < 0.1 * sum(sizes.values())


def test_the_standard_library_is_there_without_what_is_installed_beside_it() -> None:
    found = text_files(None)
    assert list(found) == sorted(found, key=lambda name: name.split("/"))
    assert {"ast.py", "json/decoder.py"} <= set(found)
    assert not any(part in ("site-packages", "test", "tests") for name in found for part in name.split("/"))
    assert found["ast.py"] == Path(sysconfig.get_paths()["stdlib"]) / "ast.py"


def test_hidden_and_empty_files_are_left_out_and_a_zero_byte_ends_each_other(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 3)
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "a.txt").write_text("no text")
    (folder / "empty.txt").touch()
    found = text_files(folder)
    assert list(found) == ["a/01.txt", "b/00.txt", "b/02.txt"]
    assert bytes(read_bytes([*found.values()][:2]).tolist()) == b"B" * 40 + b"\0" + b"A" * 40 + b"\0"


def test_what_makes_no_text_or_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds 2 files with text: must hold at least 3.*--data-dir"):
        Small(folder_of(tmp_path, 2)).data(Purpose.SEARCH)
    with pytest.raises(ValueError, match=r"text \(bytes\) = 4: must hold at least 5 bytes, one window"):
        Windows(torch.zeros(4, dtype=torch.uint8), 4, 1)
    with pytest.raises(ValueError, match="width = 10: must be a multiple of heads = 4"):
        GPT(layers=1, width=10, heads=4, context=8)


@pytest.mark.parametrize(("most", "starts"), [(100, [0, 4, 8, 12, 16]), (2, [0, 10]), (3, [0, 7, 14])])
def test_windows_follow_one_another_or_are_spread_over_the_text(most: int, starts: list[int]) -> None:
    source = Windows(torch.arange(22, dtype=torch.uint8), 4, most)
    assert len(source) == len(starts)
    inputs, targets = source.batch(torch.arange(len(source)), None)
    assert inputs.tolist() == [list(range(start, start + 4)) for start in starts]
    assert torch.equal(targets, inputs + 1)
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert source.to(torch.device("cpu")).is_resident


def test_the_model_sees_nothing_of_what_is_to_come() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=16, heads=4, context=8).eval()
    text = torch.randint(0, 256, (3, 8))
    changed = text.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    with torch.no_grad():
        one, other = model(text), model(changed)
        short = model(text[:, :5])
    assert one.shape == (3, 8, 256)
    torch.testing.assert_close(one[:, :5], other[:, :5])
    torch.testing.assert_close(one[:, :5], short)
    assert not torch.allclose(one[:, 5:], other[:, 5:])


def test_the_embedding_is_the_output_and_every_matrix_is_a_layer() -> None:
    model = Small().model()
    assert isinstance(model, GPT)
    assert model.head.weight is model.bytes.weight
    names = [layer.name for layer in find_layers(model)]
    assert names == ["bytes", "places", *(f"blocks.0.{name}" for name in ("qkv", "out", "up", "down"))]
    ids = [id(p) for group in TextGpt().optimizer(model, TextGpt.recipe).param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_a_few_steps_learn_letters(tmp_path: Path) -> None:
    task = Small(folder_of(tmp_path))
    data = task.data(Purpose.SEARCH).train
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model, task.recipe)
    inputs, targets = data.batch(torch.arange(len(data)), None)
    assert 7.0 < _bits(task, model(inputs), targets) < 9.0  # of 256 bytes, none of them known
    for _ in range(200):
        optimizer.zero_grad()
        task.loss(model(inputs), targets, task.recipe).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert _bits(task, model(inputs), targets) < 2.0


def _bits(task: TextGpt, outputs: torch.Tensor, targets: torch.Tensor) -> float:
    total, weight, *_ = measured(as_metrics(task.metrics), outputs.detach(), targets).tolist()
    loss = task.loss(outputs, targets, task.recipe).item()
    assert total / weight == pytest.approx(loss, rel=1e-5)
    bits = task.metrics["bits_per_byte"].of_mean(total / weight)
    assert task.metrics["perplexity"].of_mean(total / weight) == pytest.approx(math.pow(2.0, bits))
    return bits
