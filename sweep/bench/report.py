"""What every benchmark prints and writes: where, with what and when it was measured, and the numbers."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ...kernels.dispatch import version
from ...results.console.output_files import check_file_writable, is_stdout, resolve_format, write
from ..errors import MachineError
from ..executors.source_snapshot import git_state

Tell = Callable[[str], None]


def tell(line: str) -> None:
    """Print a line of progress, to standard error."""
    print(line, file=sys.stderr, flush=True)


def show(benchmark: Any, run: Callable[[torch.device, Tell], tuple[Any, Any]], out: Path | None, as_json: bool) -> None:
    """Runs the module of a benchmark on the GPU; progress goes to stderr, the table, or JSON, to stdout. Raises MachineError without a GPU."""
    if not torch.cuda.is_available():
        raise MachineError("no usable CUDA GPU: torch sees none; benchmarks run on a machine with an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    measured = run(device, tell)
    _tell(facts(device), benchmark, measured, out, as_json)


def show_rows(benchmark: Any, rows: Any, out: Path | None, as_json: bool) -> None:
    """Prints and writes what was measured without a GPU."""
    _tell(facts(None), benchmark, (rows,), out, as_json)


def _tell(known: dict[str, object], benchmark: Any, measured: Sequence[Any], out: Path | None, as_json: bool) -> None:
    found = json.dumps({**known, **as_dict(*measured)}, indent=1)
    # printed first, so that a file that cannot be written costs no measurement
    if not is_stdout(out):
        print(found if as_json else heading(known) + "\n\n" + benchmark.table(*measured), flush=True)
    if out is not None:
        write(out, found + "\n")


def as_dict(*measured: Any) -> dict[str, Any]:
    """Return for JSON what a benchmark measured: ceilings and rows, rows alone, or a dataclass that holds rows."""
    *limits, rows = measured
    if is_dataclass(rows):
        return asdict(rows)  # type: ignore[arg-type]
    return {**({"ceilings": limits[0]._asdict()} if limits else {}), "rows": [asdict(row) for row in rows]}


def check_place(out: Path | None) -> None:
    """Before the work: whether the numbers can go there. Raises StoreError, WriteRefused."""
    resolve_format(out, None, {".json": "json"}, "json", option="")
    if out is not None:
        check_file_writable(out)


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


def heading(known: dict[str, object]) -> str:
    """The facts in one line."""
    machine = (
        f"{known['gpu']}, torch {known['torch']}, Triton {known['triton']}"
        if "gpu" in known
        else f"{known['cpus']} CPUs, Python {known['python']}"
    )
    return f"{known['date']}, {machine}, commit {known['commit']}" + (" with changes" if known["dirty"] else "")
