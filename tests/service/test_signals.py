import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from triaccel_ray.service.signals import as_interrupt, deferring_interrupt


@pytest.fixture(autouse=True)
def python_hears_ctrl_c() -> Iterator[None]:
    """What a shell starts in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # a fork beside threads, from Python 3.12 on
def test_ctrl_c_while_a_process_is_started_takes_effect_afterwards() -> None:
    done = []

    def start() -> None:
        with deferring_interrupt():
            subprocess.Popen(["true"], preexec_fn=lambda: os.kill(os.getppid(), signal.SIGINT)).wait()
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_any_other_time_does_not_wait_and_ignored_it_stays_so() -> None:
    def work() -> None:
        with deferring_interrupt():
            signal.raise_signal(signal.SIGINT)
            pytest.fail("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferring_interrupt():
        signal.raise_signal(signal.SIGINT)


def test_a_signal_asks_the_handler_of_ctrl_c_unless_it_must_act_at_once() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    with as_interrupt(signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), as_interrupt(signal.SIGTERM, at_once=lambda: True):
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGINT]
