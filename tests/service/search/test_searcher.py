from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from tests.service.records import RUN_SPEC
from triaccel_ray.records.events import Claim, EventLog, LogError, TakenOverError
from triaccel_ray.search_spaces.thresholds import ANCHOR, search_space
from triaccel_ray.service.failures import DiskFullError
from triaccel_ray.service.search.searcher import JournaledSearcher, ended_trials
from triaccel_ray.service.search.spec import SearchSpec
from triaccel_ray.service.storage.layout import JOURNAL
from triaccel_ray.service.storage.storage_path import StoragePath

SPEC = SearchSpec(base=RUN_SPEC, space="thresholds-absolute", num_trials=6)
FIRST = {name: ANCHOR[name] for name in search_space(SPEC.space)}


def search(folder: Path, claim: Claim | None = None) -> JournaledSearcher:
    folder.mkdir(exist_ok=True)
    return JournaledSearcher(SPEC, StoragePath.of(folder), claim)


def carry_out(made: JournaledSearcher, count: int) -> list[dict[str, Any]]:
    """Suggests and ends `count` trials, one after the other."""
    suggested = []
    for number in range(count):
        sample = made.suggest(str(number))
        made.on_trial_complete(str(number), {"objective": sample["rho_high"], "epoch": 3, "finished": True})
        suggested.append(sample)
    return suggested


def test_the_sampler_hears_of_pruned_trials_what_they_were_worth_at_each_epoch(tmp_path: Path) -> None:
    made = search(tmp_path)
    for name, last in (("whole", {"epoch": 3, "finished": True}), ("cut", {"epoch": 2, "finished": False})):
        made.suggest(name)
        for epoch in range(1, last["epoch"]):
            made.on_trial_result(name, {"objective": float(epoch), "epoch": epoch})
        made.on_trial_result(name, {"objective": 1.0, "epoch": 1})  # of a process that was lost and tells again
        made.on_trial_complete(name, {"objective": 9.0, **last})
    whole, cut = made._study.trials
    assert (whole.state, whole.value, whole.intermediate_values) == (TrialState.COMPLETE, 9.0, {1: 1.0, 2: 2.0})
    assert (cut.state, cut.intermediate_values) == (TrialState.PRUNED, {1: 1.0, 2: 9.0})
    assert ended_trials(tmp_path / "trials.jsonl") == {"trial-000", "trial-001"}


@pytest.mark.parametrize("torn", [b"", b'{"trial": "tri'])
def test_a_search_that_begins_again_suggests_what_an_undisturbed_one_does(tmp_path: Path, torn: bytes) -> None:
    whole, journal = carry_out(search(tmp_path / "whole"), 6), tmp_path / "cut" / JOURNAL
    assert whole[0] == {**FIRST, "trial": "trial-000", "ended": False}
    broken = search(tmp_path / "cut")
    carry_out(broken, 3)
    begun = broken.suggest("lost")
    with journal.open("ab") as file:
        file.write(torn)
    resumed = carry_out(search(tmp_path / "cut"), 6)
    assert resumed == [*({**each, "ended": True} for each in whole[:3]), *whole[3:]]
    assert resumed[3] == begun
    assert ended_trials(journal) == {sample["trial"] for sample in whole}  # the torn line was cut off


@pytest.mark.parametrize("result", [None, {"objective": -1.0, "unfinished": "bug"}])
def test_a_trial_that_is_to_be_done_again_is_not_noted(tmp_path: Path, result: dict[str, Any] | None) -> None:
    made = search(tmp_path)
    made.suggest("one")
    made.on_trial_complete("one", result, error=result is None)
    assert ended_trials(tmp_path / "trials.jsonl") == frozenset()


def test_nothing_is_suggested_or_noted_once_another_process_goes_on(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log")
    made = search(tmp_path, claim=log.claim)
    sample = made.suggest("one")
    EventLog(tmp_path / "log").close()
    before = (tmp_path / "trials.jsonl").read_bytes()
    made.on_trial_complete("one", {"objective": sample["rho_high"], "epoch": 3, "finished": True})
    assert isinstance(made.failure, TakenOverError)
    with pytest.raises(TakenOverError):
        made.suggest("two")
    assert (tmp_path / "trials.jsonl").read_bytes() == before
    log.close()


def test_a_full_disk_is_not_the_trials_failure(tmp_path: Path) -> None:
    made = search(tmp_path)
    sample = made.suggest("one")
    (tmp_path / "trials.jsonl").unlink()
    (tmp_path / "trials.jsonl").symlink_to("/dev/full")
    made.on_trial_complete("one", {"objective": sample["rho_high"], "epoch": 3, "finished": True})
    with pytest.raises(DiskFullError):
        made.suggest("two")


@pytest.mark.parametrize("line", [b"\xff\n", b'{"ended": true}\n'])
def test_a_damaged_journal_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "trials.jsonl").write_bytes(line)
    with pytest.raises(LogError, match=r"trials.jsonl cannot be read .*: restore it, or begin a new search"):
        search(tmp_path)
    assert ended_trials(tmp_path / "trials.jsonl") == frozenset()
