"""What `triaccel resume` does with runs that failed by what was tried: never the same again in silence."""

from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.mlflow_server import runs
from tests.service.own_task import write_module
from tests.service.records import FINAL_SPEC
from tests.service.terminal import Terminal
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.storage.layout import EVENTS, SPEC, write_value

FITS_LATER = """

class FitsLater(Blobs):
    def model(self):
        if Path(__file__).with_name("full").exists():
            return Failing(torch.OutOfMemoryError("not even one sample fits"))
        return super().model()
"""


def test_a_run_that_diverged_is_not_trained_again(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    run = SimulatedRun(terminal.storage / "wild")
    run.start(epochs=1)
    run.end("failed", "non_finite", "the training loss of epoch 2 is nan")
    write_value(run.folder / SPEC, FINAL_SPEC)
    before = run.path.read_bytes()
    assert terminal.type("resume", "wild") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "wild failed (non_finite): the training loss of epoch 2 is nan" in said
    assert "nothing is trained; try others, such as a smaller --lr" in said
    assert run.path.read_bytes() == before
    assert terminal.tracker.client.get_experiment_by_name("triaccel-runs") is not None  # what was to be recorded, was


def test_memory_that_was_freed_is_used_when_the_run_is_named(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = write_module(tmp_path, monkeypatch, FITS_LATER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    full = tmp_path / "full"
    full.touch()
    words = ("--methods", "amp", "--seeds", "1", "--epochs", "1", "--device", "cpu", "--name", "tight")
    assert terminal.type("compare", f"{module}:FitsLater", *words) == 1
    log = terminal.storage / "tight" / "amp-seed0" / EVENTS
    before = log.read_bytes()
    assert read_run(log.parent).status == "failed (out_of_memory)"

    full.unlink()
    assert terminal.type("resume", "tight") == 1
    again = f"triaccel resume tight/amp-seed0 --storage-path {terminal.storage} --address {terminal.address}"
    assert f"that is its outcome; `{again}` tries it again" in capsys.readouterr().err
    assert log.read_bytes() == before

    assert terminal.type("resume", "tight/amp-seed0") == 0
    assert "trying again from its last checkpoint, for there may be more memory now" in capsys.readouterr().err
    run = read_run(log.parent)
    assert (run.status, [each.cause for each in run.interruptions]) == ("finished", ["out_of_memory"])

    assert terminal.type("resume", "tight") == 0
    recorded = [each.status for each in runs(terminal.tracker, "triaccel-comparisons") if each.name == "amp-seed0"]
    assert recorded == ["FINISHED"]
    assert "amp-seed0 failed" not in capsys.readouterr().err
