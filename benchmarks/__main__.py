"""`python -m benchmarks` runs all benchmarks in sequence, each in its own process; it exits with 1 if one fails."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ALL: tuple[tuple[str, ...], ...] = (
    ("any_model", "--methods", "loop", "graph"),
    ("elastic",),
    ("grad_stats",),
    ("optimizer_step",),
    ("step_end",),
    ("image_batch",),
    ("batch_norm_act",),
    ("depthwise_conv",),
    ("curvature",),
    ("tracking",),
    ("search_overhead",),
)
"""Module and options of each benchmark, in running order."""


def main() -> int:
    """Runs the selected benchmarks and returns their highest exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*(words[0] for words in ALL), []], help="which; all by default")
    args = parser.parse_args()
    worst = 0
    for name, *options in ALL:
        if args.names and name not in args.names:
            continue
        title = " ".join([name, *options])
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *options],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        text = f"{done.stdout}{done.stderr[-4000:] if done.returncode else ''}"
        print(f"== {title}: exit {done.returncode}, {time.perf_counter() - start:.0f} s\n{text}", flush=True)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
