import subprocess
import sys
import threading

import pytest
import torch

from triaccel_ray.cuda.stream_pool import PooledStream

MULTIPLYING = """
import sys
import torch
from triaccel_ray.cuda.stream_pool import PooledStream
from triaccel_ray.measure.memory import CudaMemory
device = torch.device("cuda", 0)
memory = CudaMemory(device, None)
layer = torch.nn.Linear(64, 64, device=device)
def multiply():
    return layer(torch.ones(64, 64, device=device)).sum()
def sample():
    torch.cuda.empty_cache()
    return memory.sample()
with PooledStream(device).current():
    multiply()
    forward = sample()
    if sys.argv[1] == "as usual":
        torch.autograd.set_multithreading_enabled(True)
    multiply().backward()
    print(int(memory.source == "nvml process"), sample() - forward)
"""


pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_a_backward_pass_runs_in_the_calling_thread_and_only_meanwhile() -> None:
    threads: list[int] = []
    weight = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    weight.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (weight @ weight).sum().backward()
    with PooledStream(DEVICE).current():
        (weight @ weight).sum().backward()
    (weight @ weight).sum().backward()
    before, within, after = threads
    assert within == threading.get_ident() != before == after


def test_a_backward_pass_takes_no_workspaces_of_its_own() -> None:
    def grown(how: str) -> int:
        command = [sys.executable, "-c", MULTIPLYING, how]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sees_processes, num_bytes = map(int, shown.split())
        return num_bytes if sees_processes else pytest.skip("NVML hides processes here")

    # A handle takes 64 MiB on an H200 and a workspace 32; the backward pass brings kernels' code either way.
    assert grown("on the stream") <= 24 * 2**20
    assert grown("as usual") >= 64 * 2**20


def test_a_stream_that_was_given_back_is_lent_again() -> None:
    def computed_on(lent: PooledStream) -> int:
        with lent.current():
            return torch.cuda.current_stream(DEVICE).cuda_stream

    first = PooledStream(DEVICE)
    used = computed_on(first)
    assert computed_on(PooledStream(DEVICE)) != used
    del first
    assert computed_on(PooledStream(DEVICE)) == used
