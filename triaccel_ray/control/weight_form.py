"""Gathers what decides how weights are stored and when they are updated, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from triaccel_ray.apply.compile import is_compiled
from triaccel_ray.apply.fused_optimizer import state_bytes, without_kernel_because
from triaccel_ray.apply.optimizer import watched_parameters
from triaccel_ray.apply.precision import fp8_layers, refused_precisions, supported_precisions
from triaccel_ray.apply.step_in_backward import buckets_of
from triaccel_ray.apply.weights import multiplied_parameters, parameters_of_one
from triaccel_ray.config import ControlConfig, ExecutionConfig
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.data.sources import DataSource, TensorSource
from triaccel_ray.decide.initial import initial_decision
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.kernels.multi_tensor import is_dense
from triaccel_ray.measure.saved_bytes import counting_saved_bytes
from triaccel_ray.model.dry_run import require_working, two_samples
from triaccel_ray.model.gradients import has_hooks
from triaccel_ray.model.layers import Layer, Loss
from triaccel_ray.model.regions import unfused_because
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.plan import Precision
from triaccel_ray.records.signals import ParameterSignal


@dataclass(frozen=True, kw_only=True)
class CheckedTask:
    """What is trained; two samples pass through it to find out what a step saves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    source: DataSource
    """The training samples. Tensors are not delivered on the device yet: the optimizer's state comes first."""


def parameter_signal(
    task: CheckedTask,
    layers: Sequence[Layer],
    config: ControlConfig,
    *,
    limits: tuple[int | None, int | None],
    ranks: Ranks,
) -> ParameterSignal:
    """Returns what parameters, gradients and the first step take; `limits` are budget and headroom in bytes.

    On several ranks it is rank 0's, so that all decide the same.
    """
    model, optimizer = task.model, task.optimizer
    device = next(model.parameters()).device
    levels, may_use_fp16 = _precisions(model, layers, config, device)
    watched = watched_parameters(optimizer, layers)
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    own = parameters_of_one(layers, updated)
    low = [p for name, level in levels.items() if level in (Precision.FP8, Precision.BF16) for p in own[name]]
    unsupported = without_kernel_because(optimizer)
    if not unsupported and any(map(has_hooks, updated)):
        unsupported = "hooks act on gradients"
    state = 0 if unsupported else state_bytes(optimizer, in_8_bits=config.optimizer_state == "8bit")
    shared_state_bytes = ranks.largest_share(state) if all(map(is_dense, updated)) else state
    saved, failure = (0, "") if unsupported else _saved_bytes(task, device)
    bucket_sizes = [sum(watched[index].numel() for index in bucket) for bucket in buckets_of(model, watched)]
    on_gpu = device.type == "cuda"
    signal = ParameterSignal(
        num_elements=sum(p.numel() for p in updated if p.requires_grad),
        num_in_bf16=sum(p.numel() for p in low if p.dim() >= 2 and p.requires_grad),
        bucket_elements=max(bucket_sizes),
        model_bytes=sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        state_bytes=state,
        saved_bytes=saved * ranks.largest_share(config.batch.start) // 2,
        data_bytes=_data_bytes(task.source) if not on_gpu or config.execution.data_on == "device" else 0,
        budget_bytes=limits[0],
        headroom_bytes=limits[1],
        keeps_copies=on_gpu and not is_compiled(model) and {id(p) for p in low} <= multiplied_parameters(layers),
        may_use_fp16=may_use_fp16,
        num_ranks=ranks.world_size,
        shared_state_bytes=shared_state_bytes,
        unsupported_because=unsupported or failure,
    )
    return decode(ParameterSignal, ranks.all_gather_object(encode(signal))[0])


def _precisions(
    model: nn.Module, layers: Sequence[Layer], config: ControlConfig, device: torch.device
) -> tuple[dict[str, Precision], bool]:
    """Returns the precision in which each layer starts, and whether any may compute in FP16 later."""
    execution = config.execution
    may_fuse = execution.fuse and not unfused_because(model)  # else it is compiled for certain
    compiled = is_compiled(model) or compiles(execution, device, is_fused=may_fuse)
    in_fp8 = fp8_layers(layers, config.precision, device)
    without = refused_precisions(config.precision, device, is_compiled=compiled, in_fp8=in_fp8)
    supported = [(layer.name, supported_precisions(layer, without=without, in_fp8=in_fp8)) for layer in layers]
    levels = initial_decision(config, supported).plan.precision
    adapts = config.precision.enabled and config.precision.tau_low > 0.0
    may_use_fp16 = Precision.FP16 in levels.values() or (
        adapts and any(Precision.FP16 in offered for _, offered in supported)
    )
    return dict(levels), may_use_fp16


def compiles(execution: ExecutionConfig, device: torch.device, *, is_fused: bool) -> bool:
    """Returns whether the model is to be compiled, given whether its norms are fused."""
    return execution.compile == "on" or (execution.compile == "auto" and device.type == "cuda" and not is_fused)


def _saved_bytes(task: CheckedTask, device: torch.device) -> tuple[int, str]:
    """Returns what two samples save for the backward pass in FP32, and why that cannot be measured; empty if it can."""
    source = task.source
    try:
        if isinstance(source, TensorSource):
            source = source.part(two_samples(source)).to(device)
        with counting_saved_bytes(task.model) as counted:
            require_working(task.model, task.loss, source)
    except Exception as error:  # any, of the user's code: the check of model and data that follows raises it
        return 0, f"two samples cannot be passed to measure what they save: {first_line(error)}"
    return sum(counted.values()), ""


def _data_bytes(source: DataSource) -> int:
    return source.inputs.nbytes + source.targets.nbytes if isinstance(source, TensorSource) else 0
