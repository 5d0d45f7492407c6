"""What is said of a search: its table, what it recommends, which threshold mattered, and its page."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.browser import Tags, needs_chromium, num_colors, screenshot
from tests.service.records import RUN_SPEC, run_of, search_of
from tests.service.search_folder import simulated_search
from triaccel_ray.records.events import End
from triaccel_ray.service.report.report import show
from triaccel_ray.service.report.search import (
    missing_runs,
    outcomes,
    recommendation,
    search_table,
    view_search,
)
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.runs.objective import Objective
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.search.search import SearchRecord, read_search, to_be_repeated
from triaccel_ray.service.storage.storage_path import StoragePath

REFERENCE = (90.0, 90.0)
BY_ACCURACY = Objective(name="metric", reference=REFERENCE)


def changed(run: RunRecord, **fields: Any) -> RunRecord:
    """The run with other fields of all its epochs."""
    return replace(run, epochs=tuple(replace(epoch, **fields) for epoch in run.epochs))


def search(accuracy: float, *, objective: str = "score") -> SearchRecord:
    """Baselines of 90 %, 10 s and 0.5 GB, hence a score of 18, and one finished trial."""
    return search_of(run_of("trial-000", accuracy=accuracy), objective=Objective(name=objective, reference=REFERENCE))


def test_a_search_lists_baselines_then_trials_best_first() -> None:
    trials = (run_of("bad", accuracy=80.0), run_of("good", accuracy=91.0), run_of("best", accuracy=92.0))
    stopped = run_of("stopped", accuracy=99.0, num_epochs=1, status="stopped")
    diverged = run_of("diverged", num_epochs=0, status="failed")
    record = search_of(diverged, stopped, *trials, objective=BY_ACCURACY)
    table = search_table(record)
    assert [row[0] for row in table.rows] == ["FP32", "AMP", "best", "good", "bad", "stopped", "diverged"]
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert [row[7] for row in table.rows[:5]] == ["90.00", "90.00", "92.00", "91.00", "80.00 *"]
    assert (table.rows[5][6], table.rows[6][1]) == ("1 of 30", "failed (non_finite)")
    assert [list(row[2:6]) for row in table.rows[1:3]] == [[""] * 4, ["3.00e-07", "2.00e-05", "0.600", "0.850"]]
    assert "at least 89.00 % (AMP 90.00 %, margin 1 point)" in table.note
    assert "stopped: pruned before its last epoch" in table.note
    assert {each.label: [point.metric for point in each.points] for each in outcomes(record)} == {
        "stopped early (pruned)": [99.0],
        "trial beyond the margin": [80.0],
        "trial": [91.0, 92.0],
        "Pareto front of the trials": [91.0, 92.0],
        "best: best, score 18.4": [92.0],
        "FP32": [90.0],
        "AMP": [90.0],
    }


def test_thresholds_that_are_searched_besides_have_columns_and_shared_gpus_are_told() -> None:
    record = search(91.0)
    spec = replace(record.spec, optional=("alpha", "tau_curv", "t_ctrl", "batch_steps"))
    spec = replace(spec, base=replace(RUN_SPEC, trials_per_gpu=2))
    table = search_table(replace(record, spec=spec))
    assert list(table.header[6:11]) == ["alpha", "tau_curv", "t_ctrl", "step_up", "step_down"]
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert "GPUs shared by 2 runs each" in table.note


def test_a_best_trial_above_the_baselines_is_recommended() -> None:
    record = search(91.0)
    assert recommendation(record) == (
        "The best trial, trial-000, has score 18.2, AMP score 18, FP32 score 18. To train with its thresholds:",
        f"triaccel run --from {record.trials[0].folder.absolute()}",
    )


@pytest.mark.parametrize(("objective", "warns"), [("score", True), ("time", True), ("metric", False)])
def test_trials_on_several_gpus_are_not_compared_with_baselines_on_one_unnoticed(objective: str, warns: bool) -> None:
    record = search(91.0, objective=objective)
    record = replace(record, spec=replace(record.spec, base=replace(RUN_SPEC, gpus="2")))
    unlike = "trials train on 2 ranks, baselines on one: compare accuracy, not times and scores"
    assert unlike in search_table(record).note
    assert (f". But {unlike}." in recommendation(record)[0]) is warns
    assert "ranks" not in search_table(search(91.0, objective=objective)).note


@pytest.mark.parametrize(
    ("objective", "seconds", "peak_gb", "said"),
    [
        ("score", 10.0, 0.5, "score 17.9, AMP score 18, FP32 score 18"),
        ("metric", 10.0, 0.5, "accuracy 89.50 %, AMP accuracy 90.00 %, FP32 accuracy 90.00 %"),
        ("time", 12.0, 0.5, "12 s an epoch, AMP 10 s an epoch, FP32 10 s an epoch"),
        ("memory", 10.0, 0.6, "a peak of 0.6 GB, AMP a peak of 0.5 GB, FP32 a peak of 0.5 GB"),
        ("pareto", 10.0, 0.6, "score 14.92, AMP score 18, FP32 score 18"),
    ],
)
def test_a_best_trial_behind_amp_is_not_recommended(objective: str, seconds: float, peak_gb: float, said: str) -> None:
    record = search(89.5, objective=objective)
    record = replace(record, trials=(changed(record.trials[0], seconds=seconds, peak_bytes=int(peak_gb * 1e9)),))
    assert recommendation(record) == (
        f"The best trial, trial-000, has {said}. On this task and hardware train with AMP:",
        f"triaccel run --from {record.baselines['amp'].folder.absolute()}",
    )


def test_a_finished_baseline_within_the_margin_that_is_better_is_named() -> None:
    record = search(91.0)
    cases = ((90.0, "finished", "fp32"), (80.0, "finished", "trial-000"), (90.0, "failed", "trial-000"))
    for accuracy, status, best in cases:
        fp32 = changed(record.baselines["fp32"], seconds=5.0, held_out_metrics={"accuracy": accuracy})
        baselines = {**record.baselines, "fp32": replace(fp32, end=End(status=status))}
        assert recommendation(replace(record, baselines=baselines))[1].endswith(best)


def test_the_best_repeat_counts_in_place_of_the_run() -> None:
    record = search(91.0)
    amp, (trial,) = record.baselines["amp"], record.trials
    again = [changed(amp, seconds=15.0), changed(amp, seconds=5.0)]
    repeated = replace(record, repeats={"amp": again, "trial-000": [changed(trial, seconds=20.0)]})
    sentence, command = recommendation(repeated)
    assert "has score 9.1, AMP score 36, " in sentence
    assert command == f"triaccel run --from {amp.folder.absolute()}"
    table = search_table(repeated)
    assert [row[0] for row in table.rows][:2] == ["AMP again", "trial-000 again"]
    assert "again: the best of 3 more runs, which replaces the first run" in table.note
    faster = replace(record, repeats={"amp": [changed(amp, seconds=20.0)], "trial-000": [changed(trial, seconds=5.0)]})
    assert "has score 36.4, AMP score 9, FP32 score 18." in recommendation(faster)[0]
    ring = next(each for each in outcomes(faster) if each.label == "best: trial-000, score 36.4")
    assert [point.seconds for point in ring.points] == [5.0]
    failed = replace(changed(amp, seconds=5.0), end=End(status="failed", cause="non_finite"))
    assert recommendation(replace(record, repeats={"amp": [failed]}))[1].endswith("trial-000")


def test_short_runs_are_repeated_by_turns() -> None:
    record = search(91.0)
    todo = to_be_repeated(record)
    assert list(todo) == [f"{name}-again-{number}" for number in (1, 2, 3) for name in ("trial-000", "amp", "fp32")]
    amp = record.baselines["amp"]
    assert todo["amp-again-2"] == amp.spec
    done = replace(amp, folder=Path("amp-again-2"))
    assert set(todo) - set(to_be_repeated(replace(record, repeats={"amp": [done]}))) == {"amp-again-2"}
    assert to_be_repeated(search(50.0)) == {}  # there is no best trial
    long = changed(amp, seconds=50.0)
    assert to_be_repeated(replace(record, baselines={**record.baselines, "amp": long})) == {}


def test_without_a_trial_within_the_margin_the_reason_is_said() -> None:
    failed = run_of("trial-001", num_epochs=0, status="failed")
    record = search(50.0)
    sentence, command = recommendation(replace(record, trials=(*record.trials, failed)))
    assert command.endswith("amp")
    assert sentence.endswith("On this task and hardware train with AMP:")
    assert "1 trial finished, and none reaches 89.00 % (AMP with a margin of 1 point)" in sentence
    assert "larger --margin. 1 failed; the page lists the reasons." in sentence
    faster = changed(record.baselines["fp32"], seconds=0.1)
    assert recommendation(replace(record, baselines={**record.baselines, "fp32": faster}))[1].endswith("fp32")


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([("failed", "out_of_memory")] * 2, r"\(2 failed \(out_of_memory\)\): give more --memory-headroom"),
        ([("failed", "non_finite")], "give a smaller --lr"),
        ([("failed", "bug")], "triaccel resume"),
        ([("stopped", "")], r"\(1 stopped\): all were pruned, .*--margin"),
        ([], "none has begun"),
    ],
)
def test_a_search_without_a_trial_to_its_end_says_what_ended_them(ends: Sequence[tuple[str, str]], text: str) -> None:
    runs = [replace(run_of(f"t{i}"), end=End(status=status, cause=why)) for i, (status, why) in enumerate(ends)]
    record = search_of(*runs)
    said, command = recommendation(record)
    assert re.match(f"No trial ran to its end .*{text}", said)
    assert said.endswith(f"Not all has begun: `triaccel resume {record.folder.absolute()}` goes on.")
    assert command == ""
    complete = replace(record, spec=replace(record.spec, num_trials=max(len(runs), 1)))
    assert recommendation(complete)[1].endswith("amp") == bool(runs)


def test_a_difference_of_less_than_a_percent_is_called_one() -> None:
    close, clear = (recommendation(search(accuracy))[0] for accuracy in (90.5, 92.0))
    assert "AMP alone is as good within 1%. To train with its thresholds:" in close
    assert "as good within" not in clear


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with its page; one trial is damaged."""
    folder = simulated_search(tmp_path_factory.mktemp("a") / "hunt", 32)
    (folder / "trials" / "trial31" / "events.jsonl").write_text("no event\n")
    (folder / "trials" / "trial00").rename(folder / "trials" / "trial-000")
    return folder


def test_a_page_has_table_picture_and_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_search(folder)
    record = replace(record, spec=replace(record.spec, num_trials=3))
    assert missing_runs(record) == ["baseline probe", "trial-001", "trial-002"]
    view = view_search(record)
    show(view)
    said, text = capsys.readouterr().out, view.page.read_text()
    for shown in (said, text):
        assert "trial-002 is missing: it was asked for and has not begun" in shown
        assert "trial31 is left out: event log" in shown
    assert search_table(record).rows[-1][:2] == ["trial31", "damaged"]
    assert view.rows[0]["behind AMP"] is False
    tags = Tags(text)
    assert {"tau_low", "rho_high"} <= set(tags.texts)
    assert any(f"is on a page of its own: triaccel report {folder}/trials/NAME" in each for each in tags.texts)
    assert [attributes["alt"] for tag, attributes in tags.tags if tag == "img"] == ["pareto"]


@needs_chromium
def test_a_browser_shows_the_pictures(folder: Path, tmp_path: Path) -> None:
    page = view_at(StoragePath.of(folder)).page
    seen = screenshot(f"file://{page}", tmp_path / "page.png", width=1200, height=3000)
    assert seen.shape == (3000, 1200, 3)
    assert num_colors(seen) > 500
