import itertools
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triaccel_ray.service.tracking import log_tail
from triaccel_ray.service.tracking.log_tail import LogTail

actions = st.lists(st.tuples(st.sampled_from(("append", "cut", "read")), st.integers(0, 8)), max_size=25)


@given(actions=actions, block_bytes=st.sampled_from([1, 16, 2**20]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_is_seen_after_any_cuts_and_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: list[tuple[str, int]], block_bytes: int
) -> None:
    monkeypatch.setattr(log_tail, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "log"
    path.unlink(missing_ok=True)
    tail, written, seen, numbers = LogTail(path), [], [], itertools.count()
    path.touch()
    for action, amount in [*actions, ("read", 0)]:
        if action == "append":
            written += [f"line {next(numbers)}".encode() for _ in range(amount)]
        elif action == "cut":
            del written[amount:]
        path.write_bytes(b"".join(line + b"\n" for line in written))
        if action == "read":
            for block in tail.blocks():
                if tail.num_lines == 0:
                    seen = []
                seen += block
            if not written:
                seen = []
            assert (seen, tail.num_lines) == (written, len(written))
            assert tail.last_line == (written[-1] if written else b"")


def test_a_file_in_the_place_of_another_is_read_on(tmp_path: Path) -> None:
    path, tail = tmp_path / "log", LogTail(tmp_path / "log")
    path.write_bytes(b"one\ntwo\nthree\n")
    assert list(tail.blocks()) == [[b"one", b"two", b"three"]]

    def replace(content: bytes) -> None:
        (tmp_path / "new").write_bytes(content)
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        os.utime(tmp_path / "new", ns=times)  # as where the clock of the file system is coarse
        (tmp_path / "new").replace(path)

    replace(b"one\ntwo\nthree\n")
    assert tail.changed
    assert (list(tail.blocks()), tail.changed) == ([], False)
    replace(b"one\ntwo\nTHREE\n")
    assert list(tail.blocks()) == [[b"one", b"two", b"THREE"]]
    with path.open("ab") as file:
        replace(b"one\ntwo\n")
        file.write(b"written to the file that was there\n")
    assert list(tail.blocks()) == [[b"one", b"two"]]


def test_a_line_without_its_end_is_still_being_written_and_a_failed_block_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LogTail(path)
    assert (list(tail.blocks()), tail.changed) == ([], False)
    path.write_bytes(b"one\ntw")
    assert tail.changed
    assert next(tail.blocks()) == [b"one"]  # whoever takes it fails on it, and asks for no other
    assert tail.changed
    assert list(tail.blocks()) == [[b"one"]]
    assert (list(tail.blocks()), tail.changed) == ([], False)
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert tail.changed
    assert list(tail.blocks()) == [[b"two", b"three"]]
