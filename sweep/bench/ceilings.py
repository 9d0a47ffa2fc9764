"""Measured limits of a device, and timing of calls, in the same run as the numbers compared with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


class Ceilings(NamedTuple):
    """Measured limits of a device."""

    flops: float
    """FLOP/s of a bf16 product of two random 8192 x 8192 matrices."""
    bytes_per_s: float
    """Bytes read plus bytes written by a copy of 4 GiB."""

    @property
    def line(self) -> str:
        """Both limits as one line, for the head of a table."""
        flops, copied = self.flops / 1e12, self.bytes_per_s / 1e12
        return f"Ceilings in this run: matrix product {flops:.0f} TFLOP/s, copy {copied:.2f} TB/s."


class Timing(NamedTuple):
    """Milliseconds of one call."""

    median: float
    low: float
    high: float


def ceilings(device: torch.device) -> Ceilings:
    """Measure both limits of a CUDA device; takes about half a second and 9 GB.

    `flops` (FLOP/s) is of a bfloat16 matrix product of 8192 x 8192; `bytes_per_s` is of a copy of 4 GiB and counts the
    bytes read plus those written. Both are from the median of 10 rounds, not the best.
    """
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**32, device=device, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    timings = time_interleaved({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=10)
    return Ceilings(
        flops=2 * 8192**3 / (timings["product"].median * 1e-3),
        bytes_per_s=2 * source.numel() / (timings["copy"].median * 1e-3),
    )


def as_cuda_graph(call: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays the call as a CUDA graph: the same device work without the host's share.

    The call runs twice first and is then captured, so its tensors must stay in place. The function returns nothing.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_interleaved(calls: Mapping[str, Callable[[], object]], *, rounds: int, repeat: int = 1) -> dict[str, Timing]:
    """Return name -> milliseconds per call (median, smallest and largest round), the calls taking turns.

    Taking turns means that a warmer chip favours none. Times are of CUDA events on the current device.

    Args:
        calls: Name -> call; each runs once untimed first.
        rounds: Number of timed rounds, at least 1.
        repeat: Calls that are timed together, so that the host is far enough ahead; a time is their mean.
    """
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeat):
                call()
            stop.record()
            torch.cuda.synchronize()
            times_ms[name].append(start.elapsed_time(stop) / repeat)
    return {name: Timing(statistics.median(times), min(times), max(times)) for name, times in times_ms.items()}
