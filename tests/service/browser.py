"""What a page holds, and through a headless Chromium what it looks like and shows once its scripts have run."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.service.waiting import DEADLINE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


class Tags(HTMLParser):
    """The page's tags and texts, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def screenshot(
    url: str, path: Path, *, width: int, height: int, wait_s: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Saves what the page looks like after `wait_s` seconds of its own time at most; returns rows x columns x 3."""
    _run(url, path.parent, wait_s, f"--window-size={width},{height}", f"--screenshot={path}")
    return np.asarray(Image.open(path).convert("RGB"))


def shown(url: str, folder: Path, *, wait_s: int = 0) -> str:
    """Returns the page's document after its scripts have run for `wait_s` seconds of its own time at most."""
    return _run(url, folder, wait_s, "--window-size=1600,1200", "--dump-dom")


def _run(url: str, folder: Path, wait_s: int, *options: str) -> str:
    assert CHROMIUM is not None
    profile = folder / "chromium"
    waiting = [f"--virtual-time-budget={1000 * wait_s}"] if wait_s else []
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", *waiting, *options, url]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    shutil.rmtree(profile, ignore_errors=True)
    return done.stdout


def num_colors(picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> int:
    """How many colors a picture has: one where it is blank."""
    return len(np.unique(picture.reshape(-1, 3).astype(np.int64) @ [1 << 16, 1 << 8, 1]))
