"""Group of the processes (ranks) that work on one attempt: one decision for all, collective sums and divided work.

`SINGLE` is the group of an attempt with one process; it never imports torch. Other groups are made by `join`: tensors
travel through NCCL on CUDA and through gloo on the CPU, decisions and Python objects always through gloo. All processes
run on one machine, and every rank calls the same methods in the same order.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import TCPStore, Work

Value = TypeVar("Value")
Item = TypeVar("Item")

HOST = "127.0.0.1"
"""Address of the store; all ranks run on one machine."""
JOIN_TIMEOUT_S = 300.0
"""Seconds in which every rank must have joined."""
TENSOR_TIMEOUT_S = 1800.0
"""Seconds after which a collective operation on CUDA tensors counts as hung."""
CONTROL_TIMEOUT_S = 7 * 86_400.0
"""Seconds that ranks wait for a decision or for work that rank 0 does alone; a dead rank ends the wait at once."""


class RankFailed(RuntimeError):
    """An error of a rank that could not be transferred as it is; the text holds its class, message and rank."""


class _Outcome(NamedTuple):
    """Result of a rank's share of `Ranks.map`."""

    results: list[tuple[int, Any]]
    """(index of the item, result) of each item that was done."""
    failure: tuple[int, BaseException] | None
    """Index of the item that failed, and its error; None if none did."""


class Ranks:
    """Group of one rank, whose methods are the identity; base class of groups of several (`join`).

    `rank` counts from 0, `size` is the number of ranks. Rank 0 decides, records, logs and saves.
    """

    rank = 0
    size = 1
    device: torch.device
    """Device of this rank's tensors; only in groups of several."""

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def agree(self, value: Value) -> Value:
        """Return rank 0's value on every rank; it must be picklable. Waits for rank 0."""
        return value

    def agree_number(self, number: int) -> int:
        """Return rank 0's number (64 bits) on every rank; faster than `agree`. Waits for rank 0, not for the GPU."""
        return number

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks in place and return the tensor, equal on every rank; on CUDA only queued."""
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks in place and return the tensor; on CUDA only queued."""
        return tensor

    def reduce_async(self, tensor: Tensor, owner: int) -> Work | None:
        """Start adding the tensors of all ranks into that of rank `owner`; the others' are undefined afterwards.

        Returns:
            Handle whose `wait` makes the current CUDA stream (on the CPU this thread) wait for it; None if there is
            nothing to do.
        """
        return None

    def broadcast_async(self, tensor: Tensor, owner: int) -> Work | None:
        """Start copying the tensor of rank `owner` into that of every other rank; returns as `reduce_async` does."""
        return None

    def reduce_scatter_async(self, output: Tensor, parts: Tensor) -> Work | None:
        """Start adding the tensors of all ranks, and give rank r the sum of part r; returns as `reduce_async` does.

        Args:
            output: Tensor that receives this rank's part.
            parts: Contiguous tensor whose first axis is the rank, [size, ...].
        """
        return None

    def all_gather_async(self, parts: Tensor) -> Work | None:
        """Start copying part r of rank r's tensor into that of every rank; returns as `reduce_async` does.

        Args:
            parts: Contiguous tensor whose first axis is the rank, [size, ...]; this rank's part is its input.
        """
        return None

    def gather_objects(self, value: Value) -> list[Value]:
        """Return the values of all ranks in rank order, on every rank; they must be picklable."""
        return [value]

    def map(self, function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """Return the results of all items, in their order, on every rank; items are divided over the ranks.

        Rank r takes items r, r + size, ... An error of any rank ends the work of all and is raised on all: that of the
        lowest failed item. So every rank goes on in the same way.

        Args:
            function: Function of one item; it must not use the group, and its result must be picklable.
            items: Items, the same on every rank.
        """
        return [function(item) for item in items]

    def first(self, function: Callable[[], Value]) -> Value:
        """Return the result of the function on every rank; rank 0 alone calls it while the others wait.

        Its error is raised on every rank. The result must be picklable.
        """
        return self.map(lambda call: call(), [function])[0]

    def barrier(self) -> None:
        """Wait until every rank has called it; queued GPU work is not waited for."""

    def close(self) -> None:
        """Leave the group; the last call on it."""


SINGLE = Ranks()
"""Group of an attempt with one process."""


class ProcessRanks(Ranks):
    """Group of several processes over torch.distributed, which it initialises for the whole process."""

    def __init__(self, rank: int, size: int, store: TCPStore, device: torch.device) -> None:
        """Initialise torch.distributed and wait for the other ranks; see `join`."""
        import torch.distributed as dist

        # one machine: the loopback interface works where the host's name cannot be resolved
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self.rank, self.size, self.device, self._store = rank, size, device, store
        cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=TENSOR_TIMEOUT_S if cuda else CONTROL_TIMEOUT_S),
            device_id=device if cuda else None,
        )
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S))
        self._divisions = 0
        """Number of calls of `map`, which names the key of its early end."""

    def agree(self, value: Value) -> Value:
        """Return rank 0's value on every rank, through gloo."""
        import torch.distributed as dist

        values = [value if self.is_first else None]
        dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]  # type: ignore[return-value]

    def agree_number(self, number: int) -> int:
        """Return rank 0's number on every rank, through gloo."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(number if self.is_first else 0, dtype=torch.int64)
        dist.broadcast(tensor, src=0, group=self._control)
        return int(tensor)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add the tensors of all ranks in place and return the tensor."""
        import torch.distributed as dist

        dist.all_reduce(tensor)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the elementwise maximum over all ranks in place and return the tensor."""
        import torch.distributed as dist

        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def reduce_async(self, tensor: Tensor, owner: int) -> Work | None:
        """Start adding the tensors of all ranks into that of rank `owner`."""
        import torch.distributed as dist

        return dist.reduce(tensor, dst=owner, async_op=True)

    def broadcast_async(self, tensor: Tensor, owner: int) -> Work | None:
        """Start copying the tensor of rank `owner` into that of every other rank."""
        import torch.distributed as dist

        return dist.broadcast(tensor, src=owner, async_op=True)

    def reduce_scatter_async(self, output: Tensor, parts: Tensor) -> Work | None:
        """Start adding the tensors of all ranks, and give rank r the sum of part r."""
        import torch.distributed as dist

        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # renamed in torch 2.13
        return scatter(output.view(-1), parts.view(-1), async_op=True)

    def all_gather_async(self, parts: Tensor) -> Work | None:
        """Start copying part r of rank r's tensor into that of every rank."""
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        return gather(parts.view(-1), parts[self.rank].view(-1), async_op=True)

    def gather_objects(self, value: Value) -> list[Value]:
        """Return the values of all ranks in rank order, through gloo."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def map(self, function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
        """Return the results of all items, in their order, on every rank.

        A rank that fails sets a key of the store, which the others read before each of their items.
        """
        ordered = list(items)
        self._divisions += 1
        key = f"map/{self._divisions}/failed"
        results: list[tuple[int, Any]] = []
        failure: tuple[int, BaseException] | None = None
        error: BaseException | None = None
        for index in range(self.rank, len(ordered), self.size):
            if self._store.check([key]):
                break
            try:
                results.append((index, function(ordered[index])))
            except Exception as raised:  # noqa: BLE001 - raised again on every rank
                error, failure = raised, (index, _transferable(raised, self.rank))
                self._store.set(key, str(self.rank))
                break
        outcomes = self.gather_objects(_Outcome(results, failure))
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            first = min(failures, key=lambda pair: pair[0])
            raise error if error is not None and failure is not None and failure[0] == first[0] else first[1]
        by_index = {index: result for outcome in outcomes for index, result in outcome.results}
        return [by_index[index] for index in range(len(ordered))]

    def barrier(self) -> None:
        """Wait until every rank has called it, through gloo."""
        import torch.distributed as dist

        dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the group and end torch.distributed in this process; waits for queued collective operations."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _transferable(error: BaseException, rank: int) -> BaseException:
    """Return the error if it can be pickled and read back, else a `RankFailed` with its class and message."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # noqa: BLE001 - an error of any class may refuse to be pickled
        pass
    return RankFailed(f"{type(error).__name__} on rank {rank}: {error}")


def open_store(size: int) -> tuple[TCPStore, str]:
    """Return the store through which ranks meet, hosted by this process, and its address HOST:PORT.

    Rank 0 calls it before it starts the others with that address, and passes the store on to `join`. The port is a free
    one.

    Args:
        size: Number of ranks.
    """
    from torch.distributed import TCPStore

    store = TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    return store, f"{HOST}:{store.port}"


def free_address() -> str:
    """Return an address HOST:PORT of this machine that is free now, for a store that another process opens."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"{HOST}:{probe.getsockname()[1]}"


def join(rank: int, size: int, address: str, device: torch.device, store: TCPStore | None = None) -> Ranks:
    """Join the group of an attempt and return it; waits until every rank has joined.

    With `size` 1 it is `SINGLE`, and nothing else happens. On CUDA the device must be this rank's own.

    Args:
        rank: This process's rank, from 0.
        size: Number of ranks.
        address: HOST:PORT of rank 0's store.
        device: Device of this rank's tensors.
        store: Rank 0's store, as `open_store` returned it; None on other ranks, and on rank 0 to host one at `address`.

    Raises:
        RuntimeError: Not all ranks have joined within `JOIN_TIMEOUT_S` seconds (300), or the address cannot be used.
    """
    if size == 1:
        return SINGLE
    if store is None:
        from torch.distributed import TCPStore

        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        store = TCPStore(host, int(port), size, is_master=rank == 0, wait_for_workers=False, timeout=timeout)
    return ProcessRanks(rank, size, store, device)
