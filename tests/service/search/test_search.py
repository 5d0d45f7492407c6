"""How much memory and how many CPUs the trials of a search may take."""

from dataclasses import replace

import pytest

from tests.service.records import run_of
from triaccel_ray.config import BatchConfig
from triaccel_ray.records.events import End
from triaccel_ray.service.runs.launch import cpus_of_a_run
from triaccel_ray.service.search.search import MIN_HEADROOM_BYTES, _headroom_bytes


def test_the_headroom_is_what_the_largest_batch_takes_by_the_probes_measure() -> None:
    run = run_of("probe")
    base = replace(run.spec, control=replace(run.spec.control, batch=BatchConfig(start=64, minimum=32, maximum=256)))
    peak = run.epochs[-1].peak_bytes
    ended = replace(run, end=End(status="finished", results={"idle_gb": (peak - 100e6) / 1e9}))
    assert _headroom_bytes(base, ended) == pytest.approx(400e6, rel=1e-3)
    idle = replace(run, end=End(status="finished", results={"idle_gb": peak / 1e9}))
    assert _headroom_bytes(base, idle) == MIN_HEADROOM_BYTES


def test_a_run_reserves_a_cpu_and_the_user_may_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpus_of_a_run(1.0) == cpus_of_a_run(0.25) == 1
    monkeypatch.setenv("TRIACCEL_CPUS_PER_RUN", "3")
    assert cpus_of_a_run(0.0) == cpus_of_a_run(1.0) == 3
    for given in ("0", "-1", "two", ""):
        monkeypatch.setenv("TRIACCEL_CPUS_PER_RUN", given)
        with pytest.raises(ValueError, match=r"TRIACCEL_CPUS_PER_RUN = .*must be a whole number of at least 1"):
            cpus_of_a_run(1.0)
