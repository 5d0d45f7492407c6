from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from PIL import Image

from tests.service.build import SimulatedRun
from tests.service.records import FINAL_SPEC, ended, named, run_of
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.events import End, LogError
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.compare.comparison import (
    CHOICES,
    COMPARISON,
    FIGURES,
    Choices,
    Comparison,
    MethodResults,
    Tuned,
    final_runs,
    read_comparison,
    summary_metrics,
)
from triaccel_ray.service.compare.fixed import FixedSetting
from triaccel_ray.service.compare.spec import ABLATION, ComparisonSpec
from triaccel_ray.service.compare.tuning import RecipeSample
from triaccel_ray.service.report.comparison_figures import metric_against_cost, save_comparison_figures, score_bars
from triaccel_ray.service.report.comparison_tables import (
    against_reference_grid,
    row_above_grid,
    settings_grid,
    to_standard_grid,
    trials_grid,
    values_grid,
)
from triaccel_ray.service.report.comparison_view import comparison_tables, view_comparison
from triaccel_ray.service.report.view import show
from triaccel_ray.service.runs.record import RunRecord
from triaccel_ray.service.storage.layout import begin
from triaccel_ray.trainables.task import Purpose

METHODS = ("fp32", "amp", "engine-amp", "triaccel")
CHOSEN = Choices(
    fixed=FixedSetting(precision=Precision.FP32, batch_size=64),
    tuned={
        "amp": Tuned(trial="amp-recipe1", sample=RecipeSample(lr=2.0, weight_decay=0.5)),
        "fixed": Tuned(trial="", sample=RecipeSample()),
    },
)


def comparison(methods: tuple[str, ...] = METHODS, **settings: Any) -> ComparisonSpec:
    return ComparisonSpec(base=FINAL_SPEC, methods=methods, **settings)


def results(method: str, *accuracies: float, **others: tuple[float, ...]) -> MethodResults:
    """Results of seeds 0, 1, ...: these accuracies; other figures as given, else a hundredth of the accuracy."""
    figures = {
        "accuracy": accuracies,
        **{name: tuple(a / 100 for a in accuracies) for name in FIGURES},
    }
    figures |= others
    by_seed = {seed: {name: values[seed] for name, values in figures.items()} for seed in range(len(accuracies))}
    return MethodResults(method=method, by_seed=by_seed)


def record_of(
    spec: ComparisonSpec, folder: Path = Path("versus"), trials: Mapping[str, RunRecord] | None = None
) -> Comparison:
    """A comparison with all final runs finished; method k of seed s ends k + s * (1 + k / 10) above 80 %."""
    runs = {}
    for name, run in final_runs(spec, CHOSEN).items():
        place = spec.all_methods.index(run.method)
        value = 80.0 + place + run.seed * (1.0 + place / 10)
        end = End(status="finished", results=dict.fromkeys(FIGURES, value / 10) | {"accuracy": value})
        runs[name] = replace(run_of(name), spec=run, end=end)
    return Comparison(folder=folder, spec=spec, choices=CHOSEN, trials=trials or {}, runs=runs)


def test_every_method_has_every_seed_and_the_test_set() -> None:
    runs = final_runs(comparison(("amp", "triaccel"), num_seeds=2, num_fixed=1), CHOSEN)
    assert set(runs) == {f"{method}-seed{seed}" for method in ("amp", "triaccel", "fixed") for seed in (0, 1)}
    assert {run.purpose for run in runs.values()} == {Purpose.FINAL}
    assert all(name == f"{run.method}-seed{run.seed}" for name, run in runs.items())


def test_what_was_chosen_reaches_the_final_runs() -> None:
    runs = final_runs(comparison(num_seeds=1, num_fixed=1, num_tuned=2), CHOSEN)
    assert runs["amp-seed0"].recipe == replace(
        FINAL_SPEC.recipe, lr=2.0 * FINAL_SPEC.recipe.lr, weight_decay=0.5 * FINAL_SPEC.recipe.weight_decay
    )
    fixed = runs["fixed-seed0"].method_control
    assert (fixed.batch.start, fixed.precision.initial) == (64, Precision.FP32)
    assert runs["fp32-seed0"] == replace(FINAL_SPEC, method="fp32")


@pytest.mark.parametrize(
    ("settings", "table_1", "table_2"),
    [
        ({}, METHODS, ()),
        ({"num_fixed": 3}, (*METHODS, "fixed"), ()),
        ({"ablation": True}, METHODS, tuple(ABLATION)),
        ({"methods": ("amp",), "ablation": True}, ("amp",), tuple(ABLATION)),
    ],
)
def test_the_two_tables(settings: dict[str, Any], table_1: tuple[str, ...], table_2: tuple[str, ...]) -> None:
    spec = comparison(**settings)
    assert (spec.table_1, spec.table_2) == (table_1, table_2)
    assert set(spec.all_methods) == {*table_1, *table_2}
    assert len(set(spec.all_methods)) == len(spec.all_methods)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_seeds": 0}, "num_seeds (seeds) = 0: must be an integer in [1, 1000]"),
        ({"num_fixed": -1}, "num_fixed (fixed) = -1: must be an integer >= 0"),
        ({"num_tuned": -1}, "num_tuned (tune_baselines) = -1: must be an integer >= 0"),
        ({"methods": ()}, "methods = '': must be one or more"),
        ({"methods": ("amp", "amp")}, "methods = 'amp,amp': must be one or more, each once"),
        ({"methods": ("sgd",)}, "method = 'sgd': must be one of fp32, amp"),
        ({"methods": ("amp", "fixed")}, "methods = 'amp,fixed': fixed needs settings to choose from"),
    ],
)
def test_bad_comparisons_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        comparison(**settings)


def test_a_comparison_survives_its_file(tmp_path: Path) -> None:
    spec, folder = comparison(ablation=True, num_fixed=2, num_tuned=3), tmp_path / "versus"
    begin(folder, COMPARISON, spec)
    read = read_comparison(folder)
    assert (read.spec, read.choices, read.runs, read.trials) == (spec, None, {}, {})
    (folder / CHOICES).write_text(json.dumps(encode(CHOSEN), allow_nan=False))
    assert read_comparison(folder).choices == CHOSEN
    assert set(read_comparison(folder).unfinished()) == set(final_runs(spec, CHOSEN))
    (folder / CHOICES).write_text("{")
    with pytest.raises(LogError, match=r"choices\.json cannot be read"):
        read_comparison(folder)
    with pytest.raises(ValueError, match="exists already"):
        begin(folder, COMPARISON, spec)


def test_comparisons_of_earlier_versions_are_read() -> None:
    old = encode(comparison()).items()
    kept = {name: value for name, value in old if name in ("base", "methods", "num_seeds")}
    assert decode(ComparisonSpec, kept) == comparison()


def test_what_has_finished_is_not_run_again() -> None:
    record = record_of(comparison(num_seeds=2))
    assert record.unfinished() == {}
    runs = dict(record.runs) | {"amp-seed1": replace(record.runs["amp-seed1"], end=None)}
    del runs["fp32-seed0"]
    cut = replace(record, runs=runs)
    assert set(cut.unfinished()) == {"amp-seed1", "fp32-seed0"}
    assert cut.results("amp").num_runs == 1


def test_mean_and_deviation() -> None:
    three = results("amp", 90.0, 91.0, 92.0)
    assert (three.mean("accuracy"), three.deviation("accuracy"), three.num_runs) == (91.0, 1.0, 3)
    assert math.isnan(results("amp", 90.0).deviation("accuracy"))
    assert math.isnan(results("amp").mean("accuracy"))


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


def test_table_1_has_mean_and_deviation() -> None:
    grid = values_grid([results("amp", 90.0, 91.0, 92.0), results("fixed", 50.0), results("triaccel")])
    assert [list(row[:3]) for row in grid.rows] == [
        ["amp", "3", "91 ± 1"],
        ["best fixed", "1", "50"],
        ["triaccel", "0", ""],
    ]
    assert grid.rows[0][3] == "0.91 ± 0.01"
    assert {len(row) for row in grid.rows} == {len(grid.header)} == {7}


def test_table_1_tells_what_one_view_of_a_sample_yields_where_several_are_judged() -> None:
    rows = [results("amp", 90.0, 91.0, one_view_accuracy=(89.0, 90.0)), results("triaccel")]
    grid = values_grid(rows)
    assert grid.header[-1] == "by one view %"
    assert [row[-1] for row in grid.rows] == ["89.5 ± 0.71", ""]
    assert "by one view: by the sample as it is" in grid.note
    mixed = values_grid([*rows, results("fp32", 90.0)])
    assert mixed.rows[2][-1] == ""
    assert "only 2 of 3 runs were judged by several views: not comparable" in mixed.note
    assert "view" not in values_grid([results("fp32", 90.0)]).note


def test_differences_to_amp_are_paired_tested_and_corrected() -> None:
    amp = results("amp", 90.0, 91.0, 92.0)
    better = results("triaccel", 91.0, 93.0, 95.0)  # differences 1, 2, 3
    steady = results("fp32", 91.0, 92.01, 92.99)  # differences 1, 1.01, 0.99
    grid = against_reference_grid([steady, amp, better])
    assert {len(row) for row in grid.rows} == {len(grid.header)}
    assert [row[0] for row in grid.rows if row[0]] == ["fp32", "triaccel"]
    rows = {(index // (1 + len(FIGURES)), row[1]): list(row[2:]) for index, row in enumerate(grid.rows)}
    assert rows[1, "test accuracy %"] == ["+2", "+2.2", "-0.484 to +4.48", "0.074", "0.074"]
    assert rows[0, "test accuracy %"] == ["+1", "+1.1", "+0.975 to +1.02", "<0.001", "<0.001"]
    assert "With so few seeds only large differences can be significant: with 3 seeds" in grid.note
    assert "above 2.5 standard deviations" in grid.note


@pytest.mark.parametrize("seeds", [1, 2])
def test_too_few_seeds_are_said_to_be(seeds: int) -> None:
    grid = against_reference_grid([results("amp", *[90.0] * seeds), results("fp32", *[91.0] * seeds)])
    assert list(grid.header) == ["method", "figure", "difference", "%"]
    assert list(grid.rows[0]) == ["fp32", "test accuracy %", "+1", "+1.1"]
    assert grid.note.count("too few seeds") == 1
    assert f"{seeds}, where 3 are needed" in grid.note


def test_what_is_zero_but_for_rounding_is_printed_as_zero() -> None:
    rows = [results("amp", 99.16, 98.89 + 0.27), results("fp32", 99.16 - 2e-14, 98.89 + 0.27)]
    assert list(against_reference_grid(rows).rows[0][2:]) == ["0", "0"]
    assert list(against_reference_grid([rows[0], results("fp32", 99.16, 99.159)]).rows[0][2:]) == ["-0.0005", "0"]


def test_differences_that_cannot_be_tested() -> None:
    same = against_reference_grid([results("amp", 90.0, 91.0, 92.0), results("fp32", 91.0, 92.0, 93.0)])
    assert list(same.rows[0][2:]) == ["+1", "+1.1", "+1 to +1", "no spread", "no spread"]
    assert list(against_reference_grid([results("amp", 90.0), results("fp32")]).rows[0][2:]) == [""] * 2
    nothing = against_reference_grid([results("fp32", 91.0, 92.0, 93.0)])
    assert not nothing.rows
    assert "AMP is not among the methods" in nothing.note


def test_table_2_differs_from_the_row_above_and_from_standard() -> None:
    memory = {"fp32": (0.4, 0.4, 0.4), "dynamic-batch": (0.3, 0.3, 0.3), "dynamic-precision": (0.2, 0.21, 0.19)}
    rows = [results(method, 90.0, 91.0, 92.0, peak_gb=values) for method, values in memory.items()]
    above, standard = row_above_grid(rows), to_standard_grid(rows)
    for grid in (above, standard):
        assert {len(row) for row in grid.rows} == {len(grid.header)}
        assert [row[0] for row in grid.rows if row[0]] == ["+ dynamic batch", "+ dynamic precision"]
    cells = [[list(row[2:]) for row in grid.rows if row[1] == "process peak GB"] for grid in (above, standard)]
    assert cells[0][0][:3] == cells[1][0][:3] == ["-0.1", "-25.0", "-0.1 to -0.1"]  # the row above is standard
    assert cells[0][1][:3] == ["-0.1", "-33.3", "-0.125 to -0.0752"]
    assert cells[1][1][:2] == ["-0.2", "-50.0"]


def test_what_is_zero_everywhere_is_not_compared() -> None:
    rows = [results(method, 90.0, 91.0, allocated_peak_gb=(0.0, 0.0)) for method in ("amp", "fp32")]
    assert [row[1] for row in against_reference_grid(rows).rows] == [
        *("test accuracy %", "s/epoch", "process peak GB", "score")
    ]


def test_large_numbers_have_no_exponents() -> None:
    rows = [results("amp", 90.0, 91.0, score=(12345.0, 12645.0)), results("fp32", 91.0, 90.0, score=(1e6, 1e6))]
    assert values_grid(rows).rows[0][-1] == "12495 ± 212"
    assert against_reference_grid(rows).rows[-1][2] == "+987505"


def test_what_was_chosen_is_shown() -> None:
    trials = named(ended("amp-recipe"), ended("amp-recipe1", accuracy=92.0), ended("fixed-fp32-64", accuracy=70.0))
    record = record_of(comparison(num_fixed=1, num_tuned=2), trials=trials)
    rows = {row[0]: list(row[1:]) for row in settings_grid(record).rows}
    assert rows["amp"] == ["autocast", "96", "0.2", "0.00025", "amp-recipe1"]
    assert rows["best fixed"] == ["fp32", "64", "0.1", "0.0005", "recipe: no trial ran to its end"]
    assert rows["triaccel"] == ["per layer, from bf16", "32 to 160, from 96", "0.1", "0.0005", "recipe"]
    grid = trials_grid(record)
    assert [row[0] for row in grid.rows] == ["amp-recipe", "amp-recipe1 *", "fixed-fp32-64 *"]
    assert "at least 89.00 %" in grid.note
    assert "none of them reached that" in grid.note
    assert {len(row) for row in grid.rows} == {len(grid.header)}


def test_pictures_show_every_method_with_its_spread(tmp_path: Path) -> None:
    shown = [results("amp", 90.0, 91.0), results("fixed", 92.0, 94.0), results("triaccel", 95.0)]
    for figure in (metric_against_cost(shown, about="digits"), score_bars(shown, about="digits")):
        texts = {found.get_text() for found in figure.findobj(Text)}
        assert {"amp", "best fixed", "triaccel"} <= texts
    paths = save_comparison_figures([*shown, results("fp32")], tmp_path / "figures", about="digits")
    assert [path.name for path in paths] == ["accuracy_against_cost.png", "score.png"]
    for path in paths:
        with Image.open(path) as picture:
            assert picture.size[0] > 900
    assert save_comparison_figures([results("fp32")], tmp_path / "none") == []


def test_a_comparison_is_written_as_markdown_and_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = named(ended("amp-recipe"), ended("fixed-fp32-64"))
    record = record_of(comparison(ablation=True, num_fixed=1), tmp_path, trials)
    log = SimulatedRun(tmp_path / "a run").complete(epochs=1)
    died = End(status="failed", cause="out_of_memory", message="not even one sample fits")
    runs = {name: replace(run, folder=log) for name, run in record.runs.items()}
    runs["amp-seed1"] = replace(runs["amp-seed1"], end=died)
    del runs["fp32-seed0"], runs["triaccel-seed2"]
    record = replace(record, runs=runs)
    show(view_comparison(record))
    said, markdown = capsys.readouterr().out, (tmp_path / "comparison.md").read_text()
    page = (tmp_path / "report.html").read_text()
    for title in comparison_tables(record):
        assert title in said
        assert title in markdown
        assert title in page
    command = f"triaccel run --from {tmp_path}/fixed-seed0"
    assert command in said
    assert command in page
    assert page.count("data:image/png;base64") == 3
    assert "on the way there is the training loss alone" in page
    assert "amp-seed1 failed (out_of_memory) after epoch 2: not even one sample fits" in said
    assert "<td>not even one sample fits</td>" in page
    assert f"triaccel compare --from {tmp_path}" in page
    for name in ("fp32-seed0", "triaccel-seed2"):
        assert f"{name} is missing: it was asked for and has not begun" in said
        assert f"<td>{name}</td>" in page


def test_a_comparison_on_shared_gpus_says_so() -> None:
    spec = comparison(ablation=True, num_fixed=1)
    shared = replace(spec, base=replace(spec.base, trials_per_gpu=2))
    tables = comparison_tables(record_of(shared, trials=named(ended("amp-recipe"), ended("fixed-fp32-64"))))
    marked = [title for title, grid in tables.items() if "GPUs shared by 2 runs each" in grid.note]
    assert marked == [
        "Table 1, test samples, read once by each run",
        "Table 2, the ablation",
        "What was chosen on validation samples",
    ]


def test_a_comparison_that_has_just_begun_can_be_looked_at(tmp_path: Path) -> None:
    begin(tmp_path / "versus", COMPARISON, comparison(num_fixed=1))
    view_comparison(read_comparison(tmp_path / "versus"))
    assert "Table 1" in (tmp_path / "versus" / "comparison.md").read_text()
