import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.build import SimulatedRun
from tests.service.records import FINAL_SPEC, ended, named, run_of
from triaccel_ray.records.events import End, LogError
from triaccel_ray.records.goal import Goal
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import (
    READINGS,
    ComparisonRecord,
    FixedSetting,
    MethodResults,
    final_runs,
    read_comparison,
    summary_metrics,
)
from triaccel_ray.service.compare.spec import ABLATION, ComparisonSpec
from triaccel_ray.service.report.comparison import (
    comparison_tables,
    differences_table,
    label,
    paired_differences,
    readings_table,
    values_table,
    view_comparison,
)
from triaccel_ray.service.report.report import show
from triaccel_ray.service.report.tables import RESULT_HEADINGS, TextTable
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.storage.layout import COMPARISON, FIXED_SETTING, create_with_spec, write_value
from triaccel_ray.service.storage.storage_path import StoragePath
from triaccel_ray.trainables.task import Purpose

METHODS = ("fp32", "amp", "engine-amp", "triaccel")
CHOSEN = FixedSetting(precision=Precision.FP32, batch_size=64)


def comparison(methods: tuple[str, ...] = METHODS, **settings: Any) -> ComparisonSpec:
    return ComparisonSpec(base=FINAL_SPEC, methods=methods, **settings)


def results(method: str, *accuracies: float, **others: tuple[float, ...]) -> MethodResults:
    """Results of seeds 0, 1, ...: these accuracies; other figures as given, else a hundredth of the accuracy."""
    hundredths = dict.fromkeys(RESULT_HEADINGS, tuple(a / 100 for a in accuracies))
    figures = {"accuracy": accuracies, **hundredths, **others}
    by_seed = {seed: {name: values[seed] for name, values in figures.items()} for seed in range(len(accuracies))}
    return MethodResults(method=method, by_seed=by_seed)


def table_of(*rows: MethodResults) -> TextTable:
    return values_table("", {each.method: each for each in rows}, Goal())


def to_amp(amp: MethodResults, *rows: MethodResults) -> TextTable:
    return differences_table("", [(each.method, each, amp) for each in rows], Goal())


def record_of(spec: ComparisonSpec, folder: Path = Path("versus"), log: Path = Path("none")) -> ComparisonRecord:
    """A comparison with all final runs finished; method k of seed s ends k + s * (1 + k / 10) above 80 %.

    All have the log that lies in the folder `log`.
    """
    runs = {}
    fixed = CHOSEN if spec.num_fixed else None
    for name, run in final_runs(spec, fixed).items():
        place = spec.all_methods.index(run.method)
        value = 80.0 + place + run.seed * (1.0 + place / 10)
        end = End(status="finished", results=dict.fromkeys(RESULT_HEADINGS, value / 10) | {"accuracy": value})
        runs[name] = replace(run_of(name), spec=run, end=end, folder=log)
    return ComparisonRecord(folder=folder, spec=spec, fixed=fixed, runs=runs)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The folder of a run with a log."""
    return SimulatedRun(tmp_path / "a run").complete(epochs=1)


def test_every_method_has_every_seed_the_test_set_and_what_was_chosen() -> None:
    runs = final_runs(comparison(("fp32", "amp"), num_seeds=2, num_fixed=1), CHOSEN)
    assert set(runs) == {f"{method}-seed{seed}" for method in ("fp32", "amp", "fixed") for seed in (0, 1)}
    assert {run.purpose for run in runs.values()} == {Purpose.FINAL}
    assert all(name == f"{run.method}-seed{run.seed}" for name, run in runs.items())
    fixed = runs["fixed-seed0"].method_control
    assert (fixed.batch.start, fixed.precision.initial) == (64, Precision.FP32)
    assert runs["fp32-seed0"] == replace(FINAL_SPEC, method="fp32")


def test_the_two_tables() -> None:
    fixed, ablation = comparison(num_fixed=3), comparison(("amp",), ablation=True)
    assert (fixed.table_1, fixed.all_methods) == ((*METHODS, "fixed"), (*METHODS, "fixed"))
    assert (ablation.table_1, ablation.all_methods) == (("amp",), ("amp", *ABLATION))


def test_a_comparison_survives_its_file(tmp_path: Path) -> None:
    spec, folder = comparison(ablation=True, num_fixed=2), tmp_path / "versus"
    create_with_spec(folder, COMPARISON, spec)
    read = read_comparison(folder)
    assert (read.spec, read.fixed, read.runs, read.trials) == (spec, None, {}, {})
    write_value(folder / FIXED_SETTING, CHOSEN)
    assert read_comparison(folder).fixed == CHOSEN
    assert set(read_comparison(folder).unfinished()) == set(final_runs(spec, CHOSEN))
    (folder / FIXED_SETTING).write_text("{")
    with pytest.raises(LogError, match=r"fixed\.json cannot be read"):
        read_comparison(folder)
    with pytest.raises(ValueError, match="exists already"):
        create_with_spec(folder, COMPARISON, spec)


def test_what_has_finished_is_not_run_again() -> None:
    record = record_of(comparison(num_seeds=2))
    assert (record.unfinished(), record.failed) == ({}, {})
    died = replace(record.runs["fp32-seed1"], end=End(status="failed", cause="bug"))
    runs = dict(record.runs) | {"amp-seed1": replace(record.runs["amp-seed1"], end=None), "fp32-seed1": died}
    del runs["fp32-seed0"]
    cut = replace(record, runs=runs)
    assert set(cut.unfinished()) == {"amp-seed1", "fp32-seed0", "fp32-seed1"}
    assert cut.failed == {"fp32-seed1": died}
    assert list(cut.results("amp").by_seed) == [0]


def test_few_figures_stand_for_a_comparison() -> None:
    record = record_of(comparison(ablation=True, num_fixed=1))
    metrics = summary_metrics(record)
    assert len(metrics) < 60
    assert (metrics["fp32/accuracy_mean"], metrics["fp32/accuracy_std"]) == (81.0, 1.0)
    assert {name.partition("/")[0] for name in metrics} == set(record.spec.all_methods)
    assert not any(math.isnan(value) for value in metrics.values())
    assert set(summary_metrics(record_of(comparison(("amp",), num_seeds=1)))) == {
        *("amp/accuracy_mean", "amp/seconds_per_epoch_mean", "amp/peak_gb_mean", "amp/score_mean")
    }


def test_table_1_has_mean_and_deviation_without_exponents() -> None:
    rows = [results("amp", 90.0, 91.0, 92.0), results("fixed", 50.0), results("triaccel")]
    large = results("fp32", 90.0, 91.0, score=(12345.0, 12645.0))
    table = table_of(*rows, large)
    assert [list(row[:4]) for row in table.rows[:3]] == [
        ["amp", "3", "91 ± 1", "0.91 ± 0.01"],
        ["fixed", "1", "50", "0.5"],
        ["triaccel", "0", "", ""],
    ]
    assert table.rows[3][-1] == "12495 ± 212"
    assert {len(row) for row in table.rows} == {len(table.header)} == {7}
    assert "view" not in table.note
    rows = [results("amp", 90.0, 91.0, one_view_accuracy=(89.0, 90.0)), results("triaccel", 90.0)]
    table = table_of(*rows)
    assert table.header[-1] == "by one view %"
    assert [row[-1] for row in table.rows] == ["89.5 ± 0.71", ""]
    assert "by one view: by the sample as it is" in table.note
    assert "only 2 of 3 runs were judged by several views: not comparable" in table.note
    del rows[0].by_seed[1]["one_view_accuracy"]  # type: ignore[attr-defined]  # what a run lacks has no mean
    table = table_of(*rows)
    assert [(row[2], row[-1]) for row in table.rows] == [("90.5 ± 0.71", ""), ("90", "")]
    assert "only 1 of 3 runs were judged by several views: not comparable" in table.note


def test_the_score_is_shown_by_every_reading_and_whether_they_agree() -> None:
    amp = results("amp", 90.0, 92.0, training_seconds=(10.0, 10.0), peak_gb=(2.0, 2.0), allocated_peak_gb=(0.5, 0.5))
    fast = results(
        "triaccel", 90.0, 92.0, training_seconds=(9.0, 9.0), peak_gb=(1.0, 1.0), allocated_peak_gb=(1.0, 1.0)
    )
    rows = {each.method: each for each in (amp, fast, results("fp32"))}
    table = readings_table("", rows, Goal())
    assert list(table.header) == ["method", *READINGS]
    cells = {row[0]: dict(zip(READINGS, row[1:], strict=True)) for row in table.rows}
    assert cells["amp"]["whole run s, process GB"] == "4.55 ± 0.071"  # 90 and 92 over 20
    assert cells["triaccel"]["whole run s, allocator GB"] == "10.11 ± 0.16"
    assert set(cells["fp32"].values()) == {""}
    assert table.note.endswith(
        "the readings disagree: triaccel by s/epoch, process GB, amp by s/epoch, allocator GB, "
        "triaccel by whole run s, process GB, amp by whole run s, allocator GB"
    )
    for figures in (figures for each in rows.values() for figures in each.by_seed.values()):
        figures["allocated_peak_gb"] = 0.0  # type: ignore[index]  # as on a CPU
    table = readings_table("", rows, Goal())
    assert list(table.header) == ["method", "s/epoch, process GB", "whole run s, process GB"]
    assert table.note.endswith("triaccel leads by every reading")
    assert "leads" not in readings_table("", {"amp": amp}, Goal()).note
    near = {**rows, "engine-amp": results("engine-amp", 89.9, 91.9, training_seconds=(9.0, 9.0), peak_gb=(1.0, 1.0))}
    note = readings_table("", near, Goal()).note
    assert note.endswith("triaccel leads by every reading; as good within the standard deviations: engine-amp")
    near["engine-amp"].by_seed[0]["training_seconds"] = 8.99  # type: ignore[index]
    near["engine-amp"].by_seed[1]["training_seconds"] = 8.99  # type: ignore[index]
    note = readings_table("", near, Goal()).note
    assert note.endswith("as good by every reading, within the standard deviations: triaccel, engine-amp")
    near["engine-amp"] = results("engine-amp", 89.9, training_seconds=(9.0,), peak_gb=(1.0,))
    assert readings_table("", near, Goal()).note.endswith("triaccel leads by every reading")  # of one seed alone
    unequal = {**rows, "fp32": results("fp32", 99.0, training_seconds=(0.1,))}
    assert "fp32" not in readings_table("", unequal, Goal()).note  # of one seed alone
    del fast.by_seed[0]["allocated_peak_gb"]  # type: ignore[attr-defined]
    table = readings_table("", {"amp": amp, "triaccel": fast}, Goal())
    assert table.note.endswith("triaccel leads by every reading")  # of those that all runs have


def test_the_command_of_a_comparison_is_that_of_a_finished_run(tmp_path: Path, log: Path) -> None:
    record = record_of(comparison(("fp32", "amp")), tmp_path, log)
    assert view_comparison(record).command.endswith("amp-seed0")
    runs = {name: run for name, run in record.runs.items() if name != "amp-seed0"}
    assert view_comparison(replace(record, runs=runs)).command.endswith("amp-seed1")  # fp32 is 1.75 points behind
    runs = {name: run for name, run in record.runs.items() if name.startswith("fp32")}
    assert view_comparison(replace(record, runs=runs)).command == ""  # nothing to compare with


def test_a_fast_method_that_learns_too_little_is_not_recommended(tmp_path: Path, log: Path) -> None:
    record = record_of(comparison(("amp", "triaccel"), num_seeds=1), tmp_path, log)
    for accuracy, best in ((79.1, "triaccel"), (78.9, "amp")):
        runs = {}
        for name, run in record.runs.items():
            is_fast = name.startswith("triaccel")
            figures = dict.fromkeys(RESULT_HEADINGS, 500.0 if is_fast else 10.0)
            end = End(status="finished", results=figures | {"accuracy": accuracy if is_fast else 80.0})
            runs[name] = replace(run, end=end)
        assert view_comparison(replace(record, runs=runs)).command.endswith(f"{best}-seed0")
    runs["amp-seed0"] = replace(runs["amp-seed0"], end=End(status="failed", cause="bug", message="no"))
    assert view_comparison(replace(record, runs=runs)).command == ""  # nothing to compare with
    alone = record_of(comparison(("fp32", "triaccel"), num_seeds=1), tmp_path, log)
    advice = "to train with triaccel, which has the best score, though AMP has no result to measure it by:"
    assert any(isinstance(part, str) and part.startswith(advice) for part in view_comparison(alone).parts)


def test_a_method_is_within_the_margin_by_the_seeds_that_amp_has_finished(tmp_path: Path, log: Path) -> None:
    record = record_of(comparison(("amp", "triaccel"), num_seeds=2), tmp_path, log)
    runs = {}
    for name, run in record.runs.items():
        assert run.end is not None
        accuracy = {"accuracy": 70.0 + 20.0 * run.spec.seed}  # a hard and an easy seed
        runs[name] = replace(run, end=replace(run.end, results={**run.end.results, **accuracy}))
    del runs["amp-seed0"]
    assert view_comparison(replace(record, runs=runs)).command.endswith("triaccel-seed0")


def test_differences_to_amp_are_paired_with_intervals_corrected_for_three_rows() -> None:
    amp = results("amp", 90.0, 91.0, 92.0)
    better = results("triaccel", 91.0, 93.0, 95.0, score=(1e6, 1e6, 1e6))  # differences 1, 2, 3
    steady = results("fp32", 91.0, 92.01, 92.99)  # differences 1, 1.01, 0.99
    table = to_amp(amp, steady, better, results("fixed", 90.0))
    assert {len(row) for row in table.rows} == {len(table.header)}
    rows = {(row[0], row[1]): list(row[2:]) for row in table.rows}
    assert rows["triaccel", "test accuracy %"] == ["+2", "+2.2", "-2.42 to +6.42"]  # 2 +- 7.648838 / sqrt(3)
    assert rows["fp32", "test accuracy %"] == ["+1", "+1.1", "+0.956 to +1.04"]
    assert rows["fixed", "test accuracy %"] == ["0", "0", ""]
    assert rows["triaccel", "score"][0] == "+999999"


@pytest.mark.parametrize(
    ("amp", "fp32", "cells"),
    [
        ((99.16, 99.16), (99.16 - 2e-14, 99.16), ["0", "0", ""]),  # but for rounding
        ((99.16, 99.16), (99.16, 99.159), ["-0.0005", "0", ""]),
        ((90.0, 91.0, 92.0), (91.0, 92.0, 93.0), ["+1", "+1.1", "+1 to +1"]),
        ((90.0,), (99.0,), ["+9", "+10.0", ""]),
    ],
)
def test_differences_that_are_nothing_or_of_few_seeds(
    amp: tuple[float, ...], fp32: tuple[float, ...], cells: list[str]
) -> None:
    table = to_amp(results("amp", *amp), results("fp32", *fp32))
    assert list(table.rows[0][2:]) == cells
    assert not to_amp(results("amp", *amp), results("fp32")).rows  # of an interrupted comparison


def test_only_seeds_that_both_have_are_compared() -> None:
    values, reference = {0: 5.0, 1: 6.0, 2: 9.0, 7: 1e9}, {0: 4.0, 1: 4.0, 2: 4.0, 3: -1e9}
    assert paired_differences(values, reference) == [1.0, 2.0, 5.0]


def test_what_is_zero_everywhere_is_not_compared() -> None:
    amp, fp32 = (results(method, 90.0, 91.0, allocated_peak_gb=(0.0, 0.0)) for method in ("amp", "fp32"))
    assert [row[1] for row in to_amp(amp, fp32).rows] == ["test accuracy %", "s/epoch", "process peak GB", "score"]


def test_table_2_differs_from_the_row_above() -> None:
    tables = {table.title: table for table in comparison_tables(record_of(comparison(("fp32",), ablation=True)))}
    assert "AMP is not among the methods" in tables["Table 1, test samples, read once by each run"].note
    assert "Table 1, differences to AMP" not in tables
    assert [row[0] for row in tables["Table 2, the ablation"].rows] == list(ABLATION.values())
    differences = tables["Table 2, differences to the row above"].rows
    assert [row[2] for row in differences if row[1] == "test accuracy %"] == ["+1.1"] * 4


def test_what_each_method_trained_with_is_shown() -> None:
    record = record_of(comparison((*METHODS, "amp-best"), num_fixed=1))
    *_, trained_with = comparison_tables(record)
    rows = {row[0]: list(row[1:]) for row in trained_with.rows}
    assert rows["fp32"] == ["fp32", "96", "0.1", "0.0005"]
    assert (rows["amp"][0], rows["amp-best"][0]) == ("autocast", "autocast, compiled")
    assert rows["best fixed"] == ["fp32", "64", "0.1", "0.0005"]
    assert rows["triaccel"] == ["per layer, from bf16", "32 to 160, from 96", "0.1", "0.0005"]
    assert trained_with.note.startswith("best fixed: the best score of 1 on validation samples")
    not_yet = comparison_tables(replace(record, fixed=None))
    assert trained_with.title not in [table.title for table in not_yet]


def test_a_comparison_is_shown_and_written_as_a_page(
    tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = comparison(ablation=True, num_fixed=1)
    spec = replace(spec, base=replace(spec.base, trials_per_gpu=2))
    record = record_of(spec, tmp_path, log)
    died = End(status="failed", cause="out_of_memory", message="not even one sample fits")
    runs = dict(record.runs)
    runs["amp-seed1"] = replace(runs["amp-seed1"], end=died)
    del runs["fp32-seed0"], runs["triaccel-seed2"]
    record = replace(record, trials=named(ended("amp"), ended("fixed-fp32-64")), runs=runs)
    view = view_comparison(record)
    show(view)
    said, page = capsys.readouterr().out, view.page.read_text()
    best = spec.table_1[-1]
    tables, command = comparison_tables(record), f"triaccel run --from {tmp_path}/{best}-seed0"
    assert [table.title[:7] for table in tables if "GPUs shared by 2 runs each" in table.note] == ["Table 1", "Table 2"]
    for shown in (said, page):
        assert all(table.title in shown for table in tables)
        advice = "to train with best fixed, which has the best score, within 1 point of the accuracy of AMP:"
        assert f"{advice}\n{command}" in shown
        assert "amp-seed1 failed (out_of_memory) after epoch 2: not even one sample fits" in shown
        assert "fp32-seed0 is missing: it was asked for and has not begun\ntriaccel-seed2 is missing" in shown
    assert page.count("data:image/png;base64") == 1
    assert f"triaccel compare --from {tmp_path}" in page
    assert (
        f"<td>method</td><td>{', '.join(map(label, spec.all_methods))}</td>" in page
    )  # not that of the shared settings


def test_a_comparison_that_has_just_begun_can_be_looked_at(tmp_path: Path) -> None:
    create_with_spec(tmp_path / "versus", COMPARISON, comparison(num_fixed=1))
    view = view_at(StoragePath.of(tmp_path / "versus"))
    assert view.command == ""
    assert "Table 1" in view.page.read_text()
    with pytest.raises(LogError, match="holds no comparison"):
        read_comparison(tmp_path)
