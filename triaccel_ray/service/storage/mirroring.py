"""Keeping working copies and store alike while work goes on, off the path of those who train."""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator

from filelock import FileLock

from triaccel_ray.service.failures import StoreError, cause_of, needing_room
from triaccel_ray.service.storage.mirror import COMMAND, LOG, RUN, Mirror, pull_logs, push_commands, sync_runs
from triaccel_ray.service.storage.storage_path import StoragePath

PATIENCE_S = 60.0
"""How long a store may be out of reach where a run begins or ends, until that counts as an error."""
INTERVAL_S = 5.0
LONGEST_PAUSE_S = 60.0

_logger = logging.getLogger(__name__)


def insist(work: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Does `work`, again and again while the store cannot be reached.

    Raises:
        StoreError: it still could not be after `patience_s`.
    """
    deadline, pause_s = time.monotonic() + patience_s, 0.2
    while True:
        try:
            work()
            return
        except StoreError:
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2.0 * pause_s, 5.0)


class Background:
    """Does one kind of work in a thread of its own, when asked to or now and then; a failure is tried again."""

    def __init__(self, work: Callable[[], object], what: str, *, interval_s: float | None = None) -> None:
        """Begins at once.

        Args:
            work: raises StoreError when the store cannot be reached.
            what: names it in messages.
            interval_s: pause after which it is done without being asked; None: never.
        """
        self._work, self._what, self._interval_s = work, what, interval_s
        self._turn = threading.Condition()
        self._is_asked = self._is_ending = False
        self._error: StoreError | None = None
        self._thread = threading.Thread(target=self._go_on, name=f"mirror {what}", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Has the work done soon, once more than it is under way."""
        with self._turn:
            self._is_asked = True
            self._turn.notify_all()

    def end(self, patience_s: float = PATIENCE_S) -> None:
        """Ends the thread, and does the work a last time.

        Raises:
            StoreError: the store could not be reached for `patience_s`.
        """
        self.abandon(patience_s)
        if self._thread.is_alive():
            raise self._error or StoreError(f"{self._what}: the store has not answered for {patience_s:.0f} s")
        insist(self._work, patience_s)
        self._say(None)

    def abandon(self, patience_s: float = 5.0) -> None:
        """Ends the thread, for which it may take `patience_s`; work that has not begun is not done any more."""
        with self._turn:
            self._is_ending = True
            self._turn.notify_all()
        self._thread.join(patience_s)

    def _go_on(self) -> None:
        pause_s = 1.0
        while self._wait(self._interval_s if self._error is None else pause_s):
            try:
                self._work()
            except StoreError as error:
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
                self._say(error)
                continue
            except OSError as error:  # this machine's disk: who trains on it says so
                _logger.warning("%s: %s", self._what, error)
            pause_s = 1.0
            self._say(None)

    def _wait(self, pause_s: float | None) -> bool:
        """Returns whether to work, when there is something to do; False at the end."""
        with self._turn:
            patient = self._error is not None  # asking does not make a store answer
            self._turn.wait_for(lambda: self._is_ending or (self._is_asked and not patient), timeout=pause_s)
            self._is_asked = False
            return not self._is_ending

    def _say(self, error: StoreError | None) -> None:
        if error is not None and self._error is None:
            _logger.warning("%s: %s. Work goes on, and is brought there once the store answers", self._what, error)
        elif error is None and self._error is not None:
            _logger.warning("%s: the store answers again, and has everything", self._what)
        self._error = error


class RunCopy:
    """A run's folder on the machine that trains it; nothing is done for a place that is a folder."""

    def __init__(self, place: StoragePath, *, patience_s: float = PATIENCE_S) -> None:
        """Does nothing yet; later, a store may be out of reach for `patience_s`."""
        self._mirror, self._patience_s = Mirror(place, RUN), patience_s
        self._pushing: Background | None = None
        self._lock: FileLock | None = None

    def open(self) -> None:
        """Takes what the store has of the run, which may have begun on another machine.

        Raises:
            StoreError: the store cannot be reached, or another process of this machine trains the run.
        """
        place = self._mirror.place
        if place.uri is None:
            return
        lock = self._lock = self._mirror.lock()
        try:
            lock.acquire(timeout=self._patience_s)
        except TimeoutError as error:
            raise StoreError(
                f"{place}: another process of this machine works on it; wait for it, or end it, then go on with "
                "`triaccel resume`"
            ) from error
        try:
            with needing_room(self._mirror.folder):
                insist(lambda: self._mirror.pull(RUN.files), self._patience_s)
        except BaseException:
            lock.release()
            raise
        self._pushing = Background(self._mirror.push, str(place))

    def push_soon(self) -> None:
        """Has what is new brought to the store, while training goes on."""
        if self._pushing is not None:
            self._pushing.ask()

    def close(self, patience_s: float | None = None) -> None:
        """Brings everything to the store, for which it may take `patience_s`; may be called again.

        Raises:
            StoreError: the store cannot be reached; the message says where everything is, and how to bring it there.
        """
        pushing, self._pushing = self._pushing, None
        if pushing is None or self._lock is None:
            return
        try:
            pushing.end(self._patience_s if patience_s is None else patience_s)
        except StoreError as error:
            raise StoreError(_left_behind(self._mirror.place, error)) from error
        finally:
            self._lock.release()  # given back with the process, too

    def abandon(self) -> None:
        """Brings nothing more to the store: another process goes on with the run, and does; may be called again."""
        pushing, self._pushing = self._pushing, None
        if pushing is None or self._lock is None:
            return
        pushing.abandon()
        self._lock.release()


@contextlib.contextmanager
def mirrored(place: StoragePath, *, has_own_log: bool, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keeps the working copy of a command and the store alike meanwhile; does nothing for a place that is a folder.

    What is written here is brought to the store, logs of what is trained elsewhere are taken from it. At the end both
    hold the same, runs included that this machine could not bring there before.

    Args:
        place: a run, search or comparison.
        has_own_log: whether `place` has a log that this command writes: of a search or comparison.
        patience_s: how long the store may be out of reach at the end.

    Where another process has taken over what the command writes, nothing more is brought to the store.

    Raises:
        StoreError: the store cannot be reached at the beginning or the end.
    """
    if place.uri is None:
        yield
        return
    own = (place,) if has_own_log else ()
    copy = RunCopy(place)
    if has_own_log:
        copy.open()

    def exchange() -> None:
        copy.push_soon()
        push_commands(place)
        pull_logs(place, but=own)

    def settle() -> None:
        push_commands(place)
        sync_runs(place, but=own)

    try:
        settle()
        following, failed = Background(exchange, str(place), interval_s=INTERVAL_S), False
        steps: list[Callable[[float], None]] = [following.end, lambda left_s: insist(settle, left_s), copy.close]
        try:
            yield
        except BaseException as error:
            failed, patience_s = True, min(patience_s, 5.0)  # who waits for a message should not wait for the store
            if cause_of(error) == "taken_over":  # whoever goes on brings it there
                steps = [following.abandon, lambda _: copy.abandon()]
            raise
        finally:
            _end(place, steps, patience_s, failed=failed)
    finally:
        with contextlib.suppress(StoreError):
            copy.close(0.0)


def _end(place: StoragePath, steps: list[Callable[[float], None]], patience_s: float, *, failed: bool) -> None:
    try:
        for step in steps:
            step(patience_s)
    except StoreError as error:
        if not failed:
            raise StoreError(_left_behind(place, error)) from error
        _logger.warning("%s", _left_behind(place, error))


def bring_notes(place: StoragePath) -> None:
    """Brings what a command has just written at `place` to the store; `mirrored` tries again if that cannot be done."""
    if place.uri is None:
        return
    mirror = Mirror(place, COMMAND)
    with contextlib.suppress(StoreError), mirror.locked(PATIENCE_S) as is_ours:
        if is_ours:
            mirror.push()


def catch_up(place: StoragePath, patience_s: float = PATIENCE_S) -> None:
    """Takes the logs of runs that have ended, wherever they were trained.

    Raises:
        StoreError: the store cannot be reached.
    """
    if place.uri is not None:
        insist(lambda: pull_logs(place), patience_s)


@contextlib.contextmanager
def edited(place: StoragePath) -> Iterator[None]:
    """Its body writes to the log of a run that nobody trains.

    Raises:
        StoreError: the store cannot be reached.
    """
    if place.uri is None:
        yield
        return
    mirror = Mirror(place, RUN)
    with mirror.locked(PATIENCE_S):
        insist(lambda: mirror.pull(LOG))
        yield
        insist(mirror.push)


def _left_behind(place: StoragePath, error: StoreError) -> str:
    if str(error).startswith("not everything"):
        return str(error)
    whole = place.name.partition("/")[0]  # of a search's trial, the search
    words = shlex.join(["triaccel", "resume", whole, "--storage-path", place.storage])
    return (
        f"not everything of {place} is in the store ({error}). Nothing is lost: it is in {place.folder} on this "
        f"machine, and `{words}` typed here brings it there once the store answers"
    )
