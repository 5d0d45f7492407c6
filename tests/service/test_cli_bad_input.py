"""What a user can get wrong before any work begins: one message, exit status 2, and nothing touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.own_task import write_module
from tests.service.records import RUN_SPEC
from triaccel_ray.records.codec import encode
from triaccel_ray.service.cli import execute as commands
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.storage.layout import SPEC
from triaccel_ray.service.tracking.tracking import Tracker

MESSAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    # tasks
    ("run nothing", ("task = 'nothing'", "Bundled are digits", "package.module:Class")),
    ("run digit", ("did you mean digits",)),
    ("search no_such_module:Mine", ("task = 'no_such_module:Mine'", "there is no module no_such_module")),
    ("run {module}:Mine", ("has no Mine", "Blobs")),
    ("run {module}.py:Blobs", ("must be package.module:Class", "not its file")),
    # thresholds
    (
        "run digits --tau-low 1 --tau-high 0.1",
        ("tau_low, tau_high = (1.0, 0.1)", "exchange them", "--method engine-amp"),
    ),
    (
        "run digits --rho-low 0.9 --rho-high 0.8",
        ("rho_low, rho_high = (0.9, 0.8)", "--method dynamic-precision"),
    ),
    ("run digits --tau-low nan", ("tau_low = nan: must be a finite number >= 0",)),
    ("run digits --rho-high inf", ("rho_high = inf: must lie in",)),
    ("run digits --t-ctrl 0", ("every_steps (t_ctrl) = 0: must be",)),
    *(
        (
            f"{command} digits {option} --curvature hessian",
            (f"lr_rule, bound_by_noise_scale (noise_bound) = {values}", "curvature method 'fisher'"),
        )
        for command, option, values in (
            ("search", "--noise-bound on", "('none', True)"),
            ("compare", "--lr-rule adascale", "('adascale', False)"),
        )
    ),
    ("replay run1 --rho-low 2", ("rho_low = 2.0: must lie in",)),
    ("replay run1 --t-curv 100", ("--t-curv",)),
    ("search digits --tau-low 1e-6", ("--tau-low",)),
    ("replay run1 --reasons -1", ("reasons = -1: must be",)),
    # training
    ("run digits --epochs 0", ("epochs = 0: must be",)),
    ("run digits --lr nan", ("lr = nan: must lie in (0, 1e6]",)),
    ("run digits --norm-bias-lr-factor 0", ("norm_bias_lr_factor = 0.0: must lie in (0, 1e6]",)),
    *(
        (f"run digits --{name.replace('_', '-')} 1e9", (f"{name} = 1000000000.0: must lie in {range_}",))
        for name, range_ in (("lr", "(0, 1e6]"), ("weight_decay", "[0, 1e6]"), ("norm_bias_lr_factor", "(0, 1e6]"))
    ),
    ("run digits --amp fp8", ("--amp", "fp16", "bf16")),
    ("run digits --batch-size 0", ("start (batch_size) = 0: must be",)),
    ("run digits --seed -1", ("seed = -1: must",)),
    ("run digits --keep first", ("--keep", "last", "best")),
    ("run digits --keep best --final", ("keep = 'best': a final run has", "leave out --final, or --keep best")),
    *(
        (f"run digits --register {name}", (f"register = {shown}: must name a model", "without '/' and ':'"))
        for name, shown in (("''", "''"), ("a/b", "'a/b'"), ("models:mine", "'models:mine'"))
    ),
    ("run digits --memory-budget much", ("amount of memory = 'much'", "such as 2GiB")),
    ("run digits --memory-budget 2", ("amount of memory = '2'", "with a unit, such as 2GiB")),
    *(
        (f"{command} digits --memory-budget 64MiB --device cpu", ("memory budget = 64 MiB", "--memory-headroom 500MiB"))
        for command in ("run", "search", "compare")
    ),
    ("run digits --memory-budget 9999GiB --device cpu", ("memory budget = ", "at most the")),
    ("run digits --memory-budget 0GiB", ("amount of memory = '0GiB'", "positive")),
    ("run digits --memory-budget -1GiB", ("-1GiB",)),
    ("run digits --memory-budget 1GiB --memory-headroom 1GiB", ("give a budget or a headroom, not both",)),
    # searches and comparisons
    ("search digits --trials 0", ("num_trials (trials) = 0: must be",)),
    ("search digits --trials 100001", ("num_trials (trials) = 100001: must be an integer in [1, 100000]",)),
    ("compare digits --seeds 1001", ("num_seeds (seeds) = 1001: must be an integer in [1, 1000]",)),
    ("run digits --epochs 1000001", ("epochs = 1000001: must be an integer in [1, 1000000]",)),
    ("run digits --warmup-epochs inf", ("warmup_epochs = inf: must lie in [0, 1e6]",)),
    *(
        (f"{command} digits --trials-per-gpu {count}", (f"trials_per_gpu = {count}: must be an integer in [1, 16]",))
        for command in ("search", "compare")
        for count in (0, -1, 17)
    ),
    ("search digits --trials-per-gpu 2 --device cpu", ("trials-per-gpu = 2: a run on the CPU has no GPU to share",)),
    ("search digits --also alpha --alpha 0.1", ("--alpha = 0.1: a search finds this one itself",)),
    ("search digits --also batch_steps --step-up 64", ("--step-up = 64", "a search finds this one itself")),
    ("search digits --also t_ctrl --t-ctrl 5", ("--t-ctrl = 5", "a search finds this one itself")),
    ("search digits --margin nan", ("margin = nan: must lie in [0, 100]",)),
    ("compare digits --seeds 0", ("num_seeds (seeds) = 0: must be",)),
    ("compare digits --methods fp32,sgd", ("method = 'sgd': must be one of fp32, amp",)),
    ("compare digits --methods fp32,probe", ("method = 'probe': must be one of fp32, amp",)),
    ("compare digits --methods ,", ("methods = ''", "one or more")),
    ("compare digits --methods amp,amp", ("methods = 'amp,amp'", "each once")),
    ("compare digits --methods amp,fixed", ("methods = 'amp,fixed'", "give their number with --fixed")),
    ("compare digits --fixed -1", ("num_fixed (fixed) = -1: must be an integer >= 0",)),
    ("compare digits --tune-baselines -2", ("num_tuned (tune_baselines) = -2: must be an integer >= 0",)),
    *(
        (f"{command} digits --experiment ''", ("experiment = ''", "must name an MLflow experiment"))
        for command in ("run", "search", "compare")
    ),
    *(
        (f"{command} --tracking-uri ''", ("tracking uri = ''", "http://HOST:PORT", "leave it out"))
        for command in ("run digits", "search digits", "compare digits", "resume run1", "ui")
    ),
    *(
        (f"{command} --storage-path ''", ("storage path = ''", "must name a folder", "leave it out"))
        for command in ("run digits", "search digits", "report run1", "ui", "doctor")
    ),
    *(
        (f"{command} --storage-path nfs://host/folder", ("storage path = 'nfs://host/folder'", "s3"))
        for command in ("run digits", "search digits", "compare digits", "resume run1", "report run1")
    ),
    ("ui --port 99999", ("port = 99999", "1 to 65535")),
    # names
    ("run digits --name run1", ("name = 'run1'", "exists already and is left as it is", "triaccel resume run1")),
    ("search digits --name run1", ("name = 'run1'", "exists already and is left as it is", "triaccel resume run1")),
    ("compare digits --name run1", ("name = 'run1'", "exists already and is left as it is", "triaccel resume run1")),
    ("run digits --name ../elsewhere", ("name = '../elsewhere'", "must begin with a letter or digit")),
    ("search digits --name a/b", ("name = 'a/b'", "must begin with a letter or digit")),
    ("compare digits --name ''", ("name = ''", "must begin with a letter or digit")),
    ("report nobody", ("name = 'nobody'", "there is no folder", "{storage}")),
    ("replay nobody", ("name = 'nobody'", "there is no folder")),
    ("resume nobody", ("name = 'nobody'", "there is no folder")),
    ("resume ../nobody", ("name = '../nobody'", "there is no folder")),
    ("report ..", ("name = '..'", "must begin with a letter or digit")),
    # files
    ("report badlog", ("badlog/events.jsonl, line 1", "the log is damaged")),
    ("replay badlog", ("badlog/events.jsonl, line 1", "the log is damaged")),
    ("resume badlog", ("badlog/events.jsonl, line 1", "the log is damaged")),
    ("report badspec", ("badspec/spec.json cannot be read",)),
    ("resume badspec", ("badspec/spec.json cannot be read",)),
    ("report badsearch", ("badsearch/search.json cannot be read", "restore it, or begin a new search")),
    ("resume badsearch", ("badsearch/search.json cannot be read", "restore it, or begin a new search")),
    ("resume badtrials", ("(trials) = 0",)),
    ("resume badcomparison", ("badcomparison/comparison.json cannot be read", "begin a new comparison")),
    ("report empty", ("empty holds no run (events.jsonl is missing)",)),
    ("resume empty", ("empty/spec.json cannot be read",)),
    # storage
    *(
        (
            f"{command} digits --storage-path {{storage}}/notes.txt{below}",
            ("storage path = ", "notes.txt is not a folder"),
        )
        for command in ("run", "search", "compare")
        for below in ("", "/runs")
    ),
    ("run digits --storage-path /dev/null/runs", ("storage path = '/dev/null/runs'", "give --storage-path a folder")),
    # addresses
    (
        "run digits --address 127.0.0.1:1",
        ("address = '127.0.0.1:1'", "no Ray cluster answers", "ray start --head", "set RAY_AUTH_MODE=token"),
    ),
    ("search digits --address 127.0.0.1:1", ("address = '127.0.0.1:1'", "no Ray cluster answers")),
    ("compare digits --address ray://127.0.0.1:1", ("address = 'ray://127.0.0.1:1'", "no Ray cluster answers")),
    ("run digits --address nonsense", ("address = 'nonsense'", "host:port or auto")),
    ("run digits --address 127.0.0.1:port", ("address = '127.0.0.1:port'", "no Ray cluster answers")),
    ("run digits --address 127.0.0.1:99999", ("address = '127.0.0.1:99999'", "no Ray cluster answers")),
    ("run digits --tracking-uri http://127.0.0.1:1", ("tracking uri = 'http://127.0.0.1:1'", "no MLflow server")),
    (
        "search digits --tracking-uri http://127.0.0.1:1",
        ("tracking uri = 'http://127.0.0.1:1'", "record in a local file with --tracking-uri sqlite:///FILE"),
    ),
    ("ui --tracking-uri ftp://host", ("tracking uri = 'ftp://host'", "must begin with sqlite:///, http://")),
    ("run digits --tracking-uri sqlite:///{storage}/notes.txt", ("notes.txt'", "is not a SQLite database")),
    # the argument parser's own
    ("search digits --space quantiles", ("--space", "thresholds-absolute")),
    ("search digits --objective speed", ("--objective", "pareto")),
    ("search digits --also beta", ("--also", "tau_curv")),
    ("run digits --method sgd", ("--method", "triaccel")),
    ("run digits --lr None", ("--lr", "None")),
    ("run digits --epochs three", ("--epochs", "three")),
    ("run digits --precision fp8", ("--precision", "Expected one of ('fp16', 'bf16', 'fp32')")),
    ("run digits --amp None", ("--amp", "Expected one of ('fp16', 'bf16')")),
    ("run digits --noise-bound maybe", ("'maybe'", "--noise-bound", "'on'", "'off'")),
    ("search digits --trials-per-gpu 2.5", ("--trials-per-gpu", "2.5")),
    ("compare digits --fixed two", ("--fixed", "two")),
    ("compare digits --tune-baselines x", ("--tune-baselines", "x")),
    ("run digits --colour red", ("--colour",)),
    ("run", ("TASK",)),
    ("sing", ("sing",)),
)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with a good run and several damaged ones, for all cases: none touches it."""
    folder = tmp_path_factory.mktemp("project") / "storage"
    for name in ("run1", "badlog", "badspec", "badsearch", "badtrials", "badcomparison", "empty"):
        (folder / name).mkdir(parents=True)
    for name in ("run1", "badlog", "badspec"):
        (folder / name / SPEC).write_text(json.dumps(encode(RUN_SPEC)))
        SimulatedRun(folder / name).complete(epochs=1)
    (folder / "badlog" / "events.jsonl").write_text("this is not an event\n")
    (folder / "badspec" / SPEC).write_text("{")
    (folder / "badsearch" / "search.json").write_text('{"base": 3}')
    (folder / "badtrials" / "search.json").write_text(json.dumps({"base": encode(RUN_SPEC), "num_trials": 0}))
    (folder / "badcomparison" / "comparison.json").write_text("no JSON")
    (folder / "notes.txt").write_text("long enough not to be taken for an empty database file: " * 20)
    return folder


@pytest.fixture(scope="module")
def module(storage: Path) -> Iterator[str]:
    """A module beside the storage folder, where the commands are typed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(storage.parent)
        yield write_module(storage.parent, patch)


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Everything below the folder: a file written again with the same content would show too."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]  # of the module, when imported
    return {path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


@pytest.mark.parametrize(("command", "needles"), MESSAGES, ids=[command for command, _ in MESSAGES])
def test_bad_input_is_named_and_nothing_is_touched(
    command: str,
    needles: tuple[str, ...],
    storage: Path,
    module: str,
    sqlite_tracker: Tracker,  # in existence, for the commands that reach for one before they find what is wrong
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"storage": storage, "module": module}
    words = ["" if word == "''" else word.format(**places) for word in command.split()]
    if words[0] != "sing":
        words += [] if "--storage-path" in words else ["--storage-path", str(storage)]
        words += [] if "--tracking-uri" in words else ["--tracking-uri", sqlite_tracker.uri]
    before = snapshot(storage.parent)
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == ""
    for needle in needles:
        assert needle.format(**places) in " ".join(said.err.split()) or needle.format(**places) in said.err
    assert "Traceback" not in said.err
    assert snapshot(storage.parent) == before


def test_the_traceback_can_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIACCEL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="epochs = 0"):
        main(["run", "digits", "--epochs", "0", "--storage-path", str(tmp_path)])


@pytest.mark.parametrize("words", ["run digits", "resume x", "doctor"])
def test_ctrl_c_is_one_line(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def press_ctrl_c(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "execute", press_ctrl_c)
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 130
    assert [line for line in capsys.readouterr().err.splitlines() if "loading" not in line] == ["stopped"]
