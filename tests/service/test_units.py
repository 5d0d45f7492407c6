from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from triaccel_ray.service.units import format_bytes, format_exactly, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512B", 512),
        ("1kB", 1000),
        ("2GiB", 2 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("1500MB", 1_500_000_000),
        ("300MiB", 300 * 2**20),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("2KiB", 2048),
        (" 2 gib ", 2 * 2**30),
        ("2GIB", 2 * 2**30),
        ("1.9B", 1),
    ],
)
def test_amounts_that_people_write(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "0",
        "0GiB",
        "0.4B",
        "-1GiB",
        "2,5GiB",
        "1e9",
        "nan",
        "inf",
        "2 G i B",
        "2GiBB",
        "2Gi",
        "9" * 400,
        "2",
        "2048",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    message = f"amount of memory = {text!r}: must be a positive number with a unit, such as 2GiB or 1500MB"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (999.4 * 2**20, "999 MiB"),
        (999.6 * 2**20, "1000 MiB"),
        (1023 * 2**20, "1023 MiB"),
        (2 * 2**30, "2 GiB"),
        (139.8 * 2**30, "140 GiB"),
        (2000 * 2**30, "2000 GiB"),
    ],
)
def test_amounts_that_people_read(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(num_bytes=st.integers(1, 2**50))
@example(num_bytes=1152)
def test_what_is_written_is_read_back_to_three_digits(num_bytes: int) -> None:
    # half a unit of the third digit, and a fraction of a byte that is dropped
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes + 1


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1B"),
        (2 * 2**30, "2GiB"),
        (3 * 2**29, "1536MiB"),
        (1048 * 2**20, "1048MiB"),
        (33_825_587, "33825587B"),
        (10_240 * 2**30, "10240GiB"),
        (10 * 2**20 + 1024, "10241KiB"),
    ],
)
def test_amounts_in_a_command(num_bytes: int, text: str) -> None:
    assert format_exactly(num_bytes) == text


@given(num_bytes=st.integers(1, 2**50))
def test_a_command_is_read_back_exactly(num_bytes: int) -> None:
    assert parse_bytes(format_exactly(num_bytes)) == num_bytes
