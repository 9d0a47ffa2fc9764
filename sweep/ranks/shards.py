"""Division of a model's parameters over ranks: owners, reduction of gradients to them, and weights sent back.

Each parameter has one owner, which holds its optimizer state and updates it (ZeRO stage 1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .group import Ranks

if TYPE_CHECKING:
    from torch.distributed import Work

LARGE = 1 << 18
"""Elements from which a weight is broadcast by itself, without a copy; smaller ones of an owner travel together."""
BUCKET = 1 << 25
"""Elements after which a bucket of gradients is full, and from which a gradient is reduced by itself."""


def assign_owners(costs: Sequence[int], size: int) -> list[int]:
    """Return the owner of each parameter, a rank below `size`: the largest cost first, each to the rank with the least.

    Ties go to the earlier parameter and the lower rank, so every rank computes the same owners.

    Args:
        costs: Cost of updating each parameter, in any unit, such as FLOPs.
        size: Number of ranks.
    """
    owners, loads = [0] * len(costs), [0] * size
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += costs[index]
    return owners


def reduction_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of this type are added over ranks: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class _Bucket:
    """Parameters of one type whose gradients are reduced together, each into its owner."""

    parameters: list[nn.Parameter]
    owners: list[int]
    """Owner of each parameter."""
    ready: int = 0
    """Number of parameters whose gradient is complete in this step."""
    sums: Tensor | None = None
    """Sums on their way to this rank; None if none has started."""
    has_gradient: list[bool] = field(default_factory=list)
    work: Work | None = None

    def offsets(self) -> list[int]:
        """Return for each parameter the number of elements that its owner has before it in this bucket."""
        before: dict[int, int] = defaultdict(int)
        starts = []
        for parameter, owner in zip(self.parameters, self.owners, strict=True):
            starts.append(before[owner])
            before[owner] += parameter.numel()
        return starts

    def start(self, ranks: Ranks) -> None:
        """Start adding the gradients over ranks. Missing ones count as zero; which parameters have one is remembered."""
        gradients = [parameter.grad for parameter in self.parameters]
        self.has_gradient = [gradient is not None for gradient in gradients]
        first, dtype = gradients[0], reduction_dtype(self.parameters[0].dtype)
        if len(gradients) == 1 and first is not None and first.dtype == dtype and first.is_contiguous():
            self.sums = first.view(-1)
            self.work = ranks.reduce_async(self.sums, self.owners[0])
            return
        starts = self.offsets()
        ends = [start + parameter.numel() for start, parameter in zip(starts, self.parameters, strict=True)]
        flat = torch.zeros(ranks.size, max(ends), dtype=dtype, device=self.parameters[0].device)
        pairs = [
            (flat[owner, start:end].view_as(gradient), gradient)
            for owner, start, end, gradient in zip(self.owners, starts, ends, gradients, strict=True)
            if gradient is not None
        ]
        if pairs:
            # private to torch, so pyproject.toml bounds torch's version
            torch._foreach_copy_([view for view, _ in pairs], [gradient for _, gradient in pairs])
        self.sums = torch.empty_like(flat[0])
        self.work = ranks.reduce_scatter_async(self.sums, flat)

    def deliver(self, rank: int) -> None:
        """Wait for the sums and give owners theirs as gradients, in the type of the parameters; others have none."""
        if self.work is not None:
            self.work.wait()
        assert self.sums is not None
        for parameter, owner, start, has_gradient in zip(
            self.parameters, self.owners, self.offsets(), self.has_gradient, strict=True
        ):
            parameter.grad = None
            if owner == rank and has_gradient:
                own = self.sums[start : start + parameter.numel()]
                parameter.grad = own.view_as(parameter).to(parameter.dtype)
        self.sums = self.work = None


class GradientReducer:
    """Adds gradients over ranks into their owners, bucket by bucket, while the backward pass goes on.

    Per step: `arm` before the backward pass of the last micro-batch, then `finish`. In between, a bucket starts as soon
    as its gradients are complete and all earlier buckets have started; so every rank starts them in the same order.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[nn.Parameter], owners: Sequence[int]) -> None:
        """Divide the parameters into buckets in reverse order, and register a hook on each of them.

        Args:
            ranks: Group of the ranks.
            parameters: All parameters, in the order of the forward pass, the same on every rank.
            owners: Owner of each.
        """
        self._ranks = ranks
        self.buckets: list[_Bucket] = []
        self._armed, self._next = False, 0
        open_buckets: dict[torch.dtype, _Bucket] = {}
        bucket_of: dict[nn.Parameter, _Bucket] = {}
        for parameter, owner in reversed(list(zip(parameters, owners, strict=True))):
            bucket = open_buckets.get(parameter.dtype)
            if parameter.numel() >= BUCKET or bucket is None or _elements(bucket) >= BUCKET:
                bucket = _Bucket([], [])
                self.buckets.append(bucket)
                if parameter.numel() < BUCKET:
                    open_buckets[parameter.dtype] = bucket
            bucket.parameters.append(parameter)
            bucket.owners.append(owner)
            bucket_of[parameter] = bucket
        # a bucket is complete with its last parameter, and must not hold up those that are complete before
        last = {parameter: index for index, parameter in enumerate(reversed(parameters))}
        self.buckets.sort(key=lambda bucket: last[bucket.parameters[-1]])
        for parameter, bucket in bucket_of.items():
            parameter.register_post_accumulate_grad_hook(_Hook(self, bucket))

    def arm(self) -> None:
        """Start buckets from now on as their gradients are completed by a backward pass."""
        self._armed, self._next = True, 0
        for bucket in self.buckets:
            bucket.ready = 0

    def note(self, bucket: _Bucket) -> None:
        """Count a complete gradient of a bucket, and start every bucket whose turn it is; nothing unless armed."""
        if not self._armed:
            return
        bucket.ready += 1
        while self._next < len(self.buckets):
            following = self.buckets[self._next]
            if following.ready < len(following.parameters):
                break
            self._start(following)

    def finish(self) -> None:
        """Start the remaining buckets and wait for all: owners then have the sums as gradients, others have none.

        Does nothing if the step's reduction has been finished. Parameters without a gradient keep none. On CUDA the wait is the stream's, not the host's.
        """
        if not self._armed:
            return
        while self._next < len(self.buckets):
            self._start(self.buckets[self._next])
        self._armed = False
        for bucket in self.buckets:
            bucket.deliver(self._ranks.rank)

    def discard(self) -> None:
        """End an armed reduction that has not started; gradients stay as they are."""
        self._armed = False

    def _start(self, bucket: _Bucket) -> None:
        bucket.start(self._ranks)
        self._next += 1


def _elements(bucket: _Bucket) -> int:
    return sum(parameter.numel() for parameter in bucket.parameters)


class _Hook:
    """Hook of one parameter, called after its gradient has been accumulated."""

    def __init__(self, reducer: GradientReducer, bucket: _Bucket) -> None:
        self._reducer, self._bucket = reducer, bucket

    def __call__(self, parameter: Tensor) -> None:
        self._reducer.note(self._bucket)


class WeightExchange:
    """Copies of updated weights on their way from their owners to all ranks.

    `start` may be called several times, while other weights are still being computed; `finish` waits for all.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._works: list[Work] = []
        self._received: list[tuple[Tensor, Tensor]] = []
        """(tensor of this rank, part of a pack on its way that replaces it)."""

    @torch.no_grad()
    def start(self, tensors: Iterable[tuple[Tensor, int]]) -> None:
        """Start copying each tensor from its owner, a rank, to all others; small ones travel in packs.

        Args:
            tensors: Pairs of (contiguous tensor, owner), in the same order on every rank.
        """
        small: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor, owner in tensors:
            if tensor.numel() >= LARGE:
                self._send(tensor.detach(), owner)
            else:
                small[owner, tensor.dtype].append(tensor.detach())
        for (owner, _), members in small.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            self._send(flat, owner)
            if owner != self._ranks.rank:
                views = flat.split([tensor.numel() for tensor in members])
                self._received += [(tensor, view.view_as(tensor)) for tensor, view in zip(members, views, strict=True)]

    @torch.no_grad()
    def gather(self, by_owner: Sequence[Sequence[Tensor]]) -> None:
        """Start copying tensors of one shape and type from their owners to all others, in one operation.

        Args:
            by_owner: Tensors of each rank, the same on every rank; the largest number sets the size of what travels.
        """
        most = max(map(len, by_owner))
        sample = next(tensor for owned in by_owner for tensor in owned)
        stack = sample.new_empty(len(by_owner), most, *sample.shape)
        for owner, owned in enumerate(by_owner):
            views = list(stack[owner].unbind())[: len(owned)]
            if owner != self._ranks.rank:
                self._received += zip(owned, views, strict=True)
            elif owned:
                # private to torch, so pyproject.toml bounds torch's version
                torch._foreach_copy_(views, list(owned))
        self._keep(self._ranks.all_gather_async(stack))

    def _send(self, tensor: Tensor, owner: int) -> None:
        self._keep(self._ranks.broadcast_async(tensor, owner))

    def _keep(self, work: Work | None) -> None:
        if work is not None:
            self._works.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all copies (on CUDA the stream waits, not the host) and unpack what this rank received."""
        for work in self._works:
            work.wait()
        if self._received:
            # private to torch, so pyproject.toml bounds torch's version
            torch._foreach_copy_([tensor for tensor, _ in self._received], [view for _, view in self._received])
        self._works, self._received = [], []


def broadcast_model(ranks: Ranks, model: nn.Module) -> None:
    """Replace the parameters and buffers of every rank's model by those of rank 0, in place."""
    if ranks.size > 1:
        exchange = WeightExchange(ranks)
        exchange.start((tensor, 0) for tensor in model.state_dict().values())
        exchange.finish()
