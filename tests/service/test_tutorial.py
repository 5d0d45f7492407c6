"""docs/tutorial.md is followed as it stands: its programs run, and its commands are carried out on what they leave."""

import contextlib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.service.terminal import exit_status
from triaccel_ray.service.runs.record import read_run

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
TAKES_LONG = ("search", "compare")
"""Tested in test_end_to_end.py, with a task of one's own too; test_documents.py parses them."""
JOINS_RAY = ("doctor", "run", "search", "tune-batch")
TRAINS = ("run", "search", "tune-batch")


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """This process uses the cluster of the tests meanwhile, as a notebook uses a Ray of its own."""
    ray.init(address=address, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def own_tracking_uri() -> Iterator[None]:
    """One of the programs sets MLflow's, which holds for the whole process."""
    yield
    import mlflow

    mlflow.set_tracking_uri(None)


def test_the_tutorial_can_be_followed(
    own_tracking_uri: None,
    cluster_address: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    programs, commands = [], []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", TUTORIAL.read_text(), flags=re.MULTILINE | re.DOTALL):
        if language == "python":
            name = block.splitlines()[0].removeprefix("# ")
            Path(name).write_text(block)
            programs.append(name)
            with connected(cluster_address) if "search" in name else contextlib.nullcontext():
                runpy.run_path(name)
        for line in block.splitlines():
            if line.startswith("triaccel ") and line.split()[1] not in TAKES_LONG:
                words = line.split()[1:]
                commands.append(words[0])
                words += ["--address", cluster_address] if words[0] in JOINS_RAY else []
                words += ["--device", "cpu"] if words[0] in TRAINS else []
                assert exit_status(*words) == 0, (line, *capsys.readouterr())
    first = ["wide.py", "my_model.py", "my_data.py", "my_recipe.py", "spirals.py", "use.py"]
    assert programs == [*first, "regression.py", "my_search.py", "my_trainer.py"]
    assert commands.count("run") == 2
    said = capsys.readouterr().out
    assert "replayed under its own configuration: every decision is the same" in said
    assert read_run(tmp_path / "triaccel-runs" / "mine").status == "finished"
    assert "from-python: spirals:Spirals, 2 of 2 trials" in said
