import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triaccel_ray.service.units import counted, format_bytes, format_exactly, parse_bytes

WRITTEN = {"512B": 512, "1kB": 1000, "1.5GiB": 3 * 2**29, "1500MB": 1_500_000_000, "1TiB": 2**40, "1.9B": 1}
WRITTEN |= {" 2 gib ": 2 * 2**30, "2GIB": 2 * 2**30}
REFUSED = ["", "GiB", "0GiB", "0.4B", "-1GiB", "2,5GiB", "1e9", "nan", "2 G i B", "2Gi", "9" * 400 + "B", "2"]
READ = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB", 999.4 * 2**20: "999 MiB", 999.6 * 2**20: "1000 MiB"}
READ |= {1023 * 2**20: "1023 MiB", 2 * 2**30: "2 GiB", 139.8 * 2**30: "140 GiB", 2000 * 2**30: "2000 GiB"}
EXACT = {1: "1B", 3 * 2**29: "1536MiB", 33_825_587: "33825587B", 10_240 * 2**30: "10240GiB"}


def test_amounts_that_people_write_and_read() -> None:
    assert {text: parse_bytes(text) for text in WRITTEN} == WRITTEN
    assert {num_bytes: format_bytes(num_bytes) for num_bytes in READ} == READ
    assert {num_bytes: format_exactly(num_bytes) for num_bytes in EXACT} == EXACT


def test_one_has_no_plural() -> None:
    assert [counted(number, "seed") for number in (0, 1, 2)] == ["0 seeds", "1 seed", "2 seeds"]


@pytest.mark.parametrize("text", REFUSED)
def test_other_texts_are_refused(text: str) -> None:
    message = f"amount of memory = {text!r}: must be a positive number with a unit, such as 2GiB or 1500MB"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bytes(text)


@given(num_bytes=st.integers(1, 2**50))
@example(num_bytes=1152)
def test_what_is_written_is_read_back(num_bytes: int) -> None:
    # half a unit of the third digit, and a fraction of a byte that is dropped
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes + 1
    assert parse_bytes(format_exactly(num_bytes)) == num_bytes
