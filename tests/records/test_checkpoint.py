import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.build import same
from triaccel_ray.cuda.random_states import random_states, set_random_states
from triaccel_ray.records.checkpoint import FORMAT, CheckpointError, OtherFormatError, load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {"weights": torch.arange(300.0), "counters": [1, 2], "nested": {"name": None, "half": 0.5}}


def test_a_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "checkpoint.pt"
    save_checkpoint(path, STATE)
    assert same(load_checkpoint(path), STATE)
    assert os.listdir(path.parent) == ["checkpoint.pt"]


def test_what_is_not_confirmed_is_not_written(tmp_path: Path) -> None:
    path, previous = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    save_checkpoint(path, STATE)
    before = path.read_bytes()

    def refuse() -> None:
        assert len(os.listdir(tmp_path)) == 2  # whole, and not yet under its name
        raise ConnectionError

    with pytest.raises(ConnectionError):
        save_checkpoint(path, {"other": 1}, previous=previous, confirm=refuse)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"checkpoint {tmp_path} does not exist: name the folder"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_damaged(tmp_path: Path, share: float) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, STATE)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged \(.+\): delete it to start over"):
        load_checkpoint(path)


@pytest.mark.parametrize("data", [b"\0" * 100, b"garbage that is no checkpoint", bytes(range(256)) * 8])
def test_garbage_is_damaged(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "found"),
    [({"format": FORMAT}, str(FORMAT)), ({"model": {}}, "None"), ([1], "'list'")],
)
def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path, content: Any, found: str) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(
        CheckpointError, match=rf"checkpoint {path} has format {found}: this version reads format {FORMAT}"
    ):
        load_checkpoint(path)


def test_a_checkpoint_of_another_version_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": 7, "state": {}}, path)
    with pytest.raises(OtherFormatError, match=f"has format 7, this version reads format {FORMAT}: go on with"):
        load_checkpoint(path)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_loading_runs_no_code(tmp_path: Path, write: Any) -> None:
    path, sprung = tmp_path / "checkpoint.pt", tmp_path / "sprung"
    write({"format": FORMAT, "state": {"trap": Trap(sprung)}}, path)
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged"):
        load_checkpoint(path)
    assert not sprung.exists()


def test_a_failure_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, STATE)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"weights": torch.zeros(300), "function": lambda: None})
    assert same(load_checkpoint(path), STATE)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    draw()  # leaves Python and NumPy with the second half of a pair of normal numbers
    save_checkpoint(tmp_path / "random", random_states())
    drawn = draw()
    assert draw() != drawn
    set_random_states(load_checkpoint(tmp_path / "random"))
    assert draw() == drawn
