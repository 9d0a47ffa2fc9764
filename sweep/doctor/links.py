"""Check of the connections between GPUs: peer access, and the sum over all of them by NCCL, right and fast enough."""

from __future__ import annotations

import statistics
import time
from itertools import combinations
from typing import Any

from ...results.console.text import counted
from ..ranks.group import join
from ..ranks.spawned import MeasurementFailed, run_in_ranks
from .context import Check, Context, LookFailed, absent, bad, ok, warn

SUM_BYTES = 256 * 2**20
"""Size of the summed tensor, about the gradients of one block of a large network."""
ROUNDS = 10
"""Timed sums; the median counts."""
SLOW_BYTES_PER_S = 20e9
"""Bandwidth below which gradients of a 370M network take longer than a third of its backward pass on an H100."""


def check_links(context: Context) -> Check:
    """Check that all GPUs together can sum a tensor by NCCL: bandwidth, peer access, and the result.

    Bad if the sum fails or is wrong; a warning if it is slow or a pair of GPUs has no peer access; absent with fewer
    than two usable GPUs. Cells on one GPU do not need it.
    """
    gpus = context.usable_gpus()
    if len(gpus) < 2:
        return absent("needed for cells over several GPUs only")
    fallback = "until then use resources.gpus: 1"
    try:
        facts = context.link_facts()
    except LookFailed as error:
        return bad(f"a sum over {len(gpus)} GPUs did not end: {error}", f"{_remedy(str(error))}; {fallback}")
    if facts["error"]:
        reason = facts["error"]
        return bad(f"NCCL cannot sum over {len(gpus)} GPUs: {reason}", f"{_remedy(reason)}; {fallback}")
    rate = f"all-reduce at {facts['bytes_per_s'] / 1e9:,.0f} GB/s over {len(gpus)} GPUs, NCCL {facts['nccl']}"
    if not facts["is_right"]:
        return bad(
            f"{rate}, with a wrong sum",
            "update the driver and torch, and test the memory of the GPUs (dcgmi diag -r 3)",
        )
    unlinked = [tuple(pair) for pair in facts["without_peer_access"]]
    if unlinked:
        pairs = ", ".join(f"{a} and {b}" for a, b in unlinked[:3]) + (" and more" if len(unlinked) > 3 else "")
        return warn(
            f"{rate}; no peer access between GPUs {pairs}, so data goes through the memory of the host",
            "see nvidia-smi topo -m; in a virtual machine or with ACS or IOMMU enabled, allow direct access between GPUs",
        )
    if facts["bytes_per_s"] < SLOW_BYTES_PER_S:
        return warn(
            f"{rate}, which is slow: peer access works, but there is no NVLink in use",
            "see nvidia-smi nvlink -s for inactive links; unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL",
        )
    return ok(f"{rate}; peer access between all pairs ({counted(len(list(combinations(gpus, 2))), 'pair')})")


def _remedy(error: str) -> str:
    """Return the most likely remedy for an error of NCCL, by its text."""
    text = error.lower()
    if "shm" in text or "shared memory" in text or "no space left" in text:
        return "enlarge /dev/shm (docker: --shm-size=8g, or --ipc=host)"
    if "out of memory" in text:
        return "free the memory of the GPUs"
    if "socket" in text or "interface" in text or "connection" in text:
        return "allow connections on the loopback interface; unset NCCL_SOCKET_IFNAME"
    return "run the same with NCCL_DEBUG=WARN for the cause, and reset or replace a GPU with Xid errors (dmesg)"


# --- in a process of its own, which may import torch -------------------------------------------------------------------


def link_facts(kind: str = "cuda", n_ranks: int | None = None, n_bytes: int = SUM_BYTES) -> dict[str, Any]:
    """Return facts about the connections of all GPUs, measured by one process per GPU.

    Keys: error (first line, None without), bytes_per_s (bus bandwidth of an all-reduce: 2 (N - 1) / N times the size
    per second), is_right (True if every sum was), nccl (version), without_peer_access (pairs of device indices).

    Args:
        kind: "cuda", or "cpu" for the same between processes without GPUs, by gloo.
        n_ranks: Number of processes; None for one per GPU.
        n_bytes: Size of the summed tensor.
    """
    import torch

    cuda = kind == "cuda"
    size = n_ranks or torch.cuda.device_count()
    pairs = combinations(range(size), 2) if cuda else []
    unlinked = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "n/a"
    facts: dict[str, Any] = {"error": None, "bytes_per_s": 0.0, "is_right": False, "nccl": version}
    facts["without_peer_access"] = unlinked
    try:
        timed = run_in_ranks(size, _sum_in_rank, kind, n_bytes)
    except MeasurementFailed as error:
        return facts | {"error": str(error)}
    bandwidth = 2 * (size - 1) / size * n_bytes / max(seconds for seconds, _ in timed)
    return facts | {"bytes_per_s": bandwidth, "is_right": all(is_right for _, is_right in timed)}


def _sum_in_rank(rank: int, size: int, address: str, kind: str, n_bytes: int) -> tuple[float, bool]:
    """Return (median seconds of a sum over all ranks, True if every result was right).

    Args:
        rank: Number of this process.
        size: Number of processes.
        address: HOST:PORT at which they meet.
        kind: "cuda" or "cpu".
        n_bytes: Size of the tensor.
    """
    import torch

    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    ranks = join(rank, size, address, device)
    tensor = torch.empty(n_bytes // 4, device=device)
    times, is_right = [], True
    for index in range(ROUNDS + 2):  # the first ones connect the ranks
        tensor.fill_(rank + 1)
        if kind == "cuda":
            torch.cuda.synchronize()
        ranks.barrier()
        began = time.perf_counter()
        ranks.sum_(tensor)
        if kind == "cuda":
            torch.cuda.synchronize()
        if index >= 2:
            times.append(time.perf_counter() - began)
        is_right = is_right and bool((tensor == size * (size + 1) / 2).all())
    ranks.barrier()
    return statistics.median(times), is_right
