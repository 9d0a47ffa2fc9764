"""Functions run by several ranks for a measurement, each in a process of its own that this process starts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from ..host.processes import kill_family
from .group import free_address
from .launcher import follow_first

CHECK_INTERVAL_S = 0.2
"""Seconds between two looks for a rank that died without an answer."""


class MeasurementFailed(Exception):
    """A rank failed; the message is its error in one line."""


def run_in_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results of `function(rank, size, address, *args)` of all ranks, in rank order.

    The ranks meet at the address by `group.join`. All processes are gone afterwards; the first failure ends all.

    Args:
        size: Number of ranks.
        function: Module-level function with a result that can be pickled.
        args: Further arguments that can be pickled.

    Raises:
        MeasurementFailed: A rank raised an exception or died.
    """
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    address = free_address()
    ranks = [
        # not daemonic, so that a rank may start compilers
        spawn.Process(target=_send, args=(sender, os.getpid(), function, rank, size, address, args))
        for rank in range(size)
    ]
    results: dict[int, Any] = {}
    try:
        for process in ranks:
            process.start()
        while len(results) < size:
            if not receiver.poll(CHECK_INTERVAL_S):
                dead = [
                    rank for rank, process in enumerate(ranks) if process.exitcode is not None and rank not in results
                ]
                if dead and not receiver.poll():
                    raise MeasurementFailed(f"rank {dead[0]} ended with exit code {ranks[dead[0]].exitcode}")
                continue
            rank, result, error = receiver.recv()
            if error is not None:
                raise MeasurementFailed(f"rank {rank}: {error}")
            results[rank] = result
    finally:
        for process in ranks:
            if process.pid is not None:
                kill_family(process.pid)
                process.join()
    return [results[rank] for rank in range(size)]


def _send(
    sender: Any, parent: int, function: Callable[..., Any], rank: int, size: int, address: str, args: tuple[Any, ...]
) -> None:
    """Call the function as one rank and send (rank, result, None), or (rank, None, error in one line).

    The process ends with its parent, and Ctrl-C reaches the parent alone.
    """
    follow_first(parent)
    try:
        sender.send((rank, function(rank, size, address, *args), None))
    except Exception as error:  # noqa: BLE001, it is the answer
        sender.send((rank, None, " ".join(f"{type(error).__name__}: {error}".split())[:300]))
