"""Requirements of a launch that this machine does not meet, collected all at once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...model.block_parts import fla_catalogue
from ...model.config import ModelConfig
from ...results.console.quantities import format_bytes
from ..config import Resources
from ..executors.registry import EXECUTORS
from ..grid.grid import Grid
from ..host import hardware
from ..host.allocation import Machine, is_type
from ..planning import admission, cost_estimate
from ..planning.admission import DiskUsage, Unprepared
from ..planning.cost_estimate import Bill
from ..planning.planner import Plan
from ..planning.render import price_line
from ..probes import PROBES
from .launch import LaunchRequest

Kind = Literal["text", "GPU", "CPU cores", "memory", "disk", "packages"]
REQUIRED_PACKAGES = ("torch", "numpy", "safetensors")
"""Packages that every attempt imports."""
UNCHECKED_REMARK = "until the text is prepared, ids of cells are provisional and its size is not checked"
"""Remark on a plan whose text is not prepared."""
PART_CHECK = f"{__package__.rpartition('.')[0]}.attempt.device"
"""Module that tries block parts on the GPU if it is run."""
PART_CHECK_S = 600.0
"""Longest time in seconds that this may take; the kernels of flash-linear-attention are compiled meanwhile."""
DISK_REMEDY = "free disk space, set checkpoint.keep: nothing, or choose another disk with checkpoint.path"
"""Remedy of a shortage of disk."""


@dataclass(frozen=True)
class Lack:
    """Requirement of a launch that this machine does not meet."""

    kind: Kind
    problem: str
    """Sentence that says which part is lacking and for how many cells."""
    remedy: str
    """Action that solves the problem, often a command."""
    blocks: bool = True
    """True if no cell can start before it is met; a launch is then refused."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the problem, keyed by names with units."""

    def as_json(self) -> dict[str, Any]:
        """Return a dict: kind, problem, remedy, blocks, and the entries of `numbers` beside them."""
        named = vars(self) | dict(self.numbers)
        return {name: value for name, value in named.items() if name != "numbers"}


def lacks(request: LaunchRequest, plan: Plan, *, trial: bool = False) -> list[Lack]:
    """Return every requirement of the planned attempts that this machine does not meet.

    In this order: texts, block parts without a GPU, GPUs, CPU cores, memory, disk, packages, a torch build without CUDA. Packages are torch,
    numpy, safetensors, those of the executor and of probes, and, with a GPU on 64-bit x86 Linux, triton. Empty for a plan whose
    attempts all run already, or that has none; trials still to be proposed count as attempts. For an executor at an
    address only texts and the executor's packages are checked, since its attempts run on other machines.

    Args:
        request: Launch that is planned.
        plan: Its plan.
        trial: Try the block parts of an installed library on the GPU, which takes up to minutes for each the first
            time.
    """
    tasks = [task for task in plan.with_proposals().tasks if task.standing != "running"]
    if not tasks:
        return []
    executor, cells = EXECUTORS[request.executor], [task.cell for task in tasks]
    lacking = [_lacking_text(text) for text in admission.unprepared(cells, request.grid, request.runs / "corpora")]
    library = [cell.config for cell in cells if cell.config.model.attn_type.startswith(f"{fla_catalogue.PREFIX}:")]
    lacking += _parts_without_gpu([config.model.attn_type for config in library if not config.resources.gpus])
    if executor.needs_address:
        return lacking + _lacking_packages(executor.packages)
    gpus = hardware.gpu_names() if any(cell.config.resources.gpus for cell in cells) else []
    distinct = {config.model.model_dump_json(): config.model for config in library if config.resources.gpus}
    if trial and gpus and distinct:
        remedy = "leave these cells out with --only, or launch on a machine whose GPU and Triton fla supports"
        lacking += [Lack("GPU", reason, remedy) for reason in refusals_on_gpu(distinct.values())]
    lacking += lacking_resources(Counter(cell.config.resources for cell in cells), Machine.local(), gpus)
    if plan.disk is not None:
        # a cell that has begun already has its checkpoints on the disk
        is_begun = any(task.kind == "evaluate" or task.remaining_share < 1 for task in tasks)
        lacking += _lacking_disk(plan.disk, is_begun=is_begun)
    kernels = ("triton",) if gpus and sys.platform == "linux" and platform.machine() == "x86_64" else ()
    probes = {name: None for cell in cells for probe in cell.config.eval.probes for name in PROBES.load(probe).packages}
    required = (*REQUIRED_PACKAGES, *executor.packages, *kernels, *probes)
    return lacking + _lacking_packages(required) + (cpu_build() if gpus else [])


def refusals_on_gpu(models: Iterable[ModelConfig]) -> list[str]:
    """Return why the block parts of these networks cannot run on this machine's GPU; empty if they can.

    They are tried in a process of its own, so that this one starts no CUDA. A part that has passed on this machine
    before is not tried again. A process that fails gives its last line as a reason.
    """
    sections = [model.model_dump(mode="json") for model in models]
    command = [sys.executable, "-m", PART_CHECK]
    try:
        done = subprocess.run(
            command, input=json.dumps(sections), capture_output=True, text=True, timeout=PART_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [f"the check of block parts took longer than {PART_CHECK_S:g} s"]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return [f"the check of block parts failed: {lines[-1]}"]
    reasons: list[str] = json.loads(done.stdout.splitlines()[-1])
    return reasons


def _parts_without_gpu(mixers: Sequence[str]) -> list[Lack]:
    """Return one blocking lack for the cells whose layers of flash-linear-attention shall train without a GPU."""
    if not mixers:
        return []
    names, need = ", ".join(sorted(set(mixers))), "1 cell needs" if len(mixers) == 1 else f"{len(mixers)} cells need"
    problem = f"{need} a GPU for {names}, and resources.gpus is 0; layers of flash-linear-attention run on GPUs only"
    remedy = "set resources.gpus to 1 and launch on a machine with a GPU, or leave these cells out with --only"
    return [Lack("GPU", problem, remedy, numbers={"cells": len(mixers), "mixers": sorted(set(mixers))})]


def _lacking_text(text: Unprepared) -> Lack:
    """Return the blocking lack for a text that is not prepared.

    Its numbers are corpus, tokens, download_bytes and command.
    """
    remedy = ", ".join(filter(None, (text.command, "or launch with --prepare", text.alternative)))
    numbers = {"corpus": text.corpus, "tokens": text.tokens, "download_bytes": text.bytes, "command": text.command}
    return Lack("text", text.problem, remedy, numbers=numbers)


def lacking_resources(sizes: Counter[Resources], machine: Machine, gpus: Sequence[str]) -> list[Lack]:
    """Return the GPUs, CPU cores and memory that single cells need and the machine does not have.

    One blocking lack per kind at most, even if only some of the cells lack it; it has their number. The problem text
    names the largest demand.

    Args:
        sizes: Number of cells by the resources that one of them needs; not empty.
        machine: This machine's cores and memory.
        gpus: Names of its GPUs.
    """
    lacking = []

    def check(kind: Kind, is_lacking: Callable[[Resources], bool], problem: str, remedy: str, **numbers: Any) -> None:
        """Append a lack if any cell meets `is_lacking`; `problem` completes "N cells need ..."."""
        if cells := sum(number for resources, number in sizes.items() if is_lacking(resources)):
            need = f"{cells} cells need" if cells > 1 else "1 cell needs"
            lacking.append(Lack(kind, f"{need} {problem}", remedy, numbers={"cells": cells, **numbers}))

    types = sorted({asks.gpu_type for asks in sizes if asks.gpu_type is not None})
    kind = f" of type {' or '.join(types)}" if types else ""
    check(
        "GPU",
        lambda resources: resources.gpus > 0 and not any(is_type(name, resources.gpu_type) for name in gpus),
        f"a GPU{kind}, and this machine has {', '.join(gpus) or 'none that can be used'}",
        "launch on a machine that has one, or set resources.gpus to 0 to train on the CPU",
        gpus=list(gpus),
    )
    at_once = max((int(asks.gpus) for asks in sizes), default=0)
    most = max((gpus.count(name) for name in gpus), default=0)
    check(
        "GPU",
        lambda asks: 0 < _largest_group(asks, gpus) < asks.gpus and asks.gpus > 1,
        f"up to {at_once} GPUs{kind} of one model at once, and this machine has {', '.join(gpus)}",
        f"set resources.gpus to {most} or less; cells continue on another number of GPUs",
        gpus=list(gpus), gpus_needed=at_once,
    )  # fmt: skip
    cpus = max(asks.cpus for asks in sizes)
    check(
        "CPU cores",
        lambda asks: asks.cpus > machine.cpus,
        f"{cpus} CPU cores, and this machine has {machine.cpus}",
        f"set resources.cpus to {machine.cpus} or less",
        cpus_needed=cpus, cpus=machine.cpus,
    )  # fmt: skip
    memory_gb = max(asks.memory_gb or 0 for asks in sizes)
    check(
        "memory",
        lambda asks: (asks.memory_gb or 0) > machine.memory_gb,
        f"{memory_gb:g} GiB of memory, and this machine has {machine.memory_gb:.4g} GiB",
        "lower resources.memory_gb, or launch on a machine with more (a Slurm job: sbatch --mem)",
        memory_gb_needed=memory_gb, memory_gb=round(machine.memory_gb, 3),
    )  # fmt: skip
    return lacking


def _largest_group(resources: Resources, gpus: Sequence[str]) -> int:
    """Return the largest number of GPUs of one model among those of the requested type; 0 without any."""
    names = [name for name in gpus if is_type(name, resources.gpu_type)]
    return max((names.count(name) for name in names), default=0)


def _lacking_disk(disk: DiskUsage, *, is_begun: bool) -> list[Lack]:
    """Return the shortage of disk as a list of one or no lack; empty if the free space is unknown.

    It blocks if one running cell does not fit and no cell has begun; otherwise it is only reported.

    Args:
        disk: Disk usage of the plan.
        is_begun: True if a cell of the plan has checkpoints on the disk already.
    """
    if not disk.is_short or disk.free is None:
        return []
    problem = f"{format_bytes(disk.retained)} to keep and {format_bytes(disk.running)} for a running cell; {format_bytes(disk.free)} free in {disk.storage_root}"
    return [
        Lack("disk", problem, DISK_REMEDY, blocks=disk.free < disk.running and not is_begun, numbers=disk.as_json())
    ]


def _lacking_packages(names: Sequence[str]) -> list[Lack]:
    """Return one blocking lack that names all of these modules that are not installed; empty if there is none."""
    missing = [name for name in names if not is_installed(name)]
    if not missing:
        return []
    remedy = shlex.join(["pip", "install", "-c", "constraints.txt", *missing])
    return [Lack("packages", f"{', '.join(missing)} not installed", remedy, numbers={"packages": missing})]


def is_installed(name: str) -> bool:
    """Return True if the module can be imported; a None entry in sys.modules counts as not installed."""
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def cpu_build() -> list[Lack]:
    """Return one blocking lack if the installed torch is built for the CPU, else an empty list.

    Also empty without torch. Judged by the version, which ends in +cpu; torch is not imported.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if not version.endswith("+cpu"):
        return []
    remedy = "install a build for CUDA, as https://pytorch.org/get-started says"
    return [Lack("packages", f"torch {version} is built for the CPU", remedy, numbers={"packages": ["torch"]})]


def possible_commands(grid: Grid, lacking: Sequence[Lack]) -> list[tuple[str, str]]:
    """Return (command, effect) pairs of fixed commands that work on this machine today.

    They train the quick grid, print the paper's results, and price `grid` on other machines. The first is left out if
    packages or disk block the launch, or if `grid` is the quick grid itself.
    """
    name = grid.short_path
    commands = [
        ("atma-sweep launch quick", "trains twelve small models on the CPU, in minutes"),
        ("atma-sweep report --sweep printed-v2 --table 6", "prints the paper's complete results"),
        (
            shlex.join(["atma-sweep", "plan", name, "--gpus", "8", "--gpu", "H200"]),
            "estimates the GPU-hours and duration of this grid on other machines",
        ),
    ]
    trains = not any(lack.kind in ("packages", "disk") and lack.blocks for lack in lacking) and name != "quick"
    return commands if trains else commands[1:]


def describe(lacking: Sequence[Lack]) -> list[str]:
    """Return a heading and two indented lines per lack (kind and problem, remedy); empty without a lack."""
    if not lacking:
        return []
    width = max(len(lack.kind) for lack in lacking)
    lines = ["this machine lacks:"]
    for lack in lacking:
        lines += [f"  {lack.kind:<{width}}  {lack.problem}", f"  {'':<{width}}  -> {lack.remedy}"]
    return lines


def remarks(lines: Sequence[str], lacking: Sequence[Lack]) -> list[str]:
    """Return the last lines of a plan: the remarks in `lines`, followed by the lacks.

    If a text is lacking, remarks on unprepared text are replaced by UNCHECKED_REMARK. A shortage of disk is left out,
    since the plan's own line on disk shows it.
    """
    if any(lack.kind == "text" for lack in lacking):
        lines = [*(remark for remark in lines if admission.UNPREPARED not in remark), UNCHECKED_REMARK]
    return [*lines, *describe([lack for lack in lacking if lack.kind != "disk"])]


@dataclass(frozen=True)
class Refusal:
    """Launch that cannot begin on this machine: the sweep, its price, the lacks, and commands that work instead."""

    grid: Grid
    cells: int
    """Number of cells of the grid that this launch covers; of trials for a study."""
    tokens: int
    """Number of tokens to train."""
    bill: Bill
    lacking: Sequence[Lack]

    def lines(self) -> list[str]:
        """Return the refusal as lines for people.

        In this order: number of cells and tokens, price, every lack, commands that work instead.
        """
        commands = possible_commands(self.grid, self.lacking)
        unit = "cell" if self.grid.search is None else "trial"
        width = max(len(command) for command, _ in commands)
        return [
            f"{self.grid.name} cannot be launched on this machine: {self.cells:,} {unit}{'s' if self.cells != 1 else ''}, "
            f"{self.tokens:,} tokens to train",
            price_line(self.bill),
            *describe(self.lacking),
            "commands that work on this machine:",
            *(f"  {command:<{width}}  {effect}" for command, effect in commands),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the refusal as a dict.

        Keys: sweep, cells, tokens, price (as `cost_estimate.as_json`), lacks (as `Lack.as_json`), possible. `possible`
        has a dict per command: command, description.
        """
        return {
            "sweep": self.grid.name,
            "cells": self.cells,
            "tokens": self.tokens,
            "price": cost_estimate.as_json(self.bill),
            "lacks": [lack.as_json() for lack in self.lacking],
            "possible": [
                {"command": command, "description": effect}
                for command, effect in possible_commands(self.grid, self.lacking)
            ],
        }
