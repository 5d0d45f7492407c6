from pathlib import Path
from typing import Any

import pytest
import torch

from triaccel_ray.loop import ControlLoop
from triaccel_ray.records.events import End, read_events
from triaccel_ray.service.runs.spec import RunSpec
from triaccel_ray.service.runs.worker import Worker
from triaccel_ray.service.storage.layout import EVENTS
from triaccel_ray.trainables.digits import Digits


def test_a_worker_whose_loop_fails_while_it_closes_has_its_log_closed(tmp_path: Path) -> None:
    worker = Worker(RunSpec(task="digits", recipe=Digits.recipe, control=Digits.control, device="cpu"), tmp_path)
    worker.start()
    worker.fail(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    log = worker._log
    assert log is not None

    def broken() -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    assert isinstance(worker.loop, ControlLoop)
    worker.loop._pending.observing(broken, step=0)
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        worker.close()
    assert log._file.closed
    assert not hasattr(worker, "loop")
    *_, last = read_events(tmp_path / EVENTS)
    assert isinstance(last.record, End)
    assert last.record.status == "failed"
