"""Work handed to a cluster: what the words become, what is refused, and servers that are no cluster."""

import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ray._raylet import AuthenticationMode, get_authentication_mode
from ray.job_submission import JobDetails

from tests.service.records import RUN_SPEC
from tests.service.terminal import typed
from triaccel_ray.service.cli.parsing import parse
from triaccel_ray.service.jobs import RESUME_KEY, WHAT_KEY, jobs_table, submission
from triaccel_ray.service.storage.layout import SPEC, write_value

SECRETS = {
    "MLFLOW_TRACKING_PASSWORD": "word-of-the-environment-6711",
    "RAY_AUTH_TOKEN": "7" * 40 + "c1u573r",
    "AWS_SECRET_ACCESS_KEY": "key-of-the-store-6713",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which everything is typed."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submitted(words: str, name: str | None = None) -> dict[str, Any]:
    return submission(shlex.split(words), name=name)[0]


def entry(job: dict[str, Any]) -> list[str]:
    words = shlex.split(job["entrypoint"])
    assert words[:3] == ["python", "-m", "triaccel_ray.service"]
    return words[3:]


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("run digits --name mine", "run digits --name mine --name mine {kept}"),
        ("run digits --storage_path x", "run digits --storage_path x --name j --storage-path {here}/x"),
        ("run digits --tracking-uri sqlite:///db", "{typed} --name j {kept} --tracking-uri sqlite:///{here}/db"),
        ("run digits --tracking-uri sqlite:////a@b/db", "{typed} --name j {kept} --tracking-uri sqlite:////a@b/db"),
        ("run text-gpt --data-dir files", "{typed} --name j --data-dir {here}/files {kept}"),
        ("run --from ./runs/mine", "{typed} --from {here}/runs/mine --name j {kept}"),
        ("compare digits --experiment 'two words' --address auto", "{typed} --name j {kept}"),
        (
            "search digits --storage-path 's3://bucket/runs?region=x' --tracking-uri http://host:5000",
            "{typed} --name j --storage-path 's3://bucket/runs?region=x' --tracking-uri http://host:5000",
        ),
        ("resume mine", "resume mine {kept}"),
        ("resume ./runs/mine", "resume {here}/runs/mine {kept}"),
    ],
)
def test_a_job_does_what_was_typed_with_nothing_in_its_own_folder(tmp_path: Path, typed: str, becomes: str) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    write_value(tmp_path / "runs" / "mine" / SPEC, RUN_SPEC)
    words, kept = entry(submitted(typed, name="j")), f"--storage-path {tmp_path}/triaccel-runs"
    assert words == [*shlex.split(becomes.format(here=tmp_path, kept=kept, typed=typed)), "--address", "auto"]
    storage = parse(words).where.storage_path  # the last one given counts
    assert storage.uri is not None or Path(storage.storage).is_absolute()


def test_names_are_readable_and_a_stopped_job_can_be_resumed(tmp_path: Path) -> None:
    job = submitted("search digits --tracking-uri http://host:5000 --experiment mine")
    assert job["submission_id"].startswith("search-digits-20")
    assert job["metadata"][WHAT_KEY] == "search digits"
    assert entry(job)[entry(job).index("--name") + 1] == job["submission_id"]
    assert shlex.split(job["metadata"][RESUME_KEY]) == [
        *("resume", job["submission_id"], "--storage-path", str(tmp_path / "triaccel-runs")),
        *("--tracking-uri", "http://host:5000"),
    ]
    assert submitted("resume mine")["submission_id"].startswith("resume-mine-20")
    for name, job_id in ((None, "j1"), ("again", "again")):  # the user's name for what it trains stays
        job = submitted("compare digits --name j1", name=name)
        assert (job["submission_id"], entry(job)[entry(job).index("--name") + 1]) == (job_id, "j1")


def test_the_environments_tracking_store_travels_with_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    job = submitted("run digits")
    assert entry(job)[-4:] == ["--tracking-uri", "http://localhost:5000", "--address", "auto"]
    assert "--tracking-uri" not in entry(submitted("resume mine"))  # it knows its own


@pytest.mark.parametrize("typed", ["search digits --trials 3", "resume mine"])
def test_no_secret_of_the_environment_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    sent = repr(submitted(f"{typed} --tracking-uri http://host:5000"))
    assert not any(secret in sent for secret in SECRETS.values())


@pytest.mark.parametrize(
    ("typed", "needle"),
    [
        ("", "command = '': after -- comes one of run, search, compare, tune-batch, resume"),
        ("report mine", "command = 'report'"),
        ("run digits --address 10.0.0.1:6379", "name the cluster before the --"),
        ("run digits --name a/b", "name = 'a/b'"),
        ("run digits --epochs 0", "epochs = 0: must be"),
        ("search digits --also alpha --alpha 1", "a search finds this one itself"),
        ("compare digits --methods typo", "method = 'typo': must be one of"),
        ("compare digits --experiment ''", "experiment = ''"),
        ("search digit", "did you mean digits"),
        ("run digits --tracking-uri ftp://host", "tracking uri = 'ftp://host': must be http://HOST:PORT"),
        ("run digits --tracking-uri https://s3cret@h", "tracking uri = 'https://***@h': must not hold a password"),
    ],
)
def test_what_makes_no_sense_on_a_cluster_is_refused(tmp_path: Path, typed: str, needle: str) -> None:
    with pytest.raises(ValueError, match=r"=|did you mean") as refused:
        submitted(typed)
    assert needle in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_a_name_and_a_folder_that_will_not_do_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="name = 'a b'"):
        submitted("run digits", name="a b")
    monkeypatch.chdir(Path.home())
    with pytest.raises(ValueError, match=r"working directory = .*change into the project's folder"):
        submitted("run digits")


def test_data_and_results_stay_behind(here: Path) -> None:
    job, notes = submission(shlex.split("run text-gpt --storage-path results --data-dir 'my data'"), name=None)
    excludes = job["runtime_env"]["excludes"]
    assert {"mlruns", "triaccel-runs", "/results", "/my\\ data"} <= set(excludes)
    elsewhere = submitted(f"run text-gpt --storage-path {here.parent / 'x'} --data-dir .")
    assert len(elsewhere["runtime_env"]["excludes"]) == len(excludes) - 2
    assert any(str(here / "results") in note and "must share" in note for note in notes)


def test_jobs_are_listed_newest_first() -> None:
    def job(name: str, status: str, what: str, start: int | None, end: int | None) -> JobDetails:
        times = {"start_time": start, "end_time": end}
        return JobDetails(type="SUBMISSION", submission_id=name, status=status, entrypoint=what, **times)

    old, new = job("a", "SUCCEEDED", "run x", 0, 61_500), job("b", "RUNNING", "w" * 80, 10_000, None)
    waiting = job("c", "PENDING", "run y", None, None)
    rows = jobs_table([old, waiting, new], now_ms=3_670_000).rows
    assert [row[0] for row in rows] == ["c", "b", "a"]
    assert [row[-1] for row in rows] == ["0:00:00", "1:01:00", "0:01:01"]
    assert len(rows[1][1]) == 60


@contextmanager
def another_server(status: int, body: bytes) -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/api/version" else 500)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "http://127.0.0.1:1", "http://[::1]", "http://127.0.0.1:port", "nonsense"]
)
def test_a_cluster_that_is_not_there_is_named(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["jobs"], ["logs", "j"], ["stop", "j"]):
        status, out, said = typed(capsys, *words, "--address", address)
        assert (status, out) == (2, "")
        assert f"address = '{address}': no Ray cluster serves jobs there" in said
        assert "ray start --head" in said


@pytest.mark.parametrize(
    ("answer", "needle"),
    [
        ((404, b""), "no Ray cluster serves jobs there (Version check returned 404"),
        ((200, b"<html>"), "no Ray cluster serves jobs there"),
        ((200, b"{}"), "no Ray cluster serves jobs there"),
        ((401, b"no token"), "the cluster does not let you in"),
        ((200, b'{"ray_version": "2.60.0"}'), "the cluster refuses"),
    ],
)
def test_a_server_that_is_no_cluster_or_keeps_us_out(
    answer: tuple[int, bytes], needle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with another_server(*answer) as address:
        status, _, said = typed(capsys, "jobs", "--address", address)
    assert status == 2
    assert f"address = '{address}': {needle}" in said
    assert ("set RAY_AUTH_MODE=token" in said) == (answer[0] == 401)
    assert get_authentication_mode() == AuthenticationMode.DISABLED  # other clusters may have no tokens
