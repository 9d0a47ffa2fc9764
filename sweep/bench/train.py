"""Training speed: tokens per second of complete optimizer steps of real cells on random tokens."""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...kernels.dispatch import use_torch_backend
from ...model.backbone import Backbone
from ...results.console.text import did_you_mean
from ..attempt.device import CUBLAS_WORKSPACE, build_network, use_shared_compile_cache
from ..config import TrainConfig
from ..data.batches import Batches
from ..errors import GridError, PartRefused
from ..grid.cell import Cell
from ..grid.grid import load_grid
from ..ranks.group import SINGLE, Ranks
from ..training import flops, optimizer_steps
from ..training.loop import Trainer, TrainingPoint, UnvalidatedPoint, ValidationPoint
from ..training.sharded import build_optimizers
from .ceilings import Ceilings, ceilings


@dataclass(frozen=True)
class Kernel:
    """A kernel of one step, all its launches together; `ms` is device time in milliseconds."""

    name: str
    kind: str
    """Category, as `kind_of` returns it."""
    launches: int
    ms: float


@dataclass
class TrainRow:
    """Training speed of one cell. Memory in bytes, times in seconds."""

    cell: str
    """Slug."""
    tokens_per_s: float
    low: float
    high: float
    """Median, smallest and largest over the rounds."""
    first_step: float
    """Building, compiling and the first optimizer step."""
    peak_memory: int
    """Peak of this cell alone: weights, optimizer and activations."""
    optimizer: float
    """Clipping and both optimizers in one step."""
    mfu: float | None
    """Ratio of the model's FLOP/s to the measured matrix product; None if the FLOPs are unknown."""
    mfu_paper: float | None
    """Ratio of the FLOP/s by the paper's formula to the GPU's nominal peak; None if either is unknown."""
    kernels: dict[str, str]
    """Op name -> implementation that the network uses."""
    micro_batch: int
    """Rows of a micro-batch."""
    steps: str = ""
    """Queuing of steps, as CUDA graphs or one by one, and the reason."""
    unknown: str | None = None
    """Reason why the FLOPs are unknown."""
    changed: str = ""
    """Settings that the command changed; "" for the cell as its grid has it."""
    profile: dict[str, float] = field(default_factory=dict)
    """Kind of kernel -> share of the device time."""
    lines: list[Kernel] = field(default_factory=list)
    """Kernels of the profiled step, the longest first."""


PARTS_BASE = "intended-370m"
"""Base whose network times parts."""
DEFAULT_CELLS = ("nope", "rope", "polar", "polar+m1", "polar+d1+m1")
"""Cells timed by default: attention type, with memory (m1), with the distractor loss (d1)."""


def select_cells(grid: str, slugs: Sequence[str], sets: Sequence[str]) -> list[Cell]:
    """Return cells of a grid by slug, in the order of `slugs`; nope, rope, polar, polar+m1 and polar+d1+m1 without slugs.

    A slug without its seed gives the cell of the first seed. The corpus is a placeholder: no text is read.

    Args:
        grid: Path or name of the grid.
        slugs: Slugs of cells, with or without seed.
        sets: Overrides of `--set`.

    Raises:
        GridError: For an unknown grid or slug.
    """
    cells = _cells(grid, sets)
    by_slug = {name: cell for cell in reversed(cells) for name in (cell.slug, cell.slug.rsplit("-s", 1)[0])}
    wanted = slugs or [
        f"{attention}-baseline-d{int('d1' in rest)}-m{int('m1' in rest)}-w0"
        for attention, *rest in (name.split("+") for name in DEFAULT_CELLS)
    ]
    for slug in wanted:
        if slug not in by_slug:
            near = did_you_mean(slug, by_slug, most=3)
            raise GridError(grid, None, slug, f"no such cell; atma-sweep launch {grid} --dry-run lists the cells{near}")
    return [by_slug[slug] for slug in wanted]


def run_parts(
    names: Sequence[str],
    sets: Sequence[str],
    device: torch.device,
    *,
    rounds: int = 3,
    tell: Callable[[str], None] = print,
) -> tuple[Ceilings, list[TrainRow]]:
    """Time mixers and block parts in the 370M network, one after the other, so that one at a time is in memory.

    A part that the machine refuses, or that does not fit into its memory, gets a line and no row.

    Args:
        names: Values of `attn_type`, such as "fla:GatedDeltaNet".
        sets: Overrides of `--set`.
        device: A CUDA device.
        rounds: Timed rounds per part.
        tell: Called with a line per part.

    Returns:
        (Limits of the device, a row per timed part).

    Raises:
        GridError: For a part that the grid refuses.
    """
    limits, rows = ceilings(device), []
    cells = [replace(part_cell(name, sets), slug=name) for name in names]
    for cell in cells:
        try:
            rows += run([cell], device, rounds=rounds, limits=limits, tell=tell)[1]
        except (PartRefused, torch.OutOfMemoryError) as error:
            tell(f"{cell.slug}: left out: {str(error).splitlines()[0]}")
        gc.collect()
        torch.cuda.empty_cache()
    return limits, rows


def part_cell(name: str, sets: Sequence[str] = ()) -> Cell:
    """Return the cell of a mixer or block part in the 370M network. Raises GridError for one that cannot be built."""
    with tempfile.TemporaryDirectory() as folder:
        grid = Path(folder) / "parts.yaml"
        grid.write_text(json.dumps({"name": "parts", "extends": PARTS_BASE, "axes": {"attn_type": [name]}}))
        return _cells(str(grid), sets)[0]


def with_graph_modes(cells: Sequence[Cell], ways: Sequence[str]) -> list[Cell]:
    """Return each cell once per value of `train.graphs`, the copies of a cell side by side; id and slug stay.

    The cells are returned unchanged if `ways` is empty.
    """
    return [_with_graphs(cell, way) for cell in cells for way in ways] if ways else list(cells)


def _with_graphs(cell: Cell, way: str) -> Cell:
    config = cell.config.model_dump()
    train = TrainConfig.model_validate({**config["train"], "graphs": way})
    return replace(cell, config=cell.config.model_copy(update={"train": train}))


def _cells(grid: str, sets: Sequence[str]) -> list[Cell]:
    return load_grid(grid, sets=sets, rename="bench").expand(lambda data: "random tokens")


def setting_changes(grid: str, cells: Sequence[Cell], sets: Sequence[str]) -> dict[str, str]:
    """Return slug -> changes from the grid's own cell, such as "train.micro_batch 4 -> 16", separated by commas.

    Unchanged cells are left out; a cell that the grid does not have maps to a text that says so. Empty without `sets`.

    Args:
        grid: Path or name of the grid.
        cells: Cells, as expanded with `sets`.
        sets: Overrides of `--set`.
    """
    if not sets:
        return {}
    originals = {cell.slug: _flatten(cell.config.model_dump(mode="json")) for cell in _cells(grid, [])}
    changes_by_slug = {}
    for cell in cells:
        before, now = originals.get(cell.slug), _flatten(cell.config.model_dump(mode="json"))
        if before is None:
            changes_by_slug[cell.slug] = f"not a cell of {grid}"
            continue
        differ = (f"{path} {before.get(path)} -> {value}" for path, value in now.items() if before.get(path) != value)
        changes_by_slug[cell.slug] = ", ".join(differ)
    return {slug: change for slug, change in changes_by_slug.items() if change}


def _flatten(tree: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping of dotted paths, each after the prefix `within`; lists are values."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, f"{within}{key}.") if isinstance(value, Mapping) else {f"{within}{key}": value}
    return leaves


class _NoHooks:
    """Watcher of a training that never stops or saves it."""

    def progress(self, step: int, loss: float, tokens_per_s: float) -> None: ...
    def point(self, point: ValidationPoint) -> None: ...
    def training_points(self, points: Sequence[TrainingPoint]) -> None: ...
    def should_stop(self) -> bool:
        return False

    def should_save(self, step: int) -> bool:
        return False

    def save(self, step: int, tokens: int, wall_s: float, pending: UnvalidatedPoint | None = None) -> None: ...


class TimedCell:
    """A cell, built and warmed up, whose steps can be timed, on a GPU or the CPU. Its tokens are random."""

    def __init__(self, cell: Cell, device: torch.device, ranks: Ranks = SINGLE) -> None:
        """Build the network and run two steps, which compile and capture; takes up to minutes.

        Sets the kernels and the determinism of the process, and on CUDA the shared compile cache; resets the peak of
        memory.

        Args:
            cell: The cell.
            device: Device to run on.
            ranks: Group of the processes that train the cell together, each of which calls every method.
        """
        self.cell, self.device = cell, device
        self.cuda = device.type == "cuda"
        config = cell.config
        self._as_launched()
        before = torch.cuda.memory_allocated(device) if self.cuda else 0
        if self.cuda:
            use_shared_compile_cache(device, *(plugin.sha256 for plugin in config.plugins))
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        self.model = build_network(config, device, training=True)
        parameters = sum(p.numel() for p in self.model.parameters())
        graphs, why = optimizer_steps.should_capture(config.train, parameters, device, ranks.size)
        self.steps = f"{'CUDA graphs' if graphs else 'eager'}: {why}"
        if config.train.loss_on == "marked":
            self.steps += "; the random tokens have no marks, so the loss covers all targets"
        """How its steps are queued, and why."""
        self.trainer = _trainer(self.model, config.train, config.seed, device, graphs, self._on_capture_refused, ranks)
        if config.train.compile and self.cuda:
            self.model.compile_blocks(regional=config.train.compile == "blocks")
        self.wait()
        self.built = time.perf_counter() - began
        """Seconds until the network was there."""
        self.step = 0
        self.advance()
        self.wait()
        self.first_step = time.perf_counter() - began
        self.advance()
        self.wait()
        self.second_step = time.perf_counter() - began - self.first_step
        """Seconds of the one that steps are captured in, where they are."""
        self.peak = torch.cuda.max_memory_allocated(device) - before if self.cuda else 0

    def _on_capture_refused(self, why: str) -> None:
        self.steps = f"eager: {why}"

    def wait(self) -> None:
        """Block until the device has finished all queued work."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _as_launched(self) -> None:
        """Set kernels and determinism of the process as the cell requests; other cells change them in turn."""
        train = self.cell.config.train
        use_torch_backend(train.kernels == "torch")
        torch.use_deterministic_algorithms(train.deterministic)
        torch.backends.cudnn.deterministic = train.deterministic

    def advance(self) -> None:
        """Queue one optimizer step; on CUDA it may still run when this returns (see `wait`)."""
        self._as_launched()
        self.trainer.train_step(self.step)
        self.step += 1

    def optimizer_seconds(self) -> float:
        """Run one optimizer step and return the seconds of its end: clipping and all optimizers.

        On CUDA it is the device's time while the host queues work ahead, as in training. With several ranks the time has
        the wait for gradients that are still on their way, and the exchange of weights.
        """
        runner = self.trainer.step_runner
        finish, seconds = runner.finish_step, [0.0]
        if self.cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def finish_timed(factor: float) -> tuple[torch.Tensor, torch.Tensor]:
            """Finish the step as `OptimizerSteps.finish_step` does, and note the time that it takes."""
            began = time.perf_counter()
            if self.cuda:
                begin.record()
            done = finish(factor)
            if self.cuda:
                end.record()
            seconds[0] = time.perf_counter() - began
            return done

        runner.finish_step = finish_timed  # type: ignore[method-assign]
        self.advance()
        self.wait()
        runner.finish_step = finish  # type: ignore[method-assign]
        return begin.elapsed_time(end) / 1e3 if self.cuda else seconds[0]

    def profile(self) -> list[Kernel]:
        """Run one optimizer step on CUDA and return its kernels, the longest total time first.

        Launches of the same kernel are one entry; those without device time are left out.
        """
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.advance()
            torch.cuda.synchronize()
        kernels = [
            Kernel(event.key, kind_of(event.key), event.count, event.self_device_time_total / 1e3)
            for event in profiler.key_averages()
            if event.self_device_time_total > 0
        ]
        return sorted(kernels, key=lambda kernel: -kernel.ms)


def shares(lines: Sequence[Kernel]) -> dict[str, float]:
    """Return kind -> share of the kernels' total time, from 0 to 1, the largest first; empty without kernels."""
    spent: dict[str, float] = {}
    for line in lines:
        spent[line.kind] = spent.get(line.kind, 0.0) + line.ms
    total = sum(spent.values())
    return {kind: value / total for kind, value in sorted(spent.items(), key=lambda item: -item[1])}


def kind_of(kernel: str) -> str:
    """Return the category of a CUDA kernel by its name, ignoring case; "other" if no pattern matches.

    The first matching category counts: gated convolution and Canon, cross-entropy rows, memory, compiled elementwise,
    matrix products, attention, copies.
    """
    name = kernel.lower()
    kinds = {
        "gated convolution and Canon": ("_gated_forward", "_gated_backward", "_canon_"),
        "cross-entropy rows": ("_capped_rows",),
        "memory": ("_scan", "_readout", "_inverse", "_key_gradients", "_pair_gradients", "_sum_heads", "chunk_", "wy_"),
        "compiled elementwise": ("triton_",),
        "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
        "attention": ("_forward", "_rows", "_dq", "_dkv", "fmha", "flash", "cudnn", "sdpa"),
        "copies": ("memcpy", "memset"),
    }
    for kind, patterns in kinds.items():
        if any(word in name for word in patterns):
            return kind
    return "other"


def run(
    cells: Sequence[Cell],
    device: torch.device,
    *,
    rounds: int = 3,
    steps: int = 1,
    profile: bool = False,
    changed: Mapping[str, str] | None = None,
    limits: Ceilings | None = None,
    tell: Callable[[str], None] = print,
) -> tuple[Ceilings, list[TrainRow]]:
    """Time the cells in turns, so that a warmer chip favours none; all are in memory at the same time.

    Raises the compiler's limit of recompilations to 8 max(8, number of cells), and for deterministic cells sets
    CUBLAS_WORKSPACE_CONFIG to ":4096:8".

    Args:
        cells: Cells to time.
        device: A CUDA device.
        rounds: Timed rounds per cell.
        steps: Optimizer steps per round; a time is the mean over them.
        profile: True profiles one more step of each cell.
        changed: Slug -> changed settings, as `setting_changes` returns them; only copied to the rows.
        limits: Limits of the device; None measures them.
        tell: Called with a line per cell after its first step.

    Returns:
        (Limits of the device, a row per cell in the order given).
    """
    if any(cell.config.train.deterministic for cell in cells):
        # read when CUDA is first used; its cost for the other cells is within the noise
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    # by default, the compiler gives up after a few networks per process
    compiler: Any = importlib.import_module("torch._dynamo.config")
    compiler.recompile_limit = 8 * max(8, len(cells))
    limits = limits or ceilings(device)
    runners = []
    for cell in cells:
        runners.append(TimedCell(cell, device))
        tell(f"{cell.slug}: first step after {runners[-1].first_step:.1f} s")
    times_by_cell: list[list[float]] = [[] for _ in runners]
    for _ in range(rounds):
        for runner, times in zip(runners, times_by_cell, strict=True):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            for _ in range(steps):
                runner.advance()
            torch.cuda.synchronize(device)
            times.append((time.perf_counter() - began) / steps)
    rows = [
        _row(runner, times, limits, profile=profile, changed=(changed or {}).get(runner.cell.slug, ""))
        for runner, times in zip(runners, times_by_cell, strict=True)
    ]
    return limits, rows


def _row(runner: TimedCell, times: Sequence[float], limits: Ceilings, *, profile: bool, changed: str) -> TrainRow:
    """Return the row of a cell; times its optimizers and, if wanted, profiles a step.

    Args:
        runner: The cell.
        times: Seconds per step of each round; tokens/s follow from their median, smallest and largest.
        limits: Limits of the device, to which `mfu` refers; `mfu_paper` refers to the GPU's nominal peak.
        profile: True profiles one step.
        changed: Text on changed settings.
    """
    config = runner.cell.config
    tokens, length = config.train.batch_tokens, config.train.seq_len
    rate = tokens / statistics.median(times)
    parameters = sum(p.numel() for p in runner.model.parameters())
    lines = runner.profile() if profile else []
    peak = flops.peak_flops(torch.cuda.get_device_name(runner.device))
    return TrainRow(
        cell=runner.cell.slug,
        tokens_per_s=rate,
        low=tokens / max(times),
        high=tokens / min(times),
        first_step=runner.first_step,
        peak_memory=runner.peak,
        optimizer=runner.optimizer_seconds(),
        mfu=flops.mfu(flops.training_flops(config.model, length), rate, limits.flops),
        unknown=flops.unknown_reason(config.model),
        mfu_paper=flops.mfu(flops.paper_flops(config.model, parameters, length), rate, peak),
        kernels=runner.model.kernel_paths(),
        micro_batch=config.train.micro_batch,
        steps=runner.steps,
        changed=changed,
        profile=shares(lines),
        lines=lines,
    )


def table(limits: Ceilings, rows: Sequence[TrainRow]) -> str:
    """Return the rows as a Markdown table, a line per cell, with the limits above and notes below.

    Columns: cell, rows of a micro-batch, tokens/s (median) and their range, share of the measured matrix product's
    rate, peak memory, optimizers, first step, and how steps are queued. Notes: reasons for unknown FLOPs, changed
    settings, the way steps are queued, kernels of blocks, and shares of kernel kinds from 0.5 %. Rates are in tokens/s,
    memory in GiB, the optimizers in ms and the first step in s.
    """
    lines = [
        limits.line,
        "",
        "| cell | rows | tokens/s | range | of matrix product | peak GiB | optimizers (ms) | first step (s) | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = "n/a" if row.mfu is None else f"{row.mfu:.1%}"
        lines.append(
            f"| {row.cell} | {row.micro_batch} | {row.tokens_per_s:,.0f} | {row.low:,.0f} to {row.high:,.0f} | {share} | "
            f"{row.peak_memory / 2**30:.1f} | {1e3 * row.optimizer:.0f} | {row.first_step:.1f} | {row.steps.partition(':')[0] or 'n/a'} |"
        )
    lines += [f"\nn/a: {why}" for why in dict.fromkeys(row.unknown for row in rows) if why is not None]
    cells_by_change: dict[str, list[str]] = {}
    for row in rows:
        cells_by_change.setdefault(row.changed, []).append(row.cell)
    for change, cells in cells_by_change.items():
        lines += [
            "",
            f"Settings of the grid: {', '.join(cells)}" if not change else f"Changed: {change} ({', '.join(cells)})",
        ]
    ways: dict[str, list[str]] = {}
    for row in rows:
        ways.setdefault(row.steps, []).append(row.cell)
    lines += [line for way, of in ways.items() if way for line in ("", f"Steps {way} ({', '.join(of)})")]
    block_paths = dict.fromkeys(row.kernels["blocks"] for row in rows if "blocks" in row.kernels)
    lines += [line for way in block_paths for line in ("", f"Blocks: {way}")]
    for row in rows:
        if row.profile:
            parts = ", ".join(f"{kind} {share:.0%}" for kind, share in row.profile.items() if share >= 0.005)
            lines += ["", f"{row.cell}: {parts}"]
    return "\n".join(lines)


def _trainer(
    model: Backbone,
    config: TrainConfig,
    seed: int,
    device: torch.device,
    graphs: bool,
    refused: Callable[[str], None],
    ranks: Ranks,
) -> Trainer:
    """Return a trainer on random tokens that never stops or saves and whose validation does nothing.

    The tokens are byte values (below 256), those of four steps, the same for every cell.

    Args:
        model: The network.
        config: Train section.
        seed: Seed of the order of rows.
        device: The device.
        graphs: True captures steps as CUDA graphs.
        refused: Called with the reason if capturing fails.
        ranks: Group of the processes that train together.
    """
    tokens = np.random.default_rng(0).integers(0, 256, 4 * config.batch_tokens + 2, dtype=np.uint16)
    return Trainer(
        model=model,
        optimizers=build_optimizers(model, config, device, ranks),
        batches=Batches([tokens], config.seq_len, config.batch_tokens // config.seq_len, seed, True),
        config=config,
        seed=seed,
        device=device,
        validate=lambda: 0.0,
        validate_every=config.steps,
        hooks=_NoHooks(),
        graphs=graphs,
        on_capture_refused=refused,
    )
