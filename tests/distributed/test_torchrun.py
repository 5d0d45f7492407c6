"""A user's own script under `torchrun`: the loop finds the process group by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = """
import sys
import torch
from torch import nn
from triaccel_ray import BatchConfig, ControlConfig, ControlLoop

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
points = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(rank)  # other weights on each rank: those of rank 0 count
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = ControlConfig(batch=BatchConfig(start=32, minimum=32, maximum=32), every_steps=2)
loop = ControlLoop(model, optimizer, nn.functional.cross_entropy, (points, (points[:, 0] > 0).long()), config=config)
loop.train_epoch()
loop.close()
torch.save([loop.num_steps, *model.state_dict().values()], f"{sys.argv[1]}/{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_a_script_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*words, tmp_path / "train.py", tmp_path], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first[0] == second[0] == 3
    for mine, other in zip(first[1:], second[1:], strict=True):
        assert torch.equal(mine, other)
