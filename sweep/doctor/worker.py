"""Queries of `python -m atma_sweep.sweep.doctor`, in a process that may import torch."""

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
from .links import link_facts


def _torch_facts() -> dict[str, Any]:
    """Return facts about torch: torch (version), cuda (version of the build or None), error (or None), and gpus.

    Each GPU is a dict: uuid, name, capability ("MAJOR.MINOR"), total (bytes), fla_is_right (True if fla computes right
    gradients with this GPU and the installed Triton). If CUDA cannot be used, `error` is the first line of the error
    and `gpus` is empty. Imports torch and initialises CUDA.
    """
    import torch

    from ...kernels.gated_delta.op import fla_is_right

    triton = version_of("triton") or "0"
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "error": None, "gpus": []}
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    except (RuntimeError, AssertionError) as error:
        return facts | {"error": str(error).splitlines()[0]}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        facts["gpus"].append(
            {
                "uuid": str(properties.uuid),
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "total": properties.total_memory,
                "fla_is_right": fla_is_right(capability, triton),
            }
        )
    return facts


def kernel_backends() -> dict[str, Any]:
    """Return op -> (backend, reason) for this GPU, at the sizes of the default model and in bfloat16.

    The ops are gated_conv, canon, cross_entropy, polar, polar_window, softmax, softmax_window and memory. Self-tests
    compile and run in parallel forks. torch is imported once and before CUDA is used, so that every forked child can
    use it.

    Raises:
        RuntimeError: A child failed or died, as without a GPU.
    """
    import torch

    from ...kernels.attention.polar import op as polar
    from ...kernels.attention.softmax import op as softmax
    from ...kernels.conv import op as conv
    from ...kernels.cross_entropy import op as cross_entropy
    from ...kernels.gated_delta import op as gated_delta
    from ...model.config import ModelConfig
    from ..attempt.device import use_shared_compile_cache

    # imported here once; otherwise every child would import it with its first op, which takes as long as torch
    for name in ("triton", "torch._dynamo"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    dtype, config = torch.bfloat16, ModelConfig()
    head_dim, window = config.head_dim, config.window_size
    choosers = {
        "gated_conv": lambda device: conv.choose_backend(device, dtype, config.conv_taps),
        "canon": lambda device: conv.choose_backend(device, dtype, config.canon_taps),
        "cross_entropy": lambda device: cross_entropy.choose_backend(device, dtype),
        "polar": lambda device: polar.choose_backend(device, dtype, head_dim),
        "polar_window": lambda device: polar.choose_backend(device, dtype, head_dim, window),
        "softmax": lambda device: softmax.choose_backend(device, dtype, head_dim, windowed=False),
        "softmax_window": lambda device: softmax.choose_backend(device, dtype, head_dim, windowed=True),
        "memory": lambda device: gated_delta.choose_backend(device, dtype, head_dim),
    }

    def choose_backends(ops: Sequence[str]) -> dict[str, Any]:
        """Return (backend, reason) for each of these ops; runs in a forked child."""
        device = current_device()
        use_shared_compile_cache(device)
        return {op: choosers[op](device) for op in ops}

    backends = run_in_forks(choose_backends, FORK_GROUPS)
    return {op: backends[op] for op in choosers}


def current_device() -> Any:
    """Return the current GPU; this initialises CUDA."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


FORK_GROUPS = (
    ("memory",), ("polar", "polar_window"), ("softmax", "softmax_window"), ("gated_conv", "canon"), ("cross_entropy",),
)  # fmt: skip
"""Groups of ops that share a self-test, which runs once per process; the slowest to compile come first."""


def run_in_forks(work: Callable[[Any], dict[str, Any]], parts: Sequence[Any]) -> dict[str, Any]:
    """Run `work` on every part in parallel forks of this process and merge the dicts that it returns.

    Blocks until all have ended; a later part overrides equal keys. After a failure the later children are left running.

    Args:
        work: Function of one part; it must return a dict that can be pickled.
        parts: Arguments of the calls, one per fork; each is a sequence of names, which messages list.

    Raises:
        RuntimeError: A child failed or died; the message names its part and the cause.
    """
    fork = multiprocessing.get_context("fork")
    children = []
    for part in parts:
        receiver, sender = fork.Pipe(duplex=False)
        child = fork.Process(target=_send_result, args=(work, part, sender))
        child.start()
        sender.close()
        children.append((part, child, receiver))
    merged: dict[str, Any] = {}
    for part, child, receiver in children:
        try:
            result = receiver.recv()
        except EOFError:
            child.join()
            result = f"its process ended with exit code {child.exitcode}"
        child.join()
        if isinstance(result, str):
            raise RuntimeError(f"self-test of {', '.join(part)}: {result}")
        merged |= result
    return merged


def _send_result(work: Callable[[Any], dict[str, Any]], part: Any, sender: Any) -> None:
    """Send `work(part)` through the pipe, or the error as a string "CLASS: text"; runs in a forked child.

    Raises:
        Exception: The error of `work` again, so that the child fails.
    """
    try:
        sender.send(work(part))
    except Exception as error:
        sender.send(f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise


def _disk_needs(runs: Path) -> dict[str, Any]:
    """Return the disk that the untrained cells of the default sweep need, those that run now included.

    Cells with a finished training and diverged ones are left out. Cells with the same model, resources, checkpoint
    settings and plugins share one restored config.

    Args:
        runs: Runs folder.

    Returns:
        A dict: sweep (name), cells (their number), place (where the space is needed), and these in bytes:
        disk_bytes_per_cell, disk_bytes_kept, disk_bytes_running (for one running cell), disk_bytes_free (None if
        unknown).
    """
    from ..attempt.trained_cells import restore_cell
    from ..planning.admission import disk_needed

    store = open_store()
    sweep = store.default_sweep()
    cell_by_size: dict[str, Any] = {}
    cells = []
    for state in store.cell_states(sweep):
        if state.trained_attempt_id is not None or state.state == "diverged":
            continue
        record = store.cell(state.cell_id)
        parts = {name: record.config.get(name) for name in ("model", "resources", "checkpoint", "plugins")}
        key = json.dumps(parts, sort_keys=True)
        if key not in cell_by_size:
            cell_by_size[key] = restore_cell(record, runs)
        cells.append(cell_by_size[key])
    usage = disk_needed(cells, runs)
    return {"sweep": sweep, "cells": len(cells), "place": usage.storage_root, **usage.as_json()}


def _cluster_facts(address: str, runs: Path) -> dict[str, Any]:
    """Return the facts of a cluster; only the key error, with its message, if it cannot be reached.

    Connects this process to the cluster. The keys are nodes (dicts of NodeFacts, of nodes that answered), alive (host
    names of all live nodes) and differing (package -> version -> hosts).
    """
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
    """Answer one query with one line of JSON on standard output; ATMA_DB names the database. Return 0.

    Errors of the query pass through. Queries are torch, kernels, links, disk (with the runs folder) and cluster (with address
    and runs folder); another one raises KeyError.

    Args:
        argv: Query and its arguments; None for those of the command line.
    """
    question, *rest = sys.argv[1:] if argv is None else argv
    handlers: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _torch_facts,
        "kernels": kernel_backends,
        "links": link_facts,
        "disk": lambda: _disk_needs(Path(*rest)),
        "cluster": lambda: _cluster_facts(rest[0], Path(rest[1])),
    }
    reply = handlers[question]()
    print(json.dumps(reply))
    return 0
