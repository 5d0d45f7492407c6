import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import triaccel_ray

BLOCK = """
import sys
import warnings

warnings.simplefilter("error")

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not installed")

sys.meta_path.insert(0, Block())
"""

SERVICE = ("ray", "mlflow", "optuna", "tyro", "rich")


def python(code: str) -> list[str]:
    """What a fresh interpreter prints."""
    root = Path(triaccel_ray.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_users_own_model_trains_without_the_services_packages() -> None:
    words = python(BLOCK.format(blocked=SERVICE) + Path("examples/own_model.py").read_text())
    assert words.count("epoch") == 10
    assert words.count("128,") > 0  # samples in a batch, which begins with 64
    assert float(words[-2]) >= 95.0  # percent


def test_the_tests_of_the_gpu_need_none_of_the_services_packages_either() -> None:
    code = BLOCK.format(blocked=SERVICE) + "warnings.resetwarnings()\nimport pytest\n"
    words = python(
        code + "raise SystemExit(pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    found = {word.partition("::")[0] for word in words if "::" in word}
    assert {"tests/test_gpu.py", "tests/test_shared_device.py", "tests/apply/test_capture.py"} <= found
    assert len(found) > 20


def test_every_public_name_is_there() -> None:
    assert "ControlLoop" in triaccel_ray.__all__
    assert set(triaccel_ray.__all__) <= set(dir(triaccel_ray))
    for name in triaccel_ray.__all__:
        found = getattr(triaccel_ray, name)
        assert name.isupper() or (found.__name__, found.__module__) == (name, triaccel_ray._HOMES[name])


def test_settings_decisions_and_public_names_load_nothing_that_takes_seconds() -> None:
    code = BLOCK.format(blocked=("torch", "numpy", "ray", "mlflow", "matplotlib"))
    code += """
from triaccel_ray import ControlConfig, Metric, Plan, Precision, Recipe, Report, Task
from triaccel_ray import compare, efficiency_score, run, search
from triaccel_ray.decide import initial_decision
print(Recipe().epochs, initial_decision(ControlConfig(), [("conv", tuple(Precision))]).plan.batch_size)
"""
    assert python(code) == ["30", "96"]


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'triaccel_ray' has no attribute 'TrainLoop'"):
        triaccel_ray.TrainLoop  # noqa: B018  # the access is what is tested


def test_no_modules_import_each_other_in_a_circle() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("triaccel_ray", cache_dir=None)
    imported = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(list(TopologicalSorter(imported).static_order())) == len(graph.modules)  # else it names the circle
