"""What every benchmark prints and writes: where, with what and when it was measured, and the numbers."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from ...kernels.choice import version
from ..errors import MachineError
from ..provenance import git_state

Tell = Callable[[str], None]


class Benchmark(Protocol):
    """The module of a benchmark."""

    def table(self, limits: Any, rows: Sequence[Any]) -> str: ...
    def as_dict(self, limits: Any, rows: Sequence[Any]) -> dict[str, object]: ...


def show(benchmark: Any, run: Callable[[torch.device, Tell], tuple[Any, Any]], out: Path | None, as_json: bool) -> None:
    """Runs it on the GPU; progress goes to stderr, the table, or JSON, to stdout. Raises MachineError without a GPU."""
    if not torch.cuda.is_available():
        raise MachineError("no usable CUDA GPU: torch sees none; benchmarks run on a machine with an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    measured = run(device, lambda line: print(line, file=sys.stderr, flush=True))
    found = {**facts(device), **benchmark.as_dict(*measured)}
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1) if as_json else heading(device) + "\n\n" + benchmark.table(*measured))


def show_rows(benchmark: Any, rows: Sequence[Any], out: Path | None, as_json: bool) -> None:
    """Prints and writes what was measured without a GPU."""
    found = {**facts(None), **benchmark.as_dict(rows)}
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1) if as_json else heading(None) + "\n\n" + benchmark.table(rows))


def facts(device: torch.device | None) -> dict[str, object]:
    """Machine, software, commit and date; of the GPU only when there is a device."""
    commit, dirty = git_state()
    graphics = {
        "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "triton": version("triton"),
    } if device is not None else {"cpus": os.cpu_count(), "python": platform.python_version()}  # fmt: skip
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        **graphics,
        "torch": torch.__version__,
        "command": ["atma-sweep", *sys.argv[1:]],
    }


def heading(device: torch.device | None) -> str:
    """The same in one line."""
    known = facts(device)
    gpu = f"{known.get('gpu')}, torch {known['torch']}, Triton {known.get('triton')}"
    machine = gpu if device is not None else f"{known['cpus']} CPUs, Python {known['python']}"
    return f"{known['date']}, {machine}, commit {known['commit']}" + (" with changes" if known["dirty"] else "")
