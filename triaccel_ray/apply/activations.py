"""Keeps, recomputes or offloads the tensors that regions of a model save for the backward pass."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from triaccel_ray.apply.divide import Divided
from triaccel_ray.apply.offload import Excluding, Offloading, RegionWeights
from triaccel_ray.apply.recompute import Recomputation, Surroundings
from triaccel_ray.apply.recompute_rng import RecomputeRNG
from triaccel_ray.apply.region_recorder import RegionCosts, RegionRecorder
from triaccel_ray.cuda.random_states import default_generator
from triaccel_ray.distributed.ranks import Ranks
from triaccel_ray.model.pytree import tensors_in
from triaccel_ray.model.regions import Call, wrapped_calls
from triaccel_ray.records.plan import Fault, FaultKind, Storage, recomputing_all
from triaccel_ray.records.signals import RegionSignal


class Activations:
    """Stores what regions save as the plan says.

    Gradients are bitwise the same in any storage but a selective one, for which a region is compiled anew: its code
    may round differently.

    Some regions keep their tensors instead, once one of these is found. A region that writes into its inputs, or
    computes something else when called again, is not recomputed; none is once a captured step has drawn other random
    numbers than the eager one. A region is not offloaded if the host cannot pin memory for it, and is recomputed
    by itself if it cannot be joined to the region before it. Only a region of compiled code has selective storages.
    """

    def __init__(
        self,
        regions: Mapping[str, nn.Module],
        device: torch.device,
        *,
        fixed: Storage | None = None,
        divide: Callable[[Collection[str]], Divided] | None = None,
        are_compiled: bool = False,
    ) -> None:
        """Takes disjoint regions of a model by name, in module order; all are kept until `set`.

        `fixed` is the storage of all regions, whatever the plan says. `divide` divides a fused model's graph, with the
        named regions joined to those before them. It is called when a region is first not kept, and when others join.
        Regions that the graph does not contain are left out from then on. `are_compiled`: by `Compilation`, each.
        """
        self.regions = dict(regions)
        """Name -> module of each region whose storage can be chosen."""
        self.storage: Mapping[str, Storage] = {}
        """Region -> storage in force; those not named keep their tensors."""
        self.divided: Divided | None = None
        """The fused model by regions, once it is needed."""
        self.costs: RegionCosts | None = None
        """Costs of the regions, once they are requested."""
        self.rng = RecomputeRNG(default_generator(device))
        """Random numbers of recomputed regions."""
        self.can_select = are_compiled
        """Whether regions can be stored selectively."""
        self._recomputation = Recomputation(self.rng)
        self._names, self._device, self._fixed, self._divide = frozenset(regions), device, fixed, divide
        self._wanted: Mapping[str, Storage] = {}
        self._barred: set[tuple[str, Storage]] = set()
        self._segments: dict[str, tuple[str, ...]] = {}
        """First region of a segment that is recomputed -> all its regions."""
        self._before: Mapping[str, str] = {}
        """Region that can join -> the region before it."""
        self._offloading: Offloading | None = None
        if fixed is not None:
            self._want(dict.fromkeys(regions, fixed))

    @property
    def stores_least(self) -> bool:
        """Whether, by choice, every region is recomputed that can be."""
        return self._fixed is None and bool(self.storage) and self.storage == self._least()

    @property
    def are_planned(self) -> bool:
        """Whether some regions do not keep what they save, or a plan may come to say so."""
        return bool(self.storage) or self.costs is not None

    @property
    def kept_shares(self) -> dict[nn.Module, float]:
        """Region -> share that its code keeps of what it saves beyond its inputs; only selective ones."""
        return {self.regions[name]: each.kept_share for name, each in self.storage.items() if each.is_selective}

    @property
    def _hides_costs(self) -> bool:
        """Whether a pass does not show what regions cost that are kept: some are joined, or saved selectively."""
        return any(each is Storage.JOIN or each.is_selective for each in self.storage.values())

    def set(self, storage: Mapping[str, Storage]) -> None:
        """Sets the storage of regions by name, unless it is fixed or there are none; others keep their tensors.

        Raises:
            KeyError: the model has no such region.
        """
        if self._fixed is not None or not self.regions:
            return
        unknown = sorted(storage.keys() - self._names)
        if unknown:
            raise KeyError(f"regions {unknown} are not in the model")
        self._want({name: each for name, each in storage.items() if each is not Storage.KEEP})

    def recompute_all(self) -> bool:
        """Recomputes all regions that can be until `set`; returns whether that changes anything. Not if fixed."""
        if self._fixed is not None:
            return False
        before = self.storage
        self._split()
        self._want(self._least())
        return self.storage != before

    def request_costs(self) -> None:
        """Requests that later passes record the costs of the regions, if there are any whose storage is not fixed."""
        if self.regions and self._fixed is None and self.costs is None:
            self.costs = RegionCosts(self._device)

    def costs_state(self) -> list[dict[str, Any]]:
        """Returns the regions' costs for a checkpoint while passes hide them."""
        return self.costs.state_dict() if self.costs is not None and self._hides_costs else []

    def measure_costs_again(self) -> bool:
        """Has later passes record the regions' costs again; returns whether they will.

        They will not if costs were never requested, or while passes hide them.
        """
        if self.costs is not None:
            self.costs.measure_again()
        return self.costs is not None and not self._hides_costs

    def recorder(
        self, num_samples: int, dtypes: tuple[torch.dtype, ...], *, is_captured: bool
    ) -> RegionRecorder | None:
        """Returns the recorder for a micro-batch's pass; None if costs are known, not requested, or hidden."""
        if self.costs is None or self._hides_costs:
            return None
        self._split()
        return self.costs.recorder((num_samples, dtypes), is_captured=is_captured)

    def learn(self, recorder: RegionRecorder, *, is_captured: bool = False) -> None:
        """Stores the costs that a pass has recorded; waits for the device."""
        assert self.costs is not None
        self.costs.learn(recorder, is_captured=is_captured)

    def signals(
        self, num_samples: int, dtypes: tuple[torch.dtype, ...], *, is_divided: bool
    ) -> tuple[RegionSignal, ...]:
        """Returns the regions' costs in a pass of so many samples, in the order of their calls; empty if not known.

        A region that cannot be recomputed saves no more than its inputs, one that cannot be offloaded has nothing to.
        None can join if passes do not call the divided model.
        """
        if self.costs is None:
            return ()
        return tuple(
            replace(
                each,
                input_bytes=each.saved_bytes if (each.name, Storage.RECOMPUTE) in self._barred else each.input_bytes,
                offloadable_bytes=0 if (each.name, Storage.OFFLOAD) in self._barred else each.offloadable_bytes,
                can_join=is_divided and self._can_join(each.name),
                can_select=self.can_select,
            )
            for each in self.costs.signals((num_samples, dtypes), scales=self._hides_costs)
        )

    def _can_join(self, name: str) -> bool:
        before = self._before.get(name)
        needed = {(name, Storage.JOIN), (name, Storage.RECOMPUTE), (before, Storage.RECOMPUTE)}
        return before is not None and self._barred.isdisjoint(needed)

    def exclude_random(self, step: int) -> tuple[Fault, ...]:
        """Stops recomputing, because a replay drew other random numbers than the eager pass; returns a fault."""
        why = "captured steps draw other random numbers than eager ones (`--capture off` recomputes them)"
        return self._bar(self.regions, Storage.RECOMPUTE, why, step)

    def exclude_selective(self, why: str, step: int) -> tuple[Fault, ...]:
        """Stops storing regions selectively; returns a fault if some are."""
        kept = [name for name, each in self.storage.items() if each.is_selective]
        self.can_select = False
        self._want(self._wanted)
        return (_kept(f"{why}: activations of {', '.join(kept)} are kept", step),) if kept else ()

    def exclude_failed(self, error: BaseException, step: int) -> tuple[Fault, ...]:
        """Stops recomputing regions that cannot be, if `error` stems from them; returns a fault, if so."""
        if isinstance(error, CheckpointError):
            last = self._recomputation.last
            if last not in self.storage:  # raised by a checkpoint in the user's code
                return ()
            segment = self._segments.get(last, ())
            if len(segment) > 1:
                return self._separate(segment, step)
            kind = type(self.regions[last])
            differing = [name for name, region in self.regions.items() if type(region) is kind]
            why = "what changes state of its own, such as a cache (`use_cache=False`), cannot be computed again"
            return self._bar(differing, Storage.RECOMPUTE, why, step)
        overwriting: list[str] = []
        for names in self._recomputation.overwriting:
            if len(names) == 1:
                overwriting += names
            elif self._can_join(names[-1]):
                return self._separate(names, step)
        return self._bar(overwriting, Storage.RECOMPUTE, "what writes into its input cannot be computed again", step)

    def _separate(self, segment: tuple[str, ...], step: int) -> tuple[Fault, ...]:
        """Recomputes the regions of a segment that failed alone, for any of them may be to blame; returns a fault."""
        self._barred.update((name, Storage.JOIN) for name in segment[1:])
        self._want(self._wanted)
        text = f"recomputing {segment[0]} to {segment[-1]} as one segment failed, so each is recomputed alone"
        return (_kept(text, step),)

    def exclude_unpinned(self, step: int, ranks: Ranks) -> tuple[Fault, ...]:
        """Stops offloading regions that the host of any rank could not pin memory for; returns a fault, if any."""
        if self._offloading is None:
            return ()
        unpinned = dict(ChainMap(*ranks.all_gather_object(self._offloading.unpinned)))
        why = f"the host cannot pin memory for them ({', '.join(dict.fromkeys(unpinned.values()))})"
        return self._bar(unpinned, Storage.OFFLOAD, why, step)

    def _bar(self, names: Collection[str], storage: Storage, why: str, step: int) -> tuple[Fault, ...]:
        kept = [name for name, each in self.storage.items() if name in names and each.alone is storage]
        self._barred.update((name, storage) for name in names)
        self._want(self._wanted)
        if not kept:
            return ()
        return (_kept(f"{why}: activations of {', '.join(kept)} are kept", step),)

    def _least(self) -> dict[str, Storage]:
        can_be = [name for name in self.regions if (name, Storage.RECOMPUTE) not in self._barred]
        return {**self.storage, **recomputing_all(can_be, self.storage)}

    def _want(self, storage: Mapping[str, Storage]) -> None:
        """Puts `storage`, without KEEP, in force as far as it is possible."""
        if storage:
            self._split()
            self.request_costs()
        self._wanted = storage
        possible = {
            name: storage[name]
            for name in self.regions
            if name in storage and (name, storage[name].alone) not in self._barred
            if self.can_select or not storage[name].is_selective
        }
        recomputed = {name for name, each in possible.items() if each.is_recomputed}
        self.storage = {
            name: each if self._before.get(name) in recomputed and (name, each) not in self._barred else each.alone
            for name, each in possible.items()
        }
        self._join()
        if self._offloading is None and Storage.OFFLOAD in self.storage.values():
            self._offloading = Offloading(self._device)

    def _split(self) -> None:
        """Divides a fused model into its regions, once."""
        if self._divide is not None and self.divided is None:
            self.divided = self._divide(())
            self._before = self.divided.before
            self.regions = {name: self.regions[name] for name in self.divided.regions}

    def _join(self) -> None:
        """Collects the segments in force, and divides a fused model by them."""
        segments: dict[str, list[str]] = {}
        for name, each in self.storage.items():  # in the graph's order, so that a region follows the one it joins
            if each.is_recomputed:
                segments[name] = segments.pop(self._before[name]) if each is Storage.JOIN else []
                segments[name].append(name)
        joined = {name for name, each in self.storage.items() if each is Storage.JOIN}
        was_joined = {name for names in self._segments.values() for name in names[1:]}
        self._segments = {names[0]: tuple(names) for names in segments.values()}
        if self._divide is not None and joined != was_joined:
            self.divided = self._divide(joined)

    @contextlib.contextmanager
    def in_force(
        self, model: nn.Module, surroundings: Surroundings, recorder: RegionRecorder | None = None
    ) -> Iterator[None]:
        """Returns a context for one forward and backward pass of `model`, the user's or the divided one.

        The recomputation runs inside `surroundings` and under the autocast of the forward pass, because the backward
        pass may run in another thread. `recorder` records the pass.
        """
        self._recomputation.last = ""
        if not self.storage and recorder is None:
            yield
            return
        regions: Mapping[str, nn.Module] = self.regions
        is_divided = self.divided is not None and model is self.divided.module
        with contextlib.ExitStack() as stack:
            if self.divided is not None:
                regions = self.divided.regions if is_divided else regions
                stack.enter_context(self.divided.keeping_inputs_of(self._segments))
            if self._offloading is not None:
                stack.enter_context(self._offloading.in_force())
            around = partial(self._call, surroundings, recorder, self._segments if is_divided else {})
            stack.enter_context(wrapped_calls(regions, around))
            yield
            if recorder is not None:
                recorder.finish()

    def _call(
        self,
        surroundings: Surroundings,
        recorder: RegionRecorder | None,
        segments: Mapping[str, tuple[str, ...]],
        name: str,
        call: Call,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        storage, recorded = self.storage.get(name), None
        excluding: Excluding = contextlib.nullcontext
        if recorder is not None:
            recorded = recorder.begin(name, self.regions[name], tensors_in((args, kwargs)))
            call, excluding = recorded.counting(call), recorded.excluding
        if storage is not None and storage.is_recomputed:
            names = segments.get(name, (name,))
            again = partial(_both, surroundings, excluding)
            outputs = self._recomputation.run({n: self.regions[n] for n in names}, again, call, *args, **kwargs)
        elif storage is Storage.OFFLOAD:
            assert self._offloading is not None
            weights = RegionWeights.of(self.regions[name])
            outputs = self._offloading.run(name, weights, excluding, call, *args, **kwargs)
        else:
            outputs = call(*args, **kwargs)
        if recorded is not None:
            recorded.end(tensors_in(outputs))
        if self._offloading is not None:
            self._offloading.send(name if storage is Storage.OFFLOAD else "")
        return outputs


@contextlib.contextmanager
def _both(surroundings: Surroundings, excluding: Excluding) -> Iterator[None]:
    with surroundings(), excluding():
        yield


def _kept(detail: str, step: int) -> Fault:
    return Fault(kind=FaultKind.ACTIVATIONS_KEPT, step=step, phase="checkpoint", detail=detail[:500])
