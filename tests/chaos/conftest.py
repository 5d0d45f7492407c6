"""The fixtures of the service's tests, for those that kill, cut off and look through a browser."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.shell import Shell
from tests.service.conftest import *  # noqa: F403  # pytest finds fixtures by their names here

# Runs are compared number by number, and sums differ in their last bits. In BF16 one bit more rounds otherwise: without
# instructions for it, precision stays FP32, on every machine. Before the first Ray starts, for its workers inherit it.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.clear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounting.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
