"""`python -m benchmarks`: every benchmark after another, each in a process of its own; exits 1 if one refuses."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ALL = (
    "training_step",
    "grad_stats",
    "optimizer_step",
    "image_batch",
    "batch_norm_act",
    "curvature",
    "curvature_agreement",
    "loader",
    "tracking",
    "search_overhead",
)


def main() -> int:
    """Runs the benchmarks asked for and returns how the worst one ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ALL, []], help="which; all of them by default")
    parser.add_argument("--out", type=Path, help="folder for a text file of each one's output")
    args = parser.parse_args()
    worst = 0
    for name in args.names or ALL:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}"], cwd=Path(__file__).parents[1], capture_output=True, text=True
        )
        text = f"{done.stdout}{done.stderr[-4000:] if done.returncode else ''}"
        print(f"== {name}: exit {done.returncode}, {time.perf_counter() - start:.0f} s\n{text}", flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{name}.txt").write_text(text)
        worst = max(worst, done.returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
