"""examples/ run as a user runs them, and print what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def printed(name: str, folder: Path) -> str:
    """What the example prints, run in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs Hugging Face's transformers")
def test_a_model_of_hugging_face(tmp_path: Path) -> None:
    text = printed("hugging_face.py", tmp_path)
    assert text.count("epoch ") == 4
    assert float(re.findall(r"right about held-out texts: (\S+) %", text)[0]) > 90


@pytest.mark.timeout(1800)
def test_a_search_from_python(tmp_path: Path) -> None:
    text = printed("search_from_python.py", tmp_path)
    assert "triaccel run --from digits-thresholds-" in text
    assert re.search(
        r"^best: \d+\.\d % in \d+\.\d\d s an epoch\ntau \S+ to \S+\nrho \S+ to \S+\n$", text, flags=re.MULTILINE
    )
    assert Path(re.findall(r"^page: (.+)", text, flags=re.MULTILINE)[0]).is_file()
