import enum
import os
import pickle
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.build import Trap, same
from triaccel_ray.cuda.random_states import random_states, set_random_states
from triaccel_ray.records.checkpoint import FORMAT, CheckpointError, OtherFormatError, load_checkpoint, save_checkpoint

STATE: dict[str, Any] = {"weights": torch.arange(300.0), "counters": [1, 2], "nested": {"name": None, "half": 0.5}}


class Odd(torch.Tensor):
    """A kind of tensor that PyTorch does not know."""


class Kind(enum.Enum):
    ODD = "odd"


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


def saved(path: Path, content: Any) -> bytes:
    torch.save(content, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *((lambda path, share=share: path.read_bytes()[: int(share * path.stat().st_size)], CheckpointError,
           r"is damaged \(.+\): delete it to start over") for share in (0.0, 0.5, 0.99)),
        *((lambda path, data=data: data, CheckpointError, "is damaged") for data in (b"\0" * 100, b"no checkpoint")),
        (lambda path: saved(path, {"format": FORMAT}), CheckpointError, f"has format {FORMAT}: this version reads"),
        (lambda path: saved(path, {"model": {}}), CheckpointError, "has format None: this version reads"),
        (lambda path: saved(path, [1]), CheckpointError, "has format 'list': this version reads"),
        (lambda path: saved(path, {"format": FORMAT + 1, "state": {}}), OtherFormatError,
         f"has format {FORMAT + 1}, .*: go on with"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told_apart(tmp_path: Path, change: Any, kind: type[Exception], message: str) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, STATE)
    path.write_bytes(change(path))
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} {message}") as raised:
        load_checkpoint(path)
    assert raised.type is kind


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content))])
def test_loading_runs_no_code(tmp_path: Path, write: Any) -> None:
    path, sprung = tmp_path / "checkpoint.pt", tmp_path / "sprung"
    write({"format": FORMAT, "state": {"trap": Trap(sprung)}}, path)
    with pytest.raises(CheckpointError, match=rf"checkpoint {path} is damaged"):
        load_checkpoint(path)
    assert not sprung.exists()


def test_numpy_numbers_are_saved_as_python_numbers(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.logspace(-2, -1, 3)[1])
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 2, 2]))  # type: ignore[arg-type]
    counts = [np.int64(3), (np.bool_(True), {np.float32(0.5), 2})]
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    state = {**{name: part.state_dict() for name, part in parts.items()}, "counts": counts}
    save_checkpoint(tmp_path / "checkpoint.pt", state)
    found = load_checkpoint(tmp_path / "checkpoint.pt")
    (group,), milestones = found["optimizer"]["param_groups"], found["scheduler"]["milestones"]
    assert (type(group["lr"]), group["lr"]) == (float, optimizer.param_groups[0]["lr"])
    assert (milestones, {type(key) for key in milestones}) == (Counter([1, 2, 2]), {int})
    assert found["counts"] == [3, (True, {0.5, 2})]
    assert type(found["counts"][1][0]) is bool
    assert found["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]  # an OrderedDict's own
    assert type(counts[0]) is np.int64  # what was given stays


@pytest.mark.parametrize(
    "value", [deque([1]), np.zeros(2), frozenset({1}), np.longdouble(1.0), lambda: None, torch.ones(1).as_subclass(Odd)]
)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: Any) -> None:
    message = rf"checkpoint.pt\['state'\]\['groups'\]\[1\]\['queue'\] is a {type(value).__name__}, which .*: must be a"
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path / "checkpoint.pt", {"groups": [{}, {"queue": value}]})
    assert os.listdir(tmp_path) == []


def test_what_torch_loads_besides_can_be_saved(tmp_path: Path) -> None:
    state = {"dtype": torch.float16, "shape": torch.Size([2]), "bytes": b"raw", "kind": Kind.ODD}
    with torch.serialization.safe_globals([Kind]):
        save_checkpoint(tmp_path / "checkpoint.pt", state)
        assert load_checkpoint(tmp_path / "checkpoint.pt") == state
    with pytest.raises(TypeError, match="is a Kind, which a checkpoint cannot hold"):
        save_checkpoint(tmp_path / "checkpoint.pt", state)


def test_a_failure_while_saving_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    path, previous = tmp_path / "checkpoint.pt", tmp_path / "previous.pt"
    save_checkpoint(path, STATE)
    weights = torch.zeros(300)
    weights.function = lambda: None  # type: ignore[attr-defined]
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_checkpoint(path, {"weights": weights})
    assert same(load_checkpoint(path), STATE)
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    save_checkpoint(path, {"other": 1}, previous=previous)
    assert (load_checkpoint(path), same(load_checkpoint(previous), STATE)) == ({"other": 1}, True)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]


@pytest.mark.gpu
def test_random_states_are_restored_where_fewer_gpus_are_seen() -> None:
    states = random_states()
    drawn = torch.rand(3, device="cuda")
    set_random_states({**states, "cuda": [*states["cuda"], *states["cuda"]]})
    assert torch.equal(torch.rand(3, device="cuda"), drawn)


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    draw()  # leaves Python and NumPy with the second half of a pair of normal numbers
    save_checkpoint(tmp_path / "random", random_states())
    drawn = draw()
    assert draw() != drawn
    set_random_states(load_checkpoint(tmp_path / "random"))
    assert draw() == drawn
