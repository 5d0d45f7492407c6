"""What a user can get wrong before any work begins: one message, exit status 2, and nothing touched."""

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.build import SimulatedRun
from tests.service.own_task import write_module
from tests.service.records import RUN_SPEC
from tests.service.terminal import typed
from triaccel_ray.control.errors import BudgetTooSmallError
from triaccel_ray.records.codec import encode
from triaccel_ray.service.cli import execute as commands
from triaccel_ray.service.cli.main import main
from triaccel_ray.service.failures import RunFailedError
from triaccel_ray.service.storage.layout import SPEC
from triaccel_ray.service.tracking.tracker import Tracker

WITH_SECRETS = (
    "s3://AKIA4711:s3cr3t@bucket/runs",
    "abfs://account:s3cr3t@container/runs",
    "s3://bucket/runs?secret_key=s3cr3t",
    "abfs://container@account.dfs.core.windows.net/x?sas_token=s3cr3t",
    "s3://bucket/runs?region=x&Password=s3cr3t",
)
MESSAGES: tuple[tuple[str, str], ...] = (
    # tasks
    ("run digit", "did you mean digits"),
    ("search no_such_module:Mine", "there is no module no_such_module"),
    ("run {module}:Mine", "has no Mine"),
    ("run {module}.py:Blobs", "must be package.module:Class"),
    # settings: those of the command, of a run, and of one beside another
    ("run digits --tau-low 1 --tau-high 0.1", "tau_low, tau_high = (1.0, 0.1)"),
    ("run digits --tau-low nan", "tau_low = nan: must be a finite number >= 0"),
    ("compare digits --target 150", "target = 150.0: no value that accuracy can have; give one in [0, 100]"),
    ("compare digits --target nan", "target = nan: must be a finite number"),
    ("run text-gpt --target -1", "target = -1.0: no value that bits per byte can have; give one in [0, inf)"),
    ("run digits --t-ctrl 0", "every_steps (t_ctrl) = 0: must be"),
    ("search digits --noise-bound on --curvature hessian", "(noise_bound) = ('none', True)"),
    ("replay run1 --rho-low 2", "rho_low = 2.0: must lie in"),
    ("replay run1 --reasons -1", "reasons = -1: must be"),
    ("search digits --tau-low 1e-6", "--tau-low"),
    ("run digits --gpus 0", "gpus = '0': must be a number of at least 1, such as 4, or a range of such, such as 2..8"),
    (
        "run digits --gpus 999 --device cpu --batch-min 1024 --batch-size 1024 --batch-max 1024",
        "gpus = '999': this machine has",
    ),
    ("run digits --gpus 64 --batch-min 32", "(batch_min) = 32: must be at least the number of GPUs, 64"),
    ("search digits --gpus 2 --trials-per-gpu 2", "gpus = '2': runs that share a GPU train on one each"),
    ("run digits --gpus 2 --method amp", "gpus = '2': method amp trains in one process, as fp32, amp, amp-best,"),
    ("compare digits --gpus 2", "gpus = '2': must be left out for methods that train in one process, or give"),
    ("tune-batch digits --gpus 2", "--gpus"),
    ("run digits --method amp --initial-layers x=fp16", "['x=fp16']: --method amp does not use it"),
    ("run digits --method engine-amp --alpha 0.1", "--alpha = 0.1: --method engine-amp does not use it"),
    ("run digits --weights bf16", "invalid choice 'bf16' for argument '--weights'. Expected one of"),
    ("run digits --keep best --final", "leave out --final, or --keep best"),
    ("run digits --memory-budget 2", "memory_budget = '2': must be a positive number with a unit"),
    ("run digits --batch-min 600", "(batch_min, batch_size, batch_max) = (600, 96, 256): must be in ascending order"),
    ("run digits --memory-budget 9999GiB --device cpu", "at most the"),
    ("run digits --memory-budget 1GiB --memory-headroom 64B", "memory headroom = 64: give a budget or a headroom, not"),
    ("compare digits --memory-budget 64MiB --device cpu", "memory budget = 64 MiB"),
    # settings that a task does not read
    ("search digits --data-dir /files", "--data-dir = '/files': digits does not read it; leave it out"),
    ("run text-gpt --momentum 0.5", "--momentum = 0.5: text-gpt does not read it"),
    # options of all commands that train
    ("run digits --loss-scale 0.5", "initial (loss_scale) = 0.5: must lie in [1, 16777216]"),
    ("run digits --initial-layers conv1=fp4", "initial_layers.conv1 = 'fp4'"),
    ("tune-batch digits --precision fp8", "precision = 'fp8': needs --fp8 on, or fp8=True"),
    ("run digits --initial-layers conv1=fp32 conv1=bf16", "must be LAYER=PRECISION, each layer once"),
    ("run digits --data-dir ~nobody-at-all/x", "names a user whom this machine does not know"),
    # searches and comparisons
    ("search digits --trials 100001", "num_trials (trials) = 100001: must be an integer in [1, 100000]"),
    ("search digits --trials-per-gpu 2 --device cpu", "trials-per-gpu = 2: a run on the CPU has no GPU to share"),
    ("search digits --also alpha --alpha 0.1", "--alpha = 0.1: a search finds this one itself"),
    ("compare digits --methods fp32,probe", "method = 'probe': must be one of fp32, amp"),
    ("compare digits --methods amp,amp", "methods = 'amp,amp': must be one or more, each once"),
    ("compare digits --methods amp,fixed", "--fixed N adds the best of N fixed settings"),
    ("compare digits --seeds 0", "num_seeds (seeds) = 0: must be an integer in [1, 1000]"),
    # batch sizes
    ("tune-batch digits --batch-max 64", "(32, 96, 64): must be in ascending order"),
    ("tune-batch --from amp1", "--from = 'amp1': was trained by amp, without the engine that is timed"),
    ("run digits --method tune-batch", "--method"),
    # stores, experiments, ports
    *((f"run digits --experiment {name}", "must name an MLflow experiment") for name in ("''", "\x1b[2J")),
    ("resume run1 --tracking-uri ''", "tracking uri = ''"),
    ("doctor --storage-path ''", "must name a folder"),
    ("search digits --storage-path {storage}/notes.txt/runs", "notes.txt is not a folder"),
    ("run digits --storage-path foo://x", "'foo://x': must be a folder, or a URI that pyarrow's file systems know"),
    *((f"run digits --storage-path {uri}", "must not hold a key or password") for uri in WITH_SECRETS),
    ("run digits --storage-path s3:/bucket/runs", "a URI such as s3://bucket/runs"),
    ("ui --port 99999", "port = 99999: must be an integer in [1, 65535]"),
    # names and files
    ("search digits --name run1", "exists already and is left as it is"),
    *((f"{each} nobody", "name = 'nobody': there is no folder") for each in ("report", "replay", "resume")),
    (f"report {__file__}", "is a file: an event log must be called events.jsonl"),
    ("report badlgo", "badlgo, did you mean badlog? names are the folders in"),
    ("report ..", "name = '..': must begin with a letter or digit"),
    *((f"{each} badlog", "badlog/events.jsonl, line 1") for each in ("report", "replay", "resume")),
    ("resume badspec", "badspec/spec.json cannot be read"),
    ("report badsearch", "badsearch/search.json cannot be read"),
    ("resume badtrials", "(trials) = 0"),
    ("resume empty", "empty is empty: a command has just begun there"),
    ("run digits --name empty", "empty is empty: a command has just begun there"),
    # addresses
    ("search digits --address 127.0.0.1:1", "address = '127.0.0.1:1': no Ray cluster answers"),
    ("run digits --address nonsense", "host:port or auto"),
    ("compare digits --tracking-uri http://127.0.0.1:1", "no MLflow server"),
    ("ui --tracking-uri ftp://host", "tracking uri = 'ftp://host': must be http://HOST:PORT of a server or sqlite"),
    ("run digits --tracking-uri sqlite:///{storage}/notes.txt", "is not a SQLite database"),
    # the argument parser's own
    ("run digits --lr None", "Error parsing --lr"),
    ("run digits --memory-budget -1GiB", "-1GiB"),
    ("run digits --color red", "--color"),
    ("serach digits", "command = 'serach': no such command, did you mean search? the commands are run, search, "),
    ("run digits --name artifacts", "name = 'artifacts': is where MLflow's records lie"),
    ("report run1/trials/x", "there is no folder"),
    ("run digits --storage-path /proc/nowhere", "storage path = '/proc/nowhere': cannot be used"),
)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage folder with a good run and several damaged ones, for all cases: none touches it."""
    folder = tmp_path_factory.mktemp("project") / "storage"
    for name in ("run1", "amp1", "badlog", "badspec", "badsearch", "badtrials", "empty"):
        (folder / name).mkdir(parents=True)
    for name in ("run1", "badlog", "badspec"):
        (folder / name / SPEC).write_text(json.dumps(encode(RUN_SPEC)))
        SimulatedRun(folder / name).complete(epochs=1)
    (folder / "amp1" / SPEC).write_text(json.dumps(encode(replace(RUN_SPEC, method="amp"))))
    SimulatedRun(folder / "amp1").complete(epochs=1)
    (folder / "badlog" / "events.jsonl").write_text("this is not an event\n")
    (folder / "badspec" / SPEC).write_text("{")
    (folder / "badsearch" / "search.json").write_text('{"base": 3}')
    (folder / "badtrials" / "search.json").write_text(json.dumps({"base": encode(RUN_SPEC), "num_trials": 0}))
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


@pytest.mark.parametrize(("command", "needle"), MESSAGES, ids=[command for command, _ in MESSAGES])
def test_bad_input_is_named_and_nothing_is_touched(
    command: str,
    needle: str,
    storage: Path,
    module: str,
    sqlite_tracker: Tracker,  # in existence, for the commands that reach for one before they find what is wrong
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"storage": storage, "module": module}
    words = ["" if word == "''" else word.format(**places) for word in command.split()]
    words += [] if "--storage-path" in words else ["--storage-path", str(storage)]
    words += [] if "--tracking-uri" in words else ["--tracking-uri", sqlite_tracker.uri]
    before = snapshot(storage.parent)
    status, out, said = typed(capsys, *words)
    assert (status, out) == (2, "")
    assert needle.format(**places) in " ".join(said.split())
    assert "s3cr3t" not in said
    assert snapshot(storage.parent) == before


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped\n"),
        (RunFailedError(Path("amp"), ValueError("a mistake")), 1, "amp failed: ValueError: a mistake"),
        (RunFailedError(Path("amp"), BudgetTooSmallError("give 2 MiB")), 2, "BudgetTooSmallError: give 2 MiB; its log"),
        (OSError(errno.ENOSPC, "No space left"), 2, "No space left: make room, then go on with `triaccel resume`"),
    ],
)
def test_what_ends_a_command_is_told_by_message_and_status(
    raised: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(_: object) -> int:
        raise raised

    monkeypatch.setattr(commands, "execute", end)
    ended, _, shown = typed(capsys, "doctor")
    assert (ended, said in shown) == (status, True)


@pytest.mark.parametrize("bug", [KeyError("a bug"), ConnectionResetError("by the peer"), TimeoutError("timed out")])
def test_a_bug_and_what_is_asked_for_show_their_traceback(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: object) -> int:
        raise bug

    monkeypatch.setattr(commands, "execute", end)
    with pytest.raises(type(bug)):
        main(["doctor"])
    monkeypatch.setenv("TRIACCEL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="epochs = 0"):
        main(["run", "digits", "--epochs", "0"])
