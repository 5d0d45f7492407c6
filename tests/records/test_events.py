import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decide.build import BF16, FP16, control_configs, eventful_run, machines, observation_of, plan_of
from triaccel_ray.config import ControlConfig, CurvatureConfig
from triaccel_ray.decide import decide, initial_decision
from triaccel_ray.records.codec import encode
from triaccel_ray.records.events import (
    FORMAT,
    End,
    Epoch,
    Event,
    EventLog,
    LogError,
    OtherLogFormatError,
    Record,
    Start,
    TakenOverError,
    Tick,
    parse_event,
    read_events,
)
from triaccel_ray.records.plan import Applied, Fault, FaultKind
from triaccel_ray.records.signals import LayerSignal, NoiseSignal

FAULT = Fault(kind=FaultKind.OUT_OF_MEMORY, step=3, phase="forward_backward", batch_size=8, micro_batch_size=4)


def a_tick() -> Tick:
    config, plan = ControlConfig(), plan_of(96, conv=BF16, head=FP16)
    signal = LayerSignal(name="conv", variance=math.inf, eigenvalues=(3.0, 1.0))
    noise = NoiseSignal(mean_square_norm=-0.5, trace_covariance=2.0)
    observation = observation_of(plan, signal, faults=(FAULT,), noise=noise, loss=math.inf, loss_scale=2.0**24)
    state = initial_decision(config, [(layer.name, layer.supported) for layer in observation.layers]).state
    decision = decide(config, observation, state)
    return Tick(observation=observation, decision=decision, applied=Applied(plan=plan, faults=(FAULT,)))


EPOCH = Epoch(
    epoch=1, step=10, train_loss=-math.inf, held_out_loss=1.0, seconds=0.5, images_per_second=20.0, batch_size=8,
    held_out_metrics={"accuracy": 90.0, "perplexity": math.inf}, peak_bytes=2**40, allocated_peak_bytes=0,
    num_skipped=1, score=None,
)  # fmt: skip
RECORDS: list[Record] = [
    Start(
        control=ControlConfig(curvature=CurvatureConfig(tau_curv=math.inf)),
        info={"task": "digits"},
        parameters={"lr": 0.1, "epochs": 2, "seed": 2**60 + 1, "nesterov": True, "budget": None, "device": "cpu"},
    ),
    a_tick(),
    EPOCH,
    End(status="failed", cause="bug", message="größer\nals", results={"accuracy": 99.0, "loss": math.inf}),
]


def written(path: Path, *records: Record) -> Path:
    log = EventLog(path)
    for count, record in enumerate(records, start=1):
        log.append(record)
        assert len(list(read_events(path))) == count == log.num_records  # before `append` returns
    log.close()
    return path


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    events = list(read_events(written(tmp_path / "folder" / "events.jsonl", *RECORDS)))
    assert [event.record for event in events] == RECORDS
    assert [event.sequence for event in events] == [0, 1, 2, 3]
    assert [event.time_ms for event in events] == sorted(event.time_ms for event in events)
    start = events[0].record
    assert list(map(type, start.parameters.values())) == [float, int, int, bool, type(None), str]


@given(control_configs(), machines(), st.integers(0, 1000))
def test_whatever_the_policy_decides_comes_back(config: ControlConfig, machine: object, seed: int) -> None:
    for index, (observation, decision) in enumerate(eventful_run(config, machine, seed, ticks=6)):
        tick = Tick(observation=observation, decision=decision, applied=Applied(plan=decision.plan))
        line = json.dumps({"sequence": index, "time_ms": 0, "kind": "tick", "data": encode(tick)}, allow_nan=False)
        assert parse_event(line.encode(), "here") == Event(sequence=index, time_ms=0, record=tick)


@pytest.mark.parametrize("keep", [0, 1, 3, None])
def test_reopening_keeps_what_belongs_to_the_checkpoint(tmp_path: Path, keep: int | None) -> None:
    path = written(tmp_path / "log", *RECORDS)
    path.write_bytes(path.read_bytes() + b'{"half a li')
    assert [event.record for event in read_events(path)] == RECORDS  # the half line is left out
    log = EventLog(path, keep=keep)
    log.append(RECORDS[3])
    log.close()
    events = list(read_events(path))
    assert [event.record for event in events] == [*RECORDS[:keep], RECORDS[3]]
    assert events[-1].sequence == (len(RECORDS) if keep is None else keep)
    EventLog(tmp_path / "other", keep=None).close()
    assert (tmp_path / "other").read_bytes() == b""


def test_a_log_that_would_begin_with_a_tick_is_refused(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(LogError, match=r"begins with a tick: give the loop on_tick=log.append itself"):
        log.append(a_tick())
    log.close()


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log", *RECORDS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LogError, match=rf"event log {path} holds 3 records, 4 belong to the checkpoint"):
        EventLog(path, keep=4)
    assert len(list(read_events(path))) == 3
    assert os.listdir(tmp_path) == ["log"]


WRITER = """
import sys
from pathlib import Path

from triaccel_ray.records.events import End, EventLog, TakenOverError

log = EventLog(Path(sys.argv[1]))
for number in range(3):
    log.append(End(status=f"record {number} of the first"))
print("written", flush=True)
sys.stdin.readline()
for step in (lambda: log.append(End(status="too late")), log.sync):
    try:
        step()
    except TakenOverError as error:
        print(error, flush=True)
log.close()
"""


def test_who_opens_a_log_takes_it_over_from_another_process(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    command = [sys.executable, "-c", WRITER, str(path)]
    first = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd())
    assert first.stdout is not None
    assert first.stdout.readline() == "written\n"
    log = EventLog(path, keep=2)
    log.append(End(status="of the second"))
    said, _ = first.communicate("go on\n")
    message = f"event log {path}: another process has taken this run over, and goes on with it"
    assert [line.partition(";")[0] for line in said.splitlines()] == [message, message]
    log.append(End(status="the last"))
    log.sync()
    log.close()
    assert [event.record.status for event in read_events(path) if isinstance(event.record, End)] == [
        "record 0 of the first",
        "record 1 of the first",
        "of the second",
        "the last",
    ]
    assert os.listdir(path.parent) == ["log"]


def test_a_log_that_was_deleted_is_not_written_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "folder" / "log")
    shutil.rmtree(tmp_path / "folder")
    with pytest.raises(TakenOverError):
        log.append(RECORDS[3])
    log.close()


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_log_that_cannot_be_put_in_place_leaves_the_old_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = written(tmp_path / "log", *RECORDS)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if name == "fsync" else Path, name, fail)
        with pytest.raises(OSError, match="No space"):
            EventLog(path, keep=1)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["log"]


def test_records_other_than_those_before_the_checkpoint_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = EventLog(path)
    checksums = [log.checksum]
    for record in RECORDS:
        log.append(record)
        checksums.append(log.checksum)
    log.close()
    for keep, checksum in reversed(list(enumerate(checksums))):
        log = EventLog(path, keep=keep, checksum=checksum)
        assert log.checksum == checksum
        log.close()
    log = EventLog(path)
    log.append(End(status="something else"))
    log.close()
    before = path.read_bytes()
    with pytest.raises(LogError, match="its first 1 records are not those that the checkpoint follows"):
        EventLog(path, keep=1, checksum=checksums[1])
    assert path.read_bytes() == before


GOOD = json.dumps({"sequence": 0, "time_ms": 0, "kind": "end", "data": {"status": "finished"}}).encode()


@pytest.mark.parametrize(
    ("damaged", "found"),
    [
        (b"", "Expecting value"),
        (b"\x80{}", "decode"),
        (GOOD[:20], "line 1 column"),
        (b"[1]", r"kind = \[1\]"),
        (GOOD.replace(b'"end"', b'"stop"'), "kind = 'stop'"),
        (GOOD.replace(b'"status"', b'"state"'), "'state'"),
        (GOOD.replace(b'"sequence"', b'"place"'), "'sequence'"),
        (GOOD.replace(b'"time_ms": 0', b'"time_ms": null'), "NoneType"),
        (b'{"kind": "end", "sequence": 0, "time_ms": 0}', "must be an object"),
        (b'{"kind": "start", "sequence": 0, "time_ms": 0, "data": {"control": {"every_steps": 0}}}', "t_ctrl"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damaged: bytes, found: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(GOOD + b"\n" + damaged + b"\n" + GOOD + b"\n")
    events = read_events(path)
    next(events)
    with pytest.raises(LogError, match=rf"event log {path}, line 2: not an event \(.*{found}"):
        next(events)


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"nowhere cannot be read: No such file or directory; name the folder of a run"):
        list(read_events(tmp_path / "nowhere"))


def test_a_log_of_another_format_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    data = {**encode(Start(control=ControlConfig())), "format": 1, "control": {"unknown": 3}}
    line = json.dumps({"sequence": 0, "time_ms": 0, "kind": "start", "data": data})
    message = f"a line: format = 1, this version reads format {FORMAT}: read it with"
    with pytest.raises(OtherLogFormatError, match=message):
        parse_event(line.encode(), "a line")
