"""What an installer gets: a wheel that works far from the repository, and needs what it says it needs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "search_spaces", "trainables")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
IMPORT = """
import kernels
import triaccel_ray.kernels.grad_stats.api, triaccel_ray.search_spaces, triaccel_ray.trainables.registry
from triaccel_ray import ControlLoop
from triaccel_ray.search_spaces.tuned import tuned_thresholds
for module in (triaccel_ray, triaccel_ray.kernels, triaccel_ray.search_spaces, triaccel_ray.trainables, kernels):
    print(module.__file__)
held_out = triaccel_ray.trainables.registry.load_task("digits", None).data("final").held_out
print(tuned_thresholds("cifar10-resnet18").task, len(held_out))
"""


def built(kind: str, source: Path, out: Path) -> Path:
    """A wheel or sdist, by the functions that `uv build` and pip call, with the setuptools that is installed here."""
    words = [sys.executable, "-c", BUILD.format(kind=kind), str(out)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's files as git has them, links as links: building writes beside them."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("triaccel_ray", *LINKED):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_holds_every_file_of_the_package_once(wheel: Path, source: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    folders = os.walk(source / "triaccel_ray", followlinks=True)
    there = [Path(folder, name).relative_to(source).as_posix() for folder, _, files in folders for name in files]
    assert sorted(names) == sorted(there)
    data = ("py.typed", "__init__.pyi", "search_spaces/results/digits.json")
    assert {f"triaccel_ray/{name}" for name in data} < set(names)


def test_an_sdist_builds_the_same_wheel(wheel: Path, source: Path, tmp_path: Path) -> None:
    with tarfile.open(built("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    again = built("wheel", tmp_path / wheel.name.partition("-py3")[0], tmp_path)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_an_installed_wheel_works_beside_the_kernels_of_hugging_face(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").touch()
    words, environment = [sys.executable, "-c", IMPORT], {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *files, last = done.stdout.splitlines()
    packages = ("triaccel_ray", *(f"triaccel_ray/{name}" for name in LINKED), "kernels")
    assert files == [str(site / package / "__init__.py") for package in packages]
    assert last == "cifar10-resnet18 359"


def test_what_is_imported_is_a_dependency_and_every_dependency_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["transformers"]]
    declared = {re.match(r"[\w-]+", line)[0] for line in lines} - {"accelerate"}  # which transformers imports
    providers = packages_distributions()
    imported = set()
    for path in (path for name in ("triaccel_ray", *LINKED) for path in (ROOT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    imported -= {*sys.stdlib_module_names, "triaccel_ray"}
    needed = [{re.sub(r"[-_.]+", "-", name).lower() for name in providers[each]} & declared for each in imported]
    assert all(needed), imported
    assert set().union(*needed) == declared
