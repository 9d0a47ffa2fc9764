"""What python -m atma_sweep.sweep.doctor answers, in a process that may import torch."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...results.store.store import open_store
from .context import version_of


def _about_torch() -> dict[str, Any]:
    import torch

    from ...kernels.gated_delta.op import fla_is_right

    triton = version_of("triton") or "0"
    said: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "error": None, "gpus": []}
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return said | {"error": str(error).splitlines()[0]}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        said["gpus"].append(
            {
                "uuid": str(found.uuid),
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "total": found.total_memory,
                "fla_is_right": fla_is_right(capability, triton),
            }
        )
    return said


def kernel_backends() -> dict[str, Any]:
    """Op -> (backend, reason), at the sizes of the shipped models. The self-tests compile side by side.

    torch is imported once and before CUDA is used, so that every child of a fork can use it. Raises RuntimeError when
    one of them dies.
    """
    import torch

    from ...kernels.attention.polar import op as polar
    from ...kernels.attention.softmax import op as softmax
    from ...kernels.conv import op as conv
    from ...kernels.cross_entropy import op as cross_entropy
    from ...kernels.gated_delta import op as gated_delta
    from ...model.config import ModelConfig
    from ..attempt.device import use_shared_compile_cache

    # what every child would import by itself when it first calls an op, and for which it would take as long as for torch
    for name in ("triton", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    dtype, config = torch.bfloat16, ModelConfig()
    size_, window = config.head_dim, config.window_size
    taken = {
        "gated_conv": lambda device: conv.choose_backend(device, dtype, config.conv_taps),
        "canon": lambda device: conv.choose_backend(device, dtype, config.canon_taps),
        "cross_entropy": lambda device: cross_entropy.choose_backend(device, dtype),
        "polar": lambda device: polar.choose_backend(device, dtype, size_),
        "polar_window": lambda device: polar.choose_backend(device, dtype, size_, window),
        "softmax": lambda device: softmax.choose_backend(device, dtype, size_, windowed=False),
        "softmax_window": lambda device: softmax.choose_backend(device, dtype, size_, windowed=True),
        "memory": lambda device: gated_delta.choose_backend(device, dtype, size_),
    }

    def chosen(ops: Sequence[str]) -> dict[str, Any]:
        device = current_device()
        use_shared_compile_cache(device)
        return {op: taken[op](device) for op in ops}

    found = run_in_forks(chosen, TESTED_TOGETHER)
    return {op: found[op] for op in taken}


def current_device() -> Any:
    """The GPU, which this uses for the first time."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


TESTED_TOGETHER = (
    ("memory",), ("polar", "polar_window"), ("softmax", "softmax_window"), ("gated_conv", "canon"), ("cross_entropy",),
)  # fmt: skip
"""Ops that share a self-test, which is done once in a process; those that compile longest first."""


def run_in_forks(work: Callable[[Any], dict[str, Any]], parts: Sequence[Any]) -> dict[str, Any]:
    """What `send` finds of each part, all together; each in a fork of this process.

    Raises RuntimeError with the cause when one fails or dies.
    """
    fork = multiprocessing.get_context("fork")
    children = []
    for part in parts:
        ours, theirs = fork.Pipe(duplex=False)
        child = fork.Process(target=_tell, args=(work, part, theirs))
        child.start()
        theirs.close()
        children.append((part, child, ours))
    found: dict[str, Any] = {}
    for part, child, ours in children:
        try:
            said = ours.recv()
        except EOFError:
            child.join()
            said = f"its process ended with exit code {child.exitcode}"
        child.join()
        if isinstance(said, str):
            raise RuntimeError(f"self-test of {', '.join(part)}: {said}")
        found |= said
    return found


def _tell(work: Callable[[Any], dict[str, Any]], part: Any, to: Any) -> None:
    try:
        to.send(work(part))
    except Exception as error:
        to.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise


def _about_disk(runs: Path) -> dict[str, Any]:
    """What the untrained cells of the default sweep need; cells that differ in their seed alone are counted together."""
    from ..attempt.trained_cells import restore_cell
    from ..planning.admission import disk_needed

    store = open_store()
    sweep = store.default_sweep()
    alike: dict[str, Any] = {}
    cells = []
    for state in store.cell_states(sweep):
        if state.trained_attempt_id is not None or state.state == "diverged":
            continue
        record = store.cell(state.cell_id)
        parts = {name: record.config.get(name) for name in ("model", "resources", "checkpoint", "plugins")}
        key = json.dumps(parts, sort_keys=True)
        if key not in alike:
            alike[key] = restore_cell(record, runs)
        cells.append(alike[key])
    found = disk_needed(cells, runs)
    return {"sweep": sweep, "cells": len(cells), "place": found.place, **found.as_json()}


def _about_cluster(address: str, runs: Path) -> dict[str, Any]:
    """What its nodes say of themselves, or the error that keeps us out of it."""
    from ..errors import SweepError
    from ..executors import ray_connection

    try:
        ray_connection.connect_driver(address)
        nodes = ray_connection.query_nodes(runs)
    except SweepError as error:
        return {"error": str(error)}
    return {
        "nodes": [asdict(node) for node in nodes],
        "alive": [node["NodeManagerHostname"] for node in ray_connection.live_nodes()],
        "differing": ray_connection.version_differences(nodes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Answers one question with one line of JSON; the database is named by ATMA_DB."""
    question, *rest = sys.argv[1:] if argv is None else argv
    ask: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _about_torch,
        "kernels": kernel_backends,
        "disk": lambda: _about_disk(Path(*rest)),
        "cluster": lambda: _about_cluster(rest[0], Path(rest[1])),
    }
    said = ask[question]()
    print(json.dumps(said))
    return 0
