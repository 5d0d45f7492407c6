"""From the words of a command line to what is trained: options, names of what is repeated, files of settings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triaccel_ray.config import BatchConfig, ControlConfig, CurvatureConfig, ExecutionConfig, PrecisionConfig
from triaccel_ray.records.plan import Precision
from triaccel_ray.service.cli.arguments import Run, Search
from triaccel_ray.service.cli.options import RUN_SETTINGS, command_for, settings_of_run, settings_text
from triaccel_ray.service.cli.parsing import check, command_of, parse
from triaccel_ray.service.cli.spec_builder import replayed_control, spec_of, with_options
from triaccel_ray.service.compare.spec import ComparisonSpec
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import COMPARISON, SEARCH, SPEC, write_value
from triaccel_ray.trainables.digits import Digits
from triaccel_ray.trainables.task import Purpose
from triaccel_ray.trainables.text import TextGpt

BASE = RunSpec(task="digits", recipe=Digits.recipe, control=Digits.control, keep="last")
UNUSUAL = replace(
    BASE,
    seed=3,
    recipe=replace(BASE.recipe, epochs=5, lr=0.03, nesterov=True, amp="bf16", label_smoothing=0.05),
    control=ControlConfig(
        every_steps=6,
        revert_slowdowns=False,
        clip_norm=0.5,
        precision=PrecisionConfig(
            tau_low=1e-6, tau_high=1e-6 * (1 + 1e-6), initial_layers={"conv1": Precision.FP32, "a=b": Precision.FP16}
        ),
        curvature=CurvatureConfig(every_steps=50, num_samples=16, tau_curv=math.inf, alpha=1 / 3, method="ggn"),
        batch=BatchConfig(start=64, minimum=32, maximum=512, lr_rule="none", accumulate=4),
        execution=ExecutionConfig(data_on="host", fuse=False),
    ),
    memory_budget_bytes=3 * 2**29 + 1,
    device="cpu",
    lean_memory=False,
)

TEXT = RunSpec(task="text-gpt", recipe=TextGpt.recipe, control=TextGpt.control, goal=TextGpt().goal, keep="last")


def typed(*words: str) -> Any:
    """The spec that a command line means."""
    command: Any = parse(words)
    check(command)
    return spec_of(command)


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def stored(value: Any, name: str, file: str = SPEC) -> Path:
    """A folder of the default storage that holds the spec."""
    folder = Path("triaccel-runs", name).absolute()
    folder.mkdir(parents=True)
    write_value(folder / file, value)
    return folder


def test_options_become_a_spec(tmp_path: Path) -> None:
    words = "run digits --epochs 2 --lr 0.2 --memory-headroom 64MiB --device cpu --batch-size 64 --seed 5"
    words += " --method dynamic-both --tau-low 1e-9 --rho-high 0.8 --rho-low 0.5 --t-ctrl 9 --lr-rule linear --final"
    spec = typed(*words.split())
    assert (spec.method, spec.seed, spec.purpose, spec.device) == ("dynamic-both", 5, Purpose.FINAL, "cpu")
    assert (spec.recipe.epochs, spec.recipe.lr, spec.recipe.momentum) == (2, 0.2, Digits.recipe.momentum)
    assert (spec.memory_budget_bytes, spec.memory_headroom_bytes) == (None, 64 * 2**20)
    assert spec.control.precision == replace(Digits.control.precision, tau_low=1e-9)
    assert (spec.control.batch.rho_low, spec.control.batch.rho_high, spec.control.every_steps) == (0.5, 0.8, 9)
    assert (spec.data_dir, spec.keep) == (None, "last")
    assert typed("run", "text-gpt", "--data-dir", "files").data_dir == str(tmp_path / "files")


def test_every_field_of_the_configurations_is_an_option() -> None:
    fields = {each.path[1:] for each in RUN_SETTINGS.values() if each.path[0] == "control"}
    assert {("every_steps",), ("precision", "beta"), ("loss_scale", "initial"), ("execution", "compile")} < fields
    assert all(each.doc for each in RUN_SETTINGS.values())
    for each in RUN_SETTINGS.values():
        value: Any = UNUSUAL
        for name in each.path:
            value = getattr(value, name)
        if each.path[0] in ("control", "recipe") and value is not None:
            assert each.read(settings_of_run(UNUSUAL)[each.name]) == value


def test_a_run_is_repeated_by_its_name() -> None:
    folder = stored(UNUSUAL, "hunt/trials/trial-007")
    assert command_for("run --from", folder) == "triaccel run --from hunt/trials/trial-007"
    assert typed("run", "--from", "hunt/trials/trial-007") == typed("run", "--from", "hunt/trial-007") == UNUSUAL
    assert typed("run", "--from", str(folder)) == UNUSUAL
    assert command_for("search --from", Path("/my hunt")) == "triaccel search --from '/my hunt'"  # lies elsewhere
    other = typed("run", "--from", "hunt/trials/trial-007", "--seed", "4", "--memory-headroom", "64MiB", "--fuse", "on")
    fused = replace(UNUSUAL.control, execution=ExecutionConfig(data_on="host"))
    expected = replace(UNUSUAL, seed=4, memory_budget_bytes=None, memory_headroom_bytes=2**26, control=fused)
    assert other == expected


@pytest.mark.parametrize(
    "spec",
    [UNUSUAL, replace(TEXT, purpose=Purpose.FINAL, data_dir="/data \N{PILE OF POO} \x7f", memory_headroom_bytes=2**26)],
    ids=["unusual", "final"],
)
def test_a_file_of_settings_is_the_run_again(spec: RunSpec) -> None:
    Path("mine.toml").write_text(settings_text(spec))
    assert typed("run", "--config", "mine.toml") == spec
    other = typed("run", "--config", "mine.toml", "--lr", "0.5", "--tau-curv", "3")
    assert (other.control.curvature.tau_curv, other.recipe) == (3.0, replace(spec.recipe, lr=0.5))


def test_a_file_may_hold_the_options_of_a_search_and_what_is_typed_overrides_them() -> None:
    text = "trials = 3\nnoise-bound = true\nname = 'hunt'\nalso = ['alpha']\ntask = 'digits'\nexperiment = 'other'"
    Path("hunt.toml").write_text(text)
    spec = typed("search", "--config", "hunt.toml")
    assert (spec.num_trials, spec.optional, spec.base.control.batch.bound_by_noise_scale) == (3, ("alpha",), True)
    words = "search --config hunt.toml --also t_ctrl --trials 16 --experiment triaccel-searches"
    command: Any = parse(words.split())  # the last one is the default
    assert (command.name, command.experiment, command.task) == ("hunt", "triaccel-searches", "digits")
    assert (spec_of(command).num_trials, spec_of(command).optional) == (16, ("t_ctrl",))
    given: dict[str, Any] = {"trials": 16, "also": ["t_ctrl"], "experiment": "triaccel-searches"}
    assert command_of(Search, None, {"config": "hunt.toml", **given}) == command


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = 'many'", "epochs = 'many': must be an integer"),
        ("epoch = 3", "option = 'epoch': no such option of this command in bad.toml"),
        (None, r"config = 'bad\.toml': cannot be read: No such file"),
        ("epochs = ", "config = 'bad.toml': is no TOML file"),
        (100_000 * "[", "config = 'bad.toml': is no TOML file"),
        ("initial-layers = ['conv1']", r"initial_layers = \('conv1',\): must be LAYER=PRECISION, each layer once"),
        ("task = 5", "task = 5: must be a str"),
        ("data-dir = '~nobody at all/x'", "names a user whom this machine does not know"),
        ("config = 'other.toml'", "option = 'config': no such option"),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(text: str | None, message: str) -> None:
    if text is not None:
        Path("bad.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        typed("run", "digits", "--config", "bad.toml")


def test_a_repeated_run_leaves_its_weights() -> None:
    for keep, kept in ((None, "last"), ("best", "best")):
        stored(replace(BASE, keep=keep, trials_per_gpu=4), f"keeps-{kept}")
        again = typed("run", "--from", f"keeps-{kept}")
        assert (again.keep, again.trials_per_gpu) == (kept, 1)
    assert typed("run", "--from", "keeps-best", "--final").keep == "last"


def test_a_search_and_a_comparison_are_repeated_by_their_names() -> None:
    base = replace(UNUSUAL, keep=None, trials_per_gpu=2, device="auto")
    asked = SearchSpec(base=base, optional=("alpha",), margin=0.5, seed=3)
    stored(asked, "hunt", SEARCH)
    assert typed("search", "--from", "hunt") == asked
    words = "search --from hunt --trials 3 --also t_ctrl --seed 5 --trials-per-gpu 1"
    again = typed(*words.split())
    base = replace(asked.base, seed=5, trials_per_gpu=1)
    assert again == replace(asked, base=base, num_trials=3, optional=("t_ctrl",), seed=5)
    compared = ComparisonSpec(base=replace(UNUSUAL, keep=None, purpose=Purpose.FINAL), methods=("amp",), num_fixed=3)
    stored(compared, "table", COMPARISON)
    assert typed("compare", "--from", "table", "--target", "94").base == replace(compared.base, target=94.0)
    assert typed("compare", "--from", "table") == compared
    other = typed("compare", "--from", "table", "--ablation", "--seeds", "1")
    assert other == replace(compared, ablation=True, num_seeds=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run", r"TASK, --from = \(None, None\): give either: `triaccel run TASK`, or `triaccel run --from NAME`"),
        ("run --from hunt", "name = 'hunt': holds many runs; name one of them, such as hunt/trials/t"),
        ("search --from first", "holds no search"),
        ("compare --from first", "holds no comparison"),
    ],
)
def test_there_is_one_thing_to_begin_with(words: str, message: str) -> None:
    stored(BASE, "first")
    stored(SearchSpec(base=BASE), "hunt", SEARCH)
    (stored(BASE, "hunt/trials/t") / "events.jsonl").touch()
    with pytest.raises(ValueError, match=message):
        typed(*words.split())


def test_an_option_takes_what_belongs_to_it_from_a_repeated_run() -> None:
    stored(replace(BASE, memory_headroom_bytes=2**26), "first")
    for size in (256, 100):
        spec = typed("run", "--from", "first", "--batch-size", str(size), "--memory-budget", "2GiB")
        assert spec.control.batch.start == size
        assert (spec.memory_budget_bytes, spec.memory_headroom_bytes) == (2**31, None)


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False), ("auto", "auto")])
def test_a_switch_may_have_a_word_beside_on_and_off(word: str, value: Any) -> None:
    spec = typed("run", "digits", "--step-in-backward", word)
    assert spec.control.step_in_backward == value
    assert spec_of(command_of(Run, "digits", {"step_in_backward": value})) == spec
    Path("mine.toml").write_text(settings_text(spec))
    assert typed("run", "--config", "mine.toml") == spec
    with pytest.raises(ValueError, match="step_in_backward = 'maybe': must be one of on, off, auto"):
        command_of(Run, "digits", {"step_in_backward": "maybe"})


def test_a_replay_has_other_thresholds() -> None:
    for word, value in (("on", True), ("off", False)):
        command: Any = parse(["replay", "x", "--noise-bound", word])
        batch = replace(Digits.control.batch, bound_by_noise_scale=value)
        assert replayed_control(command, Digits.control) == replace(Digits.control, batch=batch)


def test_a_tasks_own_bound_by_the_noise_scale_goes_with_the_method_that_measures_it() -> None:
    stored(replace(BASE, control=replace(BASE.control, batch=BatchConfig(bound_by_noise_scale=True))), "bound")
    words = ("run", "--from", "bound", "--curvature")
    assert typed(*words, "fisher").control.batch.bound_by_noise_scale
    for method in ("ggn", "hessian"):
        assert not typed(*words, method).control.batch.bound_by_noise_scale
        with pytest.raises(ValueError, match="need the per-sample gradients that curvature method 'fisher' measures"):
            typed(*words, method, "--noise-bound", "on")


@given(batch_size=st.integers(1, 2000))
def test_any_starting_batch_size_has_a_ladder(batch_size: int) -> None:
    batch = with_options(BASE, {("control", "batch", "start"): batch_size}).control.batch
    assert 1 <= batch.minimum <= batch.start == batch_size <= batch.maximum
    assert (batch.start - batch.minimum) % batch.granularity == 0


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", (32, 96, 256)),
        ("--batch-size 128", (32, 128, 256)),
        ("--batch-size 100", (36, 100, 256)),
        ("--batch-size 16", (16, 16, 256)),
        ("--batch-size 128 --batch-min 64 --batch-max 512", (64, 128, 512)),
    ],
)
def test_batch_sizes_are_timed_from_the_smallest_of_the_task_whatever_the_first(
    words: str, sizes: tuple[int, int, int]
) -> None:
    spec = typed("tune-batch", "digits", *words.split())
    batch = spec.control.batch
    assert (batch.minimum, batch.start, batch.maximum) == sizes
    assert (spec.method, spec.keep, spec.purpose) == ("tune-batch", None, Purpose.SEARCH)
