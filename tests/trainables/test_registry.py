import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.registry import TASKS, load_task, name_of
from triaccel_ray.trainables.task import Recipe

MODULE = """
from torch import nn
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Task

class Mine(Digits):
    pass

class Half(Task):
    def model(self):
        return nn.Linear(1, 1)

class Stubborn(Digits):
    def __init__(self):
        pass

class Plain:
    pass
"""


@pytest.fixture
def working_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields a working directory that is not on the module path, and forgets the modules imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


def _write(folder: Path, module: str, text: str) -> None:
    (folder / f"{module}.py").write_text(text)


def test_bundled_tasks_are_found_by_their_names(tmp_path: Path) -> None:
    for name in TASKS:
        task = load_task(name, tmp_path)
        assert name_of(type(task)) == name
        assert task.data_dir == tmp_path


@pytest.mark.parametrize(("folder", "module"), [(".", "own_task"), ("own_package", "own_package.inner")])
def test_a_task_of_ones_own_is_imported_from_the_working_directory(working_dir: Path, folder: str, module: str) -> None:
    (working_dir / folder).mkdir(exist_ok=True)
    _write(working_dir / folder, module.rpartition(".")[2], MODULE)
    task = load_task(f"{module}:Mine", working_dir)
    assert isinstance(task, Digits)
    assert (type(task).__name__, task.data_dir) == ("Mine", working_dir)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cifar10-resnet-18",
            r"'cifar10-resnet-18': no such task, did you mean cifar10-resnet18\?.*package.module:Class",
        ),
        ("zebra", r"'zebra': no such task. Bundled are digits, cifar10-resnet18, .*package.module:Class"),
        ("no_such_module:Mine", "there is no module no_such_module, neither in"),
        ("triaccel_ray.trainables.nothing:Mine", "there is no module triaccel_ray.trainables.nothing, neither in"),
        ("own_task:Mien", r"own_task has no Mien; the tasks defined there: Mine, Half, Stubborn"),
        ("own_task:Plain", "Plain must be a subclass of triaccel_ray.Task"),
        ("own_task:Half", r"Half must define the method\(s\) data"),
        ("own_task:Stubborn", r"Stubborn\(data_dir\) raised TypeError: .* constructible so"),
        ("own_task.py:Mine", "not its file"),
        ("./own_task:Mine", "not its file"),
        ("own_task:", "not its file"),
        ("own_needs:Mine", "own_needs imports zebra_library, which is not installed"),
        ("own_broken:Mine", r"importing own_broken raised NameError: name 'undefined' .*own_broken.py:2\)"),
        ("own_syntax:Mine", r"importing own_syntax raised SyntaxError: .*own_syntax.py, line 1"),
    ],
)
def test_what_is_no_task_is_refused_with_the_reason(working_dir: Path, name: str, message: str) -> None:
    _write(working_dir, "own_task", MODULE)
    _write(working_dir, "own_needs", "import zebra_library\n")
    _write(working_dir, "own_broken", "x = 1\ny = undefined\n")
    _write(working_dir, "own_syntax", "class\n")
    with pytest.raises(ValueError, match=message):
        load_task(name, None)


def test_norms_and_biases_have_no_decay_and_a_rate_of_their_own() -> None:
    model = Digits().model()
    optimizer = Digits().optimizer(model, Recipe(lr=0.2, weight_decay=1e-3, norm_bias_lr_factor=16.0))
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = (0.2, 1e-3) if parameter.dim() >= 2 else (3.2, 0.0)
        assert (groups[id(parameter)]["lr"], groups[id(parameter)]["weight_decay"]) == expected, name


def test_a_recipe_that_cannot_be_is_refused() -> None:
    for factor in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"norm_bias_lr_factor = .*: must lie in \(0, 1e6\]"):
            Recipe(norm_bias_lr_factor=factor)
    with pytest.raises(ValueError, match="must be one of fp16, bf16"):
        Recipe(amp="fp32")  # type: ignore[arg-type]  # as a file may have it
