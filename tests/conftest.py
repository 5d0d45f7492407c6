import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: the kernels then run on the CPU

torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way

# Machines that run the tests differ in speed and are shared; how long an example takes says nothing of the code.
settings.register_profile("suite", deadline=None, max_examples=60)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
