"""Records how much memory the regions of a model save in a pass, and how long they take, for the memory planner."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from triaccel_ray.apply.offload import Kept, RegionWeights, movable_bytes
from triaccel_ray.records.codec import decode, encode
from triaccel_ray.records.signals import RegionSignal

Kind = tuple[int, tuple[torch.dtype, ...]]
"""Samples of a micro-batch, and the layers' dtypes."""
_Bytes = dict[StorageWeakRef, int]
"""Weak reference to memory -> its bytes; addresses would not do, as they are reused."""
_Times = dict[str, tuple[float, float]]
"""Region -> milliseconds of its forward and its backward pass."""


class _RecordedCall:
    """One call of a region: the memory that it reads and saves, and when its passes begin and end."""

    def __init__(self, recorder: RegionRecorder, name: str, region: nn.Module, inputs: Sequence[Tensor]) -> None:
        self.name, self._recorder = name, recorder
        self._weights = RegionWeights.of(region) if recorder.counts else None
        self.inputs: _Bytes = {}
        self.saved: _Bytes = {}
        self.movable: _Bytes = {}
        for tensor in inputs:
            if self._weights is not None and not self._weights.include(tensor):
                storage = tensor.untyped_storage()
                self.inputs[StorageWeakRef(storage)] = storage.nbytes()
            if tensor.grad_fn is not None:  # a hook on a leaf would stay
                tensor.register_hook(lambda _: self._mark("backward_end"))
        self.marks: dict[str, Any] = {}
        self.excluded: list[tuple[Any, Any]] = []
        self._mark("begin")

    def end(self, outputs: Sequence[Tensor]) -> None:
        """Marks the end of the forward pass, and has the start of the backward pass marked."""
        self._mark("end")
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(self._begin_backward)

    @contextlib.contextmanager
    def excluding(self) -> Iterator[None]:
        """Returns a context for recomputation or waiting, which does not count as the region's backward pass."""
        begin = self._recorder.mark()
        try:
            yield
        finally:
            self.excluded.append((begin, self._recorder.mark()))

    def counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `call` so that it counts what is saved the first time, under the hooks that are in force then."""
        weights = self._weights
        if weights is None:
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal weights
            counting, weights = weights, None
            if counting is None:
                return call(*args, **kwargs)
            # Private: hooks do not nest, and there is no public way to ask for those in force; None without any.
            hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
            keep, give = hooks or (Kept, Kept.unpack)

            def pack(tensor: Tensor) -> Any:
                self._count(tensor, counting)
                return keep(tensor)

            with torch.autograd.graph.saved_tensors_hooks(pack, give):
                return call(*args, **kwargs)

        return counted

    def _count(self, tensor: Tensor, weights: RegionWeights) -> None:
        if weights.include(tensor):
            return
        storage = tensor.untyped_storage()
        self.saved[StorageWeakRef(storage)] = storage.nbytes()
        if num_bytes := movable_bytes(tensor, self._recorder.device):
            self.movable[StorageWeakRef(storage)] = num_bytes

    def _mark(self, what: str) -> None:
        self.marks[what] = self._recorder.mark()

    def _begin_backward(self, _: Tensor) -> None:
        if "backward" not in self.marks:  # the first of several outputs
            self._mark("backward")


class RegionRecorder:
    """Records the calls of regions in one forward and backward pass of a micro-batch.

    Its timing events may be captured: after each replay of the graph they hold the times of that replay.
    """

    def __init__(self, device: torch.device, kind: Kind, *, counts: bool) -> None:
        """Records times; with `counts`, sizes as well."""
        self.device, self.kind, self.counts = device, kind, counts
        self._calls: list[_RecordedCall] = []
        self._end: Any = None
        self._events: list[Any] = []  # a captured graph reads all of them, those of replaced marks as well
        self.sizes: dict[str, tuple[int, int, int]] = {}
        """Region -> bytes saved, of inputs, and that can be moved; known after `finish`, if counted."""
        self.is_read = False
        """Whether the times have been read."""

    def begin(self, name: str, region: nn.Module, inputs: Sequence[Tensor]) -> _RecordedCall:
        """Starts the record of a call with these tensors among its arguments."""
        self._calls.append(_RecordedCall(self, name, region, inputs))
        return self._calls[-1]

    def finish(self) -> None:
        """Marks the end of the backward pass."""
        self._end = self.mark()
        if self.counts:
            self.sizes = self._sizes()

    def mark(self) -> Any:
        """Returns the present moment: seconds on a CPU, else an event on the current stream."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self.device))
        self._events.append(event)
        return event

    def times(self) -> _Times:
        """Returns the milliseconds of the pass, or of the last replay; the device must have ended it."""
        self.is_read = True
        found: dict[str, tuple[float, float]] = {}
        for call in self._calls:
            marks = call.marks
            forward, backward = found.get(call.name, (0.0, 0.0))
            forward += _milliseconds(marks["begin"], marks["end"])
            if "backward" in marks:
                excluded = sum(_milliseconds(*pair) for pair in call.excluded)
                span = _milliseconds(marks["backward"], marks.get("backward_end", self._end))
                backward += max(span - excluded, 0.0)
            found[call.name] = forward, backward
        return found

    def _sizes(self) -> dict[str, tuple[int, int, int]]:
        """Returns each region's bytes; what a later region gets as input, and saves, counts there alone."""
        sizes: defaultdict[str, tuple[int, int, int]] = defaultdict(lambda: (0, 0, 0))
        later: set[StorageWeakRef] = set()
        for call in reversed(self._calls):
            parts = (call.saved, call.inputs, call.movable)
            own = (sum(size for ref, size in part.items() if ref not in later) for part in parts)
            saved, inputs, movable = map(sum, zip(sizes[call.name], own, strict=True))
            sizes[call.name] = saved, inputs, movable
            later |= call.inputs.keys() & call.saved.keys()
        return dict(reversed(sizes.items()))


def _mean_bytes(dtypes: Sequence[torch.dtype]) -> float:
    return sum(dtype.itemsize for dtype in dtypes) / len(dtypes) if dtypes else 1.0


def _milliseconds(first: Any, last: Any) -> float:
    return float(1e3 * (last - first) if isinstance(first, float) else first.elapsed_time(last))


class RegionCosts:
    """Sizes and times of regions for each kind of pass, found once each: the first pass counts, later ones are timed.

    The first pass of a kind also tunes and compiles, so it is not timed. A captured pass replaces times of eager ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[Kind, dict[str, tuple[int, int, int]]] = {}
        self._times: dict[Kind, _Times] = {}
        # Kinds that need not be counted, and timed, again; the latter with whether the timed pass was captured.
        self._counted: set[Kind] = set()
        self._timed_captured: dict[Kind, bool] = {}

    def recorder(self, kind: Kind, *, is_captured: bool = False) -> RegionRecorder | None:
        """Returns the recorder for the next pass of this kind; None if all is known."""
        was_captured = self._timed_captured.get(kind)
        if was_captured is None or (is_captured and not was_captured):
            return RegionRecorder(self._device, kind, counts=kind not in self._counted)
        return None

    def learn(self, recorder: RegionRecorder, *, is_captured: bool = False) -> None:
        """Stores what a pass has recorded; waits for the device."""
        if recorder.counts:
            self._sizes[recorder.kind] = recorder.sizes
            self._counted.add(recorder.kind)
            if not is_captured:
                return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._times[recorder.kind] = recorder.times()
        self._timed_captured[recorder.kind] = is_captured

    def measure_again(self) -> None:
        """Has the next passes of each kind recorded again; what is known stays until then."""
        self._counted.clear()
        self._timed_captured.clear()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the costs in all kinds of passes."""
        kinds = self._sizes.keys() & self._times.keys()
        return [
            {"num_samples": kind[0], "dtypes": list(map(str, kind[1])), "regions": encode(self.signals(kind))}
            for kind in kinds
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Stores what `state_dict` returned; passes of these kinds are recorded all the same."""
        for each in state:
            kind = each["num_samples"], tuple(getattr(torch, name.removeprefix("torch.")) for name in each["dtypes"])
            regions = decode(tuple[RegionSignal, ...], each["regions"])
            self._sizes[kind] = {r.name: (r.saved_bytes, r.input_bytes, r.offloadable_bytes) for r in regions}
            self._times[kind] = {r.name: (r.forward_ms, r.backward_ms) for r in regions}

    def signals(self, kind: Kind, *, scales: bool = False) -> tuple[RegionSignal, ...]:
        """Returns the costs of the regions in a pass of this kind, in the order of their calls; empty if not known.

        With `scales`, an unknown size has the costs of the nearest known one in proportion, if possible in the same
        dtypes. Bytes of other dtypes are then in proportion to their mean size, too.
        """
        num_samples, dtypes = kind
        known = self._sizes.keys() & self._times.keys()
        near = [kind] if not scales else sorted(known, key=lambda k: (k[1] != dtypes, abs(k[0] - num_samples), k[0]))
        if not near or near[0] not in known:
            return ()
        share, of_bytes = num_samples / near[0][0], _mean_bytes(dtypes) / _mean_bytes(near[0][1])
        times = self._times[near[0]]
        return tuple(
            RegionSignal(
                name=name,
                saved_bytes=round(share * of_bytes * saved),
                input_bytes=round(share * of_bytes * inputs),
                offloadable_bytes=round(share * of_bytes * movable),
                forward_ms=share * times[name][0],
                backward_ms=share * times[name][1],
            )
            for name, (saved, inputs, movable) in self._sizes[near[0]].items()
            if name in times
        )
