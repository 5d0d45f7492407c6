"""Steps any PyTorch optimizer with a learning rate per layer, and skips steps whose gradients overflow."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triaccel_ray.apply.fused_optimizer import FusedOptimizer, is_supported, obstacle_of
from triaccel_ray.apply.shards import Shards
from triaccel_ray.apply.split_weights import SplitWeights
from triaccel_ray.cuda.out_of_memory import first_line, is_out_of_memory
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.gradients import Gradients
from triaccel_ray.model.layers import Layer
from triaccel_ray.records.plan import Fault, FaultKind


class LayerwiseOptimizer:
    """Steps the user's optimizer with its learning rates scaled per layer.

    The optimizer's parameter groups, and so its schedulers and checkpoints, never see the scaling: groups are split for
    one step and restored after it. Parameters of equal scale stay in one group, so that without scaling nothing is
    split, and fused implementations launch as often as before. An optimizer may wrap others (`_with_wrapped`): their
    groups are split as well.

    On a GPU, a kernel with a learning rate per layer steps SGD, Adam and AdamW instead. If the user's optimizer is
    given hooks or options that the kernel does not support, its own `step` is called again.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[Layer],
        *,
        release_memory: Callable[[], object] = gc.collect,
        split: SplitWeights | None = None,
        buckets: Sequence[Sequence[int]] | None = None,
        in_8_bits: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Maps parameters to layers, and allocates SGD's momentum before the first step.

        The optimizer is shared among `ranks`, if given: each holds the state of its `Shards`, and steps these alone.

        Only the kernel, or its reference on a CPU, can step weights that are `split`, parameters in `buckets`, and
        state `in_8_bits`. Buckets are indices of `watched`, stepped one after another. If the user's optimizer takes
        over, weights are joined and state becomes FP32.
        """
        self.optimizer, self._release_memory, self._split_weights = optimizer, release_memory, split
        self._out_of_memory_details: list[str] = []
        self._obstacle = ""
        self._layer_of = {id(weight): layer.name for layer in layers for weight in layer.weights}
        self._shards = None if ranks is None or ranks.is_alone else Shards(self.parameters, ranks)
        self._optimizers = _with_wrapped(optimizer)
        supports_skips = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._skips_on_device = supports_skips and len(self._optimizers) == 1
        self._lr_factor = 1.0
        self._lr_scale: Mapping[str, float] = {}
        self.watched = watched_parameters(optimizer, layers)
        """The parameters whose gradients count, see `watched_parameters`."""
        self._has_buckets = buckets is not None
        self._fused: list[FusedOptimizer] = []
        """One per bucket; empty if the user's optimizer makes the steps."""
        if split is not None or buckets is not None or in_8_bits or is_supported(optimizer):
            for bucket in buckets or [range(len(self.watched))]:
                parameters = [self.watched[index] for index in bucket]
                others = [p for p in self.parameters if not self._owns(p)]
                fused = FusedOptimizer(optimizer, parameters, self._layer_of, in_8_bits=in_8_bits, without=others)
                self._fused.append(fused)
        else:
            _allocate_momentum(optimizer, self._owns)
        self._known = list(map(id, self.parameters))
        device = self.watched[0].device
        self._one, self._lr_factor_on_device = torch.ones((), device=device), torch.ones((), device=device)
        self._last_rates: Any = None
        self._last_companions: Mapping[int, Tensor] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter the optimizer updates."""
        return _updated_by(self.optimizer)

    def _owns(self, parameter: nn.Parameter) -> bool:
        return self._shards is None or self._shards.owns(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state; if ranks share it, a collective that returns all of it on rank 0."""
        state = self.optimizer.state_dict()
        return state if self._shards is None else self._shards.whole(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the optimizer's state, or this rank's share, from what `state_dict` has returned on rank 0."""
        self.optimizer.load_state_dict(state if self._shards is None else self._shards.part(state))

    @property
    def is_capturable(self) -> bool:
        """Whether `update` launches only device work, so that a CUDA graph can capture it."""
        return len(self._fused) > 0

    @property
    def waits_for_host(self) -> bool:
        """Whether the host checks if gradients are finite: neither kernel nor optimizer can skip on the device."""
        return not self._fused and not self._skips_on_device

    @property
    def rates(self) -> list[float]:
        """The factor on learning rates, and each group's rate; waits for the device if one is a tensor there."""
        return [self._lr_factor, *(float(group["lr"]) for group in self.optimizer.param_groups)]

    def set_rates(self, lr_factor: float, lr_scale: Mapping[str, float], companions: Mapping[int, Tensor]) -> None:
        """Sets the learning rates that `update` uses: group lr x `lr_factor` x the layer's scale.

        `companions` maps ids of parameters to the tensors written beside them. Only changes are uploaded.

        Raises:
            ValueError: parameters are stepped in buckets, and the kernel no longer supports the optimizer; or
                parameters have been added to or removed from the optimizer since this was built.
        """
        if list(map(id, self.parameters)) != self._known:
            raise ValueError(
                "the optimizer has other parameters than when the control loop was built: build another loop, and let "
                "it take over this one's state_dict"
            )
        if self._fused:
            self._require_steppable()
        is_new_factor = lr_factor != self._lr_factor
        self._lr_factor, self._lr_scale = lr_factor, lr_scale
        if not self._fused:
            return
        if is_new_factor:
            self._lr_factor_on_device.fill_(lr_factor)
        groups = self.optimizer.param_groups
        options = [tuple(value for key, value in group.items() if key != "params") for group in groups]
        rates = dict(lr_scale), options
        for fused in self._fused:
            if rates != self._last_rates:
                fused.set_hyperparameters(lr_scale)
            if companions is not self._last_companions:
                fused.set_companions(companions)
            fused.find_state()
        self._last_rates, self._last_companions = rates, companions

    def _require_steppable(self) -> None:
        """Falls back to the user's optimizer if the kernel does not support it; raises as `set_rates` does."""
        self._obstacle = obstacle_of(self.optimizer)
        if self._obstacle:
            self._fall_back(self._obstacle)

    def _fall_back(self, obstacle: str) -> None:
        """Falls back to the user's optimizer for good; it holds the state already."""
        if self._has_buckets:
            raise ValueError(f"{obstacle}: undo that, or give step_in_backward=False")
        if self._split_weights is not None:
            self._split_weights.release()
        for fused in self._fused:
            fused.release()
        self._fused = []

    def take_faults(self, *, step: int, batch_size: int) -> list[Fault]:
        """Returns, once, why the kernel is no longer used, and the out-of-memory errors recovered from."""
        faults = [
            Fault(kind=FaultKind.OUT_OF_MEMORY, step=step, phase="optimizer", batch_size=batch_size, detail=detail)
            for detail in self._out_of_memory_details
        ]
        if self._obstacle:
            fault = Fault(kind=FaultKind.CAPTURE_FAILED, step=step, phase="optimizer", detail=self._obstacle)
            faults.insert(0, fault)
        self._out_of_memory_details, self._obstacle = [], ""
        return faults

    def update(self, gradients: Gradients, *, divisor: Tensor | None, found_nonfinite: Tensor, bucket: int = 0) -> None:
        """Makes one optimizer step with `gradients`, those of `watched` or of one bucket of it.

        Gradients are divided by `divisor` first (fp32 scalar tensor: the loss scale, larger if the norm is clipped), so
        that step hooks see unscaled gradients. The step is skipped if `found_nonfinite` is 1. The device skips it if a
        kernel steps or the optimizer is fused, else the host, after reading the flag.
        """
        if self._fused:
            factor = self._lr_factor_on_device
            scale = self._one if divisor is None else divisor
            self._fused[bucket].launch(gradients, lr_factor=factor, loss_scale=scale, found_nonfinite=found_nonfinite)
            if self._has_buckets:
                self._raise_versions(self._fused[bucket].written(gradients))
        else:
            self._step_by_groups(gradients, divisor, found_nonfinite)
        if self._shards is not None:
            self._shards.exchange(self._last_companions if self._fused else {})

    def _raise_versions(self, written: Sequence[nn.Parameter]) -> None:
        """Raises the versions of the parameters `written`, so that autograd refuses to read them later in this pass.

        Autograd runs an operation that it differentiates by a weight before the weight's step. One that reads the
        weight as a constant may run later.
        """
        torch.autograd.graph.increment_version(written)
        if self._split_weights is not None:
            self._split_weights.accept_step(written)

    def _step_by_groups(self, gradients: Gradients, divisor: Tensor | None, found_nonfinite: Tensor) -> None:
        """Steps the user's optimizer with a parameter group for each learning rate."""
        for parameter, gradient in zip(gradients.parameters, gradients.tensors, strict=True):
            if gradient is not parameter.grad:
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
        own_gradients = [p.grad for p in self.parameters if p.grad is not None]
        if divisor is not None and own_gradients:
            torch._foreach_mul_(own_gradients, 1.0 / divisor)
        own_groups = [each.param_groups for each in self._optimizers]
        # By identity: an optimizer shares groups with those that it wraps, and may write to them.
        by_id = {id(group): group for groups in own_groups for group in groups}
        parts_of = {key: self._split_by_rate(group) for key, group in by_id.items()}
        for each, groups in zip(self._optimizers, own_groups, strict=True):
            each.param_groups = [part for group in groups for part in parts_of[id(group)]]
        try:
            self._step_with_retry(found_nonfinite)
        finally:
            for each, groups in zip(self._optimizers, own_groups, strict=True):
                each.param_groups = groups
            for key, group in by_id.items():
                for part in parts_of[key]:  # some optimizers keep step counts or adapted factors there
                    group.update({name: value for name, value in part.items() if name not in ("params", "lr")})

    def _split_by_rate(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the parameters of `group` that this rank steps as one group for each distinct learning rate."""
        by_scale: defaultdict[float, list[nn.Parameter]] = defaultdict(list)
        for parameter in filter(self._owns, group["params"]):
            layer = self._layer_of.get(id(parameter), "")
            by_scale[self._lr_scale.get(layer, 1.0)].append(parameter)
        lr = group["lr"] * self._lr_factor
        return [{**group, "params": parameters, "lr": lr * scale} for scale, parameters in by_scale.items()]

    def _step_with_retry(self, found_nonfinite: Tensor) -> None:
        """Makes the step; retries it after an out-of-memory error if no parameter or state has been written yet."""
        # Fused implementations do not raise version counters: what they have written is unknown.
        is_fused = any(group.get("fused") for each in self._optimizers for group in each.param_groups)
        before = {} if is_fused else self._versions()
        try:
            self._step(found_nonfinite)
            return
        except (RuntimeError, MemoryError) as error:
            is_untouched = all(before.get(key, 0) == version for key, version in self._versions().items())
            if not is_out_of_memory(error) or is_fused or not is_untouched:
                raise
            self._out_of_memory_details.append(first_line(error))
        # Outside the handler: the traceback no longer holds the attempt's tensors.
        self._release_memory()
        self._step(found_nonfinite)

    def _versions(self) -> dict[int, int]:
        """Returns the version counters of parameters and state tensors, by their ids."""
        states = [values for each in self._optimizers for values in each.state.values()]
        state = [value for values in states for value in values.values()]
        return {id(value): value._version for value in (*self.parameters, *state) if isinstance(value, Tensor)}

    def _step(self, found_nonfinite: Tensor) -> None:
        is_fused = self._skips_on_device and all(group.get("fused") for group in self.optimizer.param_groups)
        if is_fused and found_nonfinite.device.type != "cpu":  # a CPU reads it without waiting
            # Attributes that PyTorch's fused optimizers read; torch.amp.GradScaler sets the same.
            vars(self.optimizer).update(grad_scale=None, found_inf=found_nonfinite)
            try:
                self.optimizer.step()
            finally:
                vars(self.optimizer).update(found_inf=None)
        elif not found_nonfinite.item():
            self.optimizer.step()


def watched_parameters(optimizer: torch.optim.Optimizer, layers: Sequence[Layer]) -> list[nn.Parameter]:
    """Returns the parameters whose gradients count: those the optimizer updates, then other weights of layers."""
    return list(dict.fromkeys([*_updated_by(optimizer), *(weight for layer in layers for weight in layer.weights)]))


def _with_wrapped(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Returns `optimizer` and those that it steps its parameters by, as Lookahead does, or Muon and AdamW in one class.

    They are its attributes, or in lists, tuples or dicts that are, and so are those that they wrap themselves.
    """
    found = [optimizer]
    for each in found:  # grows meanwhile
        attributes = list(vars(each).values())
        for value in vars(each).values():
            if isinstance(value, list | tuple | dict):
                attributes.extend(value.values() if isinstance(value, dict) else value)
        inner = [value for value in attributes if isinstance(value, torch.optim.Optimizer) and value not in found]
        found.extend(value for value in dict.fromkeys(inner) if set(_updated_by(value)) & set(_updated_by(optimizer)))
    return found


def _updated_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _allocate_momentum(optimizer: torch.optim.Optimizer, owns: Callable[[nn.Parameter], bool]) -> None:
    """Allocates missing momentum buffers of SGD as zeros, with which the first step computes the same.

    A fused first step that is skipped would leave them uninitialized (PyTorch 2.11 to 2.15).
    """
    if type(optimizer) is not torch.optim.SGD:
        return
    for group in optimizer.param_groups:
        # With dampening the first step differs from the others: leave it to the optimizer.
        if group["momentum"] == 0 or group["dampening"] != 0:
            continue
        for parameter in filter(owns, group["params"]):
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
