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
"""Elements from which a tensor travels by itself, without a copy; smaller ones of an owner are packed."""
PACKED = 1 << 22
"""Maximum number of elements of a pack."""


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
    """Parameters of one owner and type whose gradients are reduced together."""

    owner: int
    parameters: list[nn.Parameter]
    ready: int = 0
    """Number of parameters whose gradient is complete in this step."""
    flat: Tensor | None = None
    """Gradients on their way, one-dimensional; None if none has started."""
    has_gradient: list[bool] = field(default_factory=list)
    work: Work | None = None

    def flatten(self) -> Tensor:
        """Return the gradients as one tensor of the reduction's type; the gradient itself if it is alone and fits.

        Missing gradients count as zero. Remembers which parameters have one.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        self.has_gradient = [gradient is not None for gradient in gradients]
        first, dtype = gradients[0], reduction_dtype(self.parameters[0].dtype)
        if len(gradients) == 1 and first is not None and first.dtype == dtype and first.is_contiguous():
            return first.view(-1)
        flat = torch.zeros(
            sum(parameter.numel() for parameter in self.parameters), dtype=dtype, device=self.parameters[0].device
        )
        views = flat.split([parameter.numel() for parameter in self.parameters])
        pairs = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        if pairs:
            # private to torch, so pyproject.toml bounds torch's version
            torch._foreach_copy_([view.view_as(g) for view, g in pairs], [g for _, g in pairs])
        return flat


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
        packs: dict[tuple[int, torch.dtype], _Bucket] = {}
        bucket_of: dict[nn.Parameter, _Bucket] = {}
        for parameter, owner in reversed(list(zip(parameters, owners, strict=True))):
            key = owner, parameter.dtype
            bucket = packs.get(key)
            if parameter.numel() >= LARGE or bucket is None or _elements(bucket) + parameter.numel() > PACKED:
                bucket = _Bucket(owner, [])
                self.buckets.append(bucket)
                if parameter.numel() < LARGE:
                    packs[key] = bucket
            bucket.parameters.append(parameter)
            bucket_of[parameter] = bucket
        # a pack is complete with its last parameter, and must not hold up buckets that are complete before
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
            if bucket.work is not None:
                bucket.work.wait()
            self._deliver(bucket)
            bucket.flat = bucket.work = None

    def discard(self) -> None:
        """End an armed reduction that has not started; gradients stay as they are."""
        self._armed = False

    def _start(self, bucket: _Bucket) -> None:
        bucket.flat = bucket.flatten()
        bucket.work = self._ranks.reduce_async(bucket.flat, bucket.owner)
        self._next += 1

    def _deliver(self, bucket: _Bucket) -> None:
        """Give an owner the sums as gradients, in the type of its parameters, and take other ranks' gradients away."""
        is_owner = bucket.owner == self._ranks.rank
        assert bucket.flat is not None
        views = bucket.flat.split([parameter.numel() for parameter in bucket.parameters])
        for parameter, view, has_gradient in zip(bucket.parameters, views, bucket.has_gradient, strict=True):
            parameter.grad = view.view_as(parameter).to(parameter.dtype) if is_owner and has_gradient else None


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
        self._packs: list[tuple[Tensor, list[Tensor]]] = []
        """Packs on their way to this rank, with the tensors that they replace."""

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
                self._packs.append((flat, members))

    def _send(self, tensor: Tensor, owner: int) -> None:
        work = self._ranks.broadcast_async(tensor, owner)
        if work is not None:
            self._works.append(work)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all copies (on CUDA the stream waits, not the host) and unpack what this rank received."""
        for work in self._works:
            work.wait()
        for flat, members in self._packs:
            views = flat.split([tensor.numel() for tensor in members])
            pairs = [(tensor, view.view_as(tensor)) for tensor, view in zip(members, views, strict=True)]
            # private to torch, so pyproject.toml bounds torch's version
            torch._foreach_copy_([tensor for tensor, _ in pairs], [view for _, view in pairs])
        self._works, self._packs = [], []


def broadcast_model(ranks: Ranks, model: nn.Module) -> None:
    """Replace the parameters and buffers of every rank's model by those of rank 0, in place."""
    if ranks.size > 1:
        exchange = WeightExchange(ranks)
        exchange.start((tensor, 0) for tensor in model.state_dict().values())
        exchange.finish()
