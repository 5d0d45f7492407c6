"""Runs the optimizer inside the backward pass: each bucket of gradients is used and freed once it is complete.

PyTorch's tutorial and torchtune step one parameter at a time, which costs launches, and refuse loss scaling, clipping
and accumulation. LOMO (Lv et al. 2023) runs backward twice to get the norm to clip by; here the previous step's serves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from triaccel_ray.apply.weights import Weights
from triaccel_ray.cuda.out_of_memory import first_line
from triaccel_ray.model.gradients import Gradients, buckets_by_arrival

BUCKET_ELEMENTS = 2**23
"""Elements at which a bucket is full, 16 MiB of BF16 gradients: many small parameters take few launches."""
_WAY_OUT = (
    "If it is a weight that is also read through `.detach()`, step_in_backward has updated it too early: read "
    "`.detach().clone()`, or give step_in_backward=False"
)


def buckets_of(model: nn.Module, watched: Sequence[nn.Parameter]) -> list[list[int]]:
    """Returns the indices of `watched` parameters in buckets, in the order their gradients arrive: last ones first.

    Parameters that are adjacent in the model share a bucket.
    """
    order = list(model.parameters())
    return buckets_by_arrival(watched, order, elements=BUCKET_ELEMENTS, in_first=BUCKET_ELEMENTS)


class BucketedGradients:
    """The gradients of one step, bucket by bucket; all are freed by the end of the backward pass."""

    def __init__(self, stepper: StepInBackward, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self._stepper = stepper
        self.buckets = [Gradients(bucket) for bucket in buckets]
        self.publishes = True

    def begin(self, *, publishes: bool) -> None:
        """Starts receiving gradients; `publishes` is False during CUDA graph capture."""
        self.publishes = publishes
        self._stepper.begin(self)

    def collect(self, companions: Mapping[int, Tensor], sums: Mapping[int, Tensor]) -> None:
        """Hands over the buckets that did not receive all their gradients."""
        self._stepper.end()

    def pack(self, companions: Mapping[int, Tensor]) -> None:
        """Does nothing: ranks share no optimizer that steps in the backward pass."""

    def send(self) -> None:
        """Does nothing likewise."""

    def publish(self) -> None:
        """Copies the gradients' addresses to the device, where a captured graph reads them."""
        for bucket in self.buckets:
            bucket.publish()

    def drop(self) -> None:
        """Drops the tensors (see `Gradients.drop`)."""
        for bucket in self.buckets:
            bucket.drop()


class StepInBackward:
    """Hands a bucket to the optimizer once its last gradient arrives in the last micro-batch, then frees it.

    A batch that is retried after running out of memory has its buckets' statistics taken again. A bucket that has
    been stepped is not stepped twice.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        weights: Weights,
        begin: Callable[[], None],
        take: Callable[[int, Gradients, bool], None],
    ) -> None:
        """Hooks the gradients of the parameters in `buckets`, until `remove` is called.

        Calls `begin` before each attempt at a batch; `take` with a bucket's index, gradients, and whether to step it.
        """
        self._buckets, self._weights, self._begin, self._take = buckets, weights, begin, take
        self._bucket_of: dict[Tensor, int] = {p: index for index, bucket in enumerate(buckets) for p in bucket}
        self._gradients: BucketedGradients | None = None
        self._missing: list[set[Tensor]] = []
        self._is_taking = self._is_last_part = self._sums_parts = False
        self._stepped: set[int] = set()
        self._taken: set[int] = set()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._on_gradient) for p in self._bucket_of if p.requires_grad
        ]

    def gradients(self) -> BucketedGradients:
        """Returns a new `BucketedGradients`, without gradients yet."""
        return BucketedGradients(self, self._buckets)

    def begin(self, gradients: BucketedGradients) -> None:
        """Starts a step, whose gradients go to `gradients`."""
        self._gradients = gradients
        self._stepped.clear()

    def attempt(self) -> None:
        """Starts an attempt at the batch, the first one or a retry."""
        self._missing = [{p for p in bucket if p.requires_grad} for bucket in self._buckets]
        self._taken.clear()
        self._begin()

    @contextlib.contextmanager
    def taking(self, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """Returns a context for the backward pass of a micro-batch; the last one completes the gradients.

        Raises:
            RuntimeError: an operation reads a weight, such as `weight.detach()`, that was stepped before its turn.
        """
        self._is_taking = True
        self._is_last_part = is_last
        self._sums_parts = not (is_first and is_last)
        try:
            yield
        except RuntimeError as error:
            if self._stepped and "modified by an inplace operation" in str(error):
                text = first_line(error).partition(" Hint:")[0]
                raise RuntimeError(f"{text} {_WAY_OUT}") from error
            raise
        finally:
            self._is_taking = False

    def end(self) -> None:
        """Hands over the remaining buckets, after the backward pass."""
        for index in range(len(self._buckets)):
            if index not in self._taken:
                self._process_bucket(index)

    def remove(self) -> None:
        """Removes the gradient hooks."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._is_taking:
            return
        if self._sums_parts:
            self._weights.gather_gradient(parameter)
        if not self._is_last_part:
            return
        index = self._bucket_of[parameter]
        if index in self._taken:
            raise RuntimeError(
                f"the gradient of a weight of shape {tuple(parameter.shape)} arrives in several pieces, the last after "
                "it was stepped: checkpoint with use_reentrant=False, or give step_in_backward=False"
            )
        self._missing[index].discard(parameter)
        if not self._missing[index]:
            self._process_bucket(index)

    def _process_bucket(self, index: int) -> None:
        assert self._gradients is not None
        gradients = self._gradients.buckets[index]
        gradients.collect(self._weights.companions, self._weights.sums)
        if self._gradients.publishes:
            gradients.publish()
        self._take(index, gradients, index not in self._stepped)
        self._taken.add(index)
        self._stepped.add(index)
        gradients.drop()
        for parameter in self._buckets[index]:
            parameter.grad = None
            self._weights.sums.pop(id(parameter), None)
