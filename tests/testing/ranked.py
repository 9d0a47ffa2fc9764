"""Groups of real processes, for tests of code that runs on several ranks: over gloo, or NCCL with a GPU for each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

import torch
from atma_sweep.sweep.ranks.group import SINGLE, Ranks, join, open_store
from patience import PATIENCE_S


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, cuda: bool = False) -> list[Any]:
    """Return the results of function(ranks, *arguments) on every rank, in rank order; with 1 rank it runs here.

    The function must be importable from a module; a failure of any rank fails with all their tracebacks.
    """
    if size == 1:
        return [function(SINGLE, *arguments)]
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    _, address = store = open_store(size)
    processes = [
        context.Process(target=_rank, args=(rank, size, address, results, function, pickle.dumps(arguments), cuda))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        by_rank: dict[int, Any] = {}
        failures = []
        while len(by_rank) + len(failures) < size:
            try:
                rank, result, failure = results.get(timeout=PATIENCE_S)
            except Empty:
                failures.append("a rank did not answer")
                break
            if failure is None:
                by_rank[rank] = pickle.loads(result)
            else:
                failures.append(failure)
        assert not failures, "\n".join(failures)
        return [by_rank[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        del store


def _rank(
    rank: int,
    size: int,
    address: str,
    results: Any,
    function: Callable[..., Any],
    arguments: bytes,
    cuda: bool,
) -> None:
    torch.set_num_threads(1)
    try:
        host, _, port = address.rpartition(":")
        store = torch.distributed.TCPStore(host, int(port), size, is_master=False, wait_for_workers=False)
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ranks: Ranks = join(rank, size, address, device, store)
        result = function(ranks, *pickle.loads(arguments))
        # plain bytes outlive this process, unlike torch's shared tensors
        results.put((rank, pickle.dumps(result), None))
        ranks.close()
    except BaseException:  # noqa: BLE001 - told to the test
        results.put((rank, None, f"rank {rank}:\n{traceback.format_exc()}"))


def vanish(rank: int, size: int, address: str) -> None:
    """Leave the process as rank 1 without a word, and wait for an hour as any other rank."""
    if rank == 1:
        os._exit(4)
    time.sleep(3600)
