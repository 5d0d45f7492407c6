from dataclasses import replace

import pytest
import torch

from tests.build import BF16, CPU, FP16, FP32, ONE, blobs, cache_of, mlp, step_of
from triaccel_ray.apply.actuators import Actuators
from triaccel_ray.cuda.graphs import GraphPool
from triaccel_ray.records.plan import Applied, Fault, FaultKind, Plan

OLD = Plan(batch_size=8, precision={"0": BF16, "2": FP32, "4": BF16}, num_micro_batches=2)
NEW = Plan(batch_size=16, precision={"0": FP16, "2": FP32, "4": BF16}, num_micro_batches=4)


def parts_and_dtype(actuators: Actuators) -> tuple[int, torch.dtype]:
    """What a step really does: in how many parts it passes, and what its first layer returns."""
    model, dtypes = actuators._cache.step.model, []
    hook = model[0].register_forward_hook(lambda module, inputs, outputs: dtypes.append(outputs.dtype))
    actuators._cache.step.run(torch.arange(16), ONE, step=0)
    hook.remove()
    return len(dtypes), dtypes[0]


def actuators_of(plan: Plan) -> Actuators:
    return Actuators(plan, cache_of(step_of(mlp(), blobs(16))), GraphPool(CPU))


def test_a_plan_is_in_force_at_once_and_a_later_one_that_fails_leaves_it_and_comes_back_as_a_fault() -> None:
    actuators = actuators_of(OLD)
    assert parts_and_dtype(actuators) == (2, torch.bfloat16)
    assert actuators.apply(NEW, step=3) == Applied(plan=NEW)
    assert parts_and_dtype(actuators) == (4, torch.float16)
    text = """KeyError: "layers ['7'] are not in the model\""""
    fault = Fault(kind=FaultKind.APPLY_FAILED, step=4, phase="apply", batch_size=8, detail=text)
    impossible = replace(OLD, precision={**OLD.precision, "7": FP16})
    assert actuators.apply(impossible, step=4) == Applied(plan=NEW, faults=(fault,))
    assert actuators.plan is NEW
    assert parts_and_dtype(actuators) == (4, torch.float16)
    with pytest.raises(KeyError, match="'7'"):  # a first plan leaves nothing in force
        actuators_of(impossible)
