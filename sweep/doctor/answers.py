"""What python -m atma_sweep.sweep.doctor answers, in a process that may import torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...results.store import open_store
from .case import _version


def _about_torch() -> dict[str, Any]:
    import torch

    from ...kernels.gated_delta import fla_is_right

    triton = _version("triton") or "0"
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


def _about_kernels() -> dict[str, Any]:
    """Op -> (backend, reason), at the sizes of the shipped models."""
    import torch

    from ...kernels import conv, cross_entropy, gated_delta, polar, softmax_attention
    from ...model.config import ModelConfig
    from ..work import share_compiled

    device, dtype, config = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, ModelConfig()
    share_compiled(device)
    size_, window = config.head_dim, config.window_size
    return {
        "gated_conv": conv.choose_backend(device, dtype, config.conv_taps),
        "canon": conv.choose_backend(device, dtype, config.canon_taps),
        "cross_entropy": cross_entropy.choose_backend(device, dtype),
        "polar": polar.choose_backend(device, dtype, size_),
        "polar_window": polar.choose_backend(device, dtype, size_, window),
        "softmax": softmax_attention.choose_backend(device, dtype, size_, windowed=False),
        "softmax_window": softmax_attention.choose_backend(device, dtype, size_, windowed=True),
        "memory": gated_delta.choose_backend(device, dtype, size_),
    }


def _about_disk(runs: Path) -> dict[str, Any]:
    """What the untrained cells of the default sweep need; cells that differ in their seed alone are counted together."""
    from ..disk import needed
    from ..loading import restored

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
            alike[key] = restored(record, runs)
        cells.append(alike[key])
    found = needed(cells, runs)
    return {"sweep": sweep, "cells": len(cells), "place": found.place, **found.as_json()}


def _about_cluster(address: str, runs: Path) -> dict[str, Any]:
    """What its nodes say of themselves, or the error that keeps us out of it."""
    from ..errors import SweepError
    from ..scheduler import connection

    try:
        connection.connect(address)
        nodes = connection.survey(runs)
    except SweepError as error:
        return {"error": str(error)}
    return {
        "nodes": [asdict(node) for node in nodes],
        "alive": [node["NodeManagerHostname"] for node in connection.live_nodes()],
        "differing": connection.differing(nodes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Answers one question with one line of JSON; the database is named by ATMA_DB."""
    question, *rest = sys.argv[1:] if argv is None else argv
    ask: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _about_torch,
        "kernels": _about_kernels,
        "disk": lambda: _about_disk(Path(*rest)),
        "cluster": lambda: _about_cluster(rest[0], Path(rest[1])),
    }
    said = ask[question]()
    print(json.dumps(said))
    return 0
