"""Runs, searches and comparisons from Python: the options of the command line, and its results as values."""

import importlib
import os
import shlex
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest
import ray

from tests.service.build import CONTROL, SimulatedRun
from tests.service.mlflow_server import runs
from tests.service.own_task import write_module
from tests.service.search_folder import simulated_search
from tests.service.terminal import typed
from tests.service.waiting import wait_until
from triaccel_ray import Report, RunFailedError, compare, run, search, tune_batch
from triaccel_ray.service.cli.arguments import Run, Search
from triaccel_ray.service.cli.parsing import command_of, parse
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import read_search
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.service.tracking.tracker import Tracker
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.registry import name_of

QUICK: dict[str, Any] = {"epochs": 1, "device": "cpu"}


def test_keywords_mean_what_the_options_mean() -> None:
    words = (
        "search digits --trials 3 --margin 2 --also alpha batch_steps --name hunt --lr 1 --memory-headroom 1024B "
        "--data-dir files --noise-bound on --fuse off --t-ctrl 5 --storage-path runs --address auto"
    )
    given: dict[str, Any] = {"trials": 3, "margin": 2, "also": ("alpha", "batch_steps"), "name": "hunt", "lr": 1}
    given |= {"memory_headroom": 1024, "data_dir": "files", "noise_bound": True, "fuse": False, "t_ctrl": 5}
    given |= {"address": "auto"}
    for storage in ("runs", Path("runs")):
        assert command_of(Search, "digits", {**given, "storage_path": storage}) == parse(words.split())
    from_text = command_of(Run, Digits, {"memory_budget": "2GiB", "final": True, "data_dir": Path("files")})
    assert from_text == parse(["run", "digits", "--memory-budget", "2GiB", "--final", "--data-dir", "files"])


class Local(Digits):
    """Of a module, hence importable."""

    class Inner(Digits):
        """Of a class."""


MISTAKES: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
    (search, "digits", {"trails": 3}, TypeError, r"search\(\) got an unexpected .* 'trails', did you mean trials\?"),
    (run, "digits", {"capture": 3}, ValueError, "capture = 3: must be one of on, off"),
    (run, "digits", {"epochs": "three"}, ValueError, "epochs = 'three': must be an integer"),
    (run, "digits", {"memory_budget": True}, ValueError, "memory_budget = True: must be a str"),
    (run, "digits", {"storage_path": 3}, ValueError, "storage_path = 3: must be a str"),
    (search, "digits", {"also": "alpha"}, ValueError, "also = 'alpha': must be a list"),
    (search, "digit", {}, ValueError, "task = 'digit': no such task, did you mean digits"),
    (tune_batch, "digits", {"batchmax": 3}, TypeError, r"tune_batch\(\) got an unexpected .* did you mean batch_max\?"),
    (run, 3, {}, TypeError, "task = 3: must be a name, such as 'digits', or a class derived from Task"),
    (run, Local.Inner, {}, ValueError, "is defined inside of a function or class"),
]


@pytest.mark.parametrize(("function", "task", "options", "kind", "message"), MISTAKES)
def test_a_mistake_is_an_exception_before_anything_is_written(
    function: Any, task: Any, options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        function(task, **{"storage_path": tmp_path / "runs", **options})
    assert not list(tmp_path.iterdir())


def test_a_class_has_the_name_by_which_others_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (name_of(Digits), name_of(Local)) == ("digits", f"{__name__}:Local")
    monkeypatch.setattr(Local, "__module__", "__main__")  # as in a notebook's cell
    with pytest.raises(ValueError, match=r"'__main__:Local': is defined in a notebook .* give 'my_tasks:Local'"):
        name_of(Local)


def test_a_report_holds_the_search_as_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_search(simulated_search(tmp_path / "hunt", 6))
    report = Report("hunt", storage_path=tmp_path)
    assert capsys.readouterr().out == ""
    _, said, _ = typed(capsys, "report", "hunt", "--storage-path", str(tmp_path))
    lines = [line.split() for line in said.splitlines()]
    assert [line.split() for line in str(report).splitlines()] == lines
    assert (report.name, report.folder) == ("hunt", tmp_path / "hunt")
    assert repr(report) == f"Report({str(tmp_path / 'hunt')!r})"
    assert report.control == report.best.onto(record.spec.base.control)
    assert shlex.split(report.command)[:3] == ["triaccel", "run", "--from"]
    table = pandas.DataFrame(report.rows).set_index("run")
    assert table.loc["FP32"].isna()["tau_low"]
    assert table["score"].dtype == table["tau_low"].dtype == float
    assert set(table.index[table["behind AMP"]]) == {run.name for run in record.trials if run.status == "stopped"}


def test_in_a_notebook_a_report_is_its_page_and_of_a_trial_it_has_the_epochs(tmp_path: Path) -> None:
    report = Report(simulated_search(tmp_path / "hunt", 2))
    before, _, inside = report._repr_html_().partition("srcdoc='")
    assert before.startswith("<iframe sandbox ")
    assert inside.index("'") == inside.index("'></iframe>")
    assert "trial00" in inside
    report = Report(trial := tmp_path / "hunt" / "trials" / "trial00")
    assert [row["epoch"] for row in report.rows] == [1, 2, 3]
    assert {type(row["samples/s"]) for row in report.rows} == {int}
    assert (report.best, report.control) == (None, read_run(trial).spec.control)


def test_a_log_of_code_of_your_own_has_settings_and_no_command(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path / "mine", info={}, parameters={})
    run.start()
    report = Report(run.path)
    assert (report.folder, report.control, report.command) == (run.folder, CONTROL, "")
    page = report.page.read_text()
    assert "<td>t_ctrl</td><td>50</td>" in page
    assert not any(text in page for text in ("triaccel run", "momentum", "<td>lr<", "<td>seed"))
    with pytest.raises(ValueError, match="name = 'nobody': there is no folder"):
        Report("nobody", storage_path=tmp_path)


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, cluster_address: str) -> Iterator[Any]:
    """The module of tasks beside a notebook whose process has connected to a Ray by itself."""
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        paths = os.pathsep.join([str(folder), os.getcwd()])  # the tasks use the tests' own modules
        patch.chdir(folder)
        patch.setenv("TRIACCEL_CPUS_PER_RUN", "1")  # both baselines at once
        ray.init(address=cluster_address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
        yield importlib.import_module(write_module(folder, patch))
        ray.shutdown()


def test_a_ray_that_runs_already_is_used_again_and_again(
    notebook: Any, experiment: str, sqlite_tracker: Tracker, cluster_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where: dict[str, Any] = {"tracking_uri": sqlite_tracker.uri, "experiment": experiment, "storage_path": "hunts"}
    quick = {"trials": 1, "space": "thresholds-absolute", "margin": 100, **QUICK}
    report = search(notebook.Blobs, name="first", **quick, **where)
    assert report.folder == Path.cwd() / "hunts" / "first"
    assert f"first: {notebook.__name__}:Blobs, 1 of 1 trials" in str(report)
    names = ["FP32", "AMP", "trial-000"]
    assert [row["run"] for row in report.rows] == [*(f"{name} again" for name in sorted(names)), *names]
    assert report.best is not None
    said = capsys.readouterr()
    assert said.out == ""
    assert "1/1 trial-000 finished after epoch 1/1" in said.err
    run(notebook.Blobs, name="second", **QUICK, **where)
    assert ray.get_runtime_context().gcs_address == cluster_address  # it has not been shut down
    assert {"first", "second"} < {each.name for each in runs(sqlite_tracker, experiment)}
    with pytest.raises(ValueError, match=r"name = 'first': .* exists already"):
        search(notebook.Blobs, name="first", **where)
    with pytest.raises(ValueError, match=r"address = '10.0.0.1:1': this process uses Ray at .* already"):
        run("digits", address="10.0.0.1:1", **where)


def test_where_all_runs_fail_it_raises_what_the_command_says(
    notebook: Any, experiment: str, sqlite_tracker: Tracker, capsys: pytest.CaptureFixture[str]
) -> None:
    where: dict[str, Any] = {"tracking_uri": sqlite_tracker.uri, "experiment": experiment}
    with pytest.raises(RunFailedError, match=r"amp-seed0 failed: ValueError: the shapes do not fit; its log"):
        compare(notebook.Mistaken, name="wrong", methods="amp", seeds=1, **QUICK, **where)
    assert "Traceback" not in capsys.readouterr().err
    assert Report("wrong").rows[0]["runs"] == 0


def test_ctrl_c_says_how_to_go_on(notebook: Any, sqlite_tracker: Tracker, cluster_address: str) -> None:
    log = Path("triaccel-runs/long") / EVENTS

    def press() -> None:
        wait_until(lambda: log.exists() and b'"kind":"epoch"' in log.read_bytes())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt) as stopped:
        run(notebook.Blobs, name="long", epochs=100_000, device="cpu", tracking_uri=sqlite_tracker.uri)
    first, command = str(stopped.value).splitlines()
    assert first == "stopped; to go on from the last checkpoint:"
    words = ["--tracking-uri", sqlite_tracker.uri, "--address", cluster_address]
    assert shlex.split(command) == ["triaccel", "resume", "long", *words]
    assert ray.is_initialized()
    report = Report("long")
    assert f"long: {notebook.__name__}:Blobs, the full control loop, stopped" in str(report)
    assert [row["epoch"] for row in report.rows][:1] == [1]
