"""Output of a benchmark: machine, software and date of the measurement, and its numbers as a table or JSON."""

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
from ...results.console.output_files import check_file_writable, is_stdout, resolve_format, write_file
from ..errors import MachineError
from ..executors.source_snapshot import git_state

Tell = Callable[[str], None]


def tell(line: str) -> None:
    """Print a line of progress, to standard error."""
    print(line, file=sys.stderr, flush=True)


def run_and_report(
    benchmark: Any, run: Callable[[torch.device, Tell], tuple[Any, Any]], out: Path | None, as_json: bool
) -> None:
    """Run a benchmark on the current GPU, then print and write its numbers.

    Progress goes to standard error, the table or JSON to standard output. The JSON file is written last.

    Args:
        benchmark: Module whose `table` takes ceilings and rows.
        run: Takes the device and a function for progress; returns (ceilings, rows).
        out: JSON file; None writes none. Standard output ("-") gets the JSON in place of the table.
        as_json: True prints JSON instead of the table.

    Raises:
        MachineError: Without a usable GPU.
    """
    if not torch.cuda.is_available():
        raise MachineError("no usable CUDA GPU: torch sees none; run benchmarks on a machine with an NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    measured = run(device, tell)
    _write_report(environment_facts(device), benchmark, measured, out, as_json)


def report_rows(benchmark: Any, rows: Any, out: Path | None, as_json: bool) -> None:
    """Print and write numbers that were measured without a GPU; the arguments are those of `run_and_report`."""
    _write_report(environment_facts(None), benchmark, (rows,), out, as_json)


def _write_report(
    environment: dict[str, object], benchmark: Any, measured: Sequence[Any], out: Path | None, as_json: bool
) -> None:
    """Print the table or JSON, then write the file, so that a failing write loses no measurement.

    JSON holds the facts of the environment and the keys of `as_dict`.

    Args:
        environment: Facts, as `environment_facts` returns them.
        benchmark: Module whose `table` takes `measured`.
        measured: (Ceilings, rows), or rows alone.
        out: JSON file; None writes none. Standard output ("-") gets the JSON, and nothing else is printed.
        as_json: True prints JSON instead of the table.
    """
    json_text = json.dumps({**environment, **as_dict(*measured)}, indent=1)
    # printed first, so that a failing write loses no measurement
    if not is_stdout(out):
        print(json_text if as_json else heading(environment) + "\n\n" + benchmark.table(*measured), flush=True)
    if out is not None:
        write_file(out, json_text + "\n")


def as_dict(*measured: Any) -> dict[str, Any]:
    """Return a benchmark's result as JSON values: "ceilings", if there are any, and "rows".

    A dataclass in place of the rows gives its own fields instead.

    Args:
        measured: Ceilings and rows, rows alone, or a dataclass that holds rows.
    """
    *limits, rows = measured
    if is_dataclass(rows):
        return asdict(rows)  # type: ignore[arg-type]
    return {**({"ceilings": limits[0]._asdict()} if limits else {}), "rows": [asdict(row) for row in rows]}


def check_output(out: Path | None) -> None:
    """Check, before the work, that the JSON file can be written; None passes.

    Raises StoreError or WriteRefused.
    """
    resolve_format(out, None, {".json": "json"}, "json", option="")
    if out is not None:
        check_file_writable(out)


def environment_facts(device: torch.device | None) -> dict[str, object]:
    """Return date, commit, software and command of this run.

    Keys: date (UTC, ISO), commit, dirty (True with uncommitted changes), torch, command (list of words); with a device
    also gpu, cuda and triton, without one cpus and python.
    """
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


def heading(environment: dict[str, object]) -> str:
    """Return the facts as one line: date, machine, versions, commit; the command is left out."""
    machine = (
        f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}"
        if "gpu" in environment
        else f"{environment['cpus']} CPUs, Python {environment['python']}"
    )
    return f"{environment['date']}, {machine}, commit {environment['commit']}" + (
        " (uncommitted changes)" if environment["dirty"] else ""
    )
