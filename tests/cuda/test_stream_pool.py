import threading

import pytest
import torch

from triaccel_ray.cuda.stream_pool import LentStream

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def test_a_backward_pass_runs_in_the_calling_thread_and_only_meanwhile() -> None:
    threads: list[int] = []
    weight = torch.ones(4, 4, device=DEVICE, requires_grad=True)
    weight.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (weight @ weight).sum().backward()
    with LentStream(DEVICE).current():
        (weight @ weight).sum().backward()
    (weight @ weight).sum().backward()
    before, within, after = threads
    assert within == threading.get_ident() != before == after


def test_a_stream_that_was_given_back_is_lent_again() -> None:
    def computed_on(lent: LentStream) -> int:
        with lent.current():
            return torch.cuda.current_stream(DEVICE).cuda_stream

    first = LentStream(DEVICE)
    used = computed_on(first)
    assert computed_on(LentStream(DEVICE)) != used
    del first
    assert computed_on(LentStream(DEVICE)) == used
