import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triaccel_ray.service.tracking import log_position
from triaccel_ray.service.tracking.log_position import Position, TruncatedLogError, lines_after

actions = st.lists(st.tuples(st.sampled_from(("append", "cut", "read")), st.integers(0, 8)), max_size=25)


@given(actions=actions, block_bytes=st.sampled_from([1, 16, 2**20]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_is_seen_after_any_cuts_and_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, actions: list[tuple[str, int]], block_bytes: int
) -> None:
    monkeypatch.setattr(log_position, "BLOCK_BYTES", block_bytes)
    path, position, numbers = tmp_path / "log", Position(), itertools.count()
    written: list[bytes] = []
    seen: list[bytes] = []
    for action, amount in [*actions, ("read", 0)]:
        if action == "append":
            written += [f"line {next(numbers)}\n".encode() for _ in range(amount)]
        elif action == "cut":
            del written[amount:]
        path.write_bytes(b"".join(written))
        if action == "read":
            if seen != written[: len(seen)]:
                with pytest.raises(TruncatedLogError):
                    next(lines_after(position, path))
                seen, position = [], Position()
            for lines in lines_after(position, path):
                seen += lines
                position = position.after(lines)
            assert (seen, position.num_lines) == (written, len(written))


def test_a_line_without_its_end_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    assert list(lines_after(Position(), path)) == [[b"one\n"]]
    position = Position().after([b"one\n"])
    assert list(lines_after(position, path)) == []
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert list(lines_after(position, path)) == [[b"two\n", b"three\n"]]


def test_a_line_that_is_completed_while_it_is_read_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntw")
    blocks = lines_after(Position(), path)
    assert next(blocks) == [b"one\n"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert list(blocks) == [[b"two\n"]]
