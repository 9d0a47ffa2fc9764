"""The commands `atma-sweep bench`: each parses its options, calls a benchmark and prints."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...model.bounds import MAX_LENGTH, MAX_WRITTEN
from ...results import runs_folder
from ...results.console.command_line import MAX_CELLS, MAX_NUMBER, AsJson, Documented, Runs
from ..completion import grids

bench_app = typer.Typer(
    help="""Time kernels, training steps, whole cells, and sweeps of thousands of cells.

    \b
    Example:
      atma-sweep bench kernels polar softmax --rounds 5
      atma-sweep bench train polar-baseline-d0-m1-w0
    """,
    no_args_is_help=True,
)


class Graphs(StrEnum):
    """Values of `train.graphs`."""

    ON, OFF, AUTO = "on", "off", "auto"


Rounds = Annotated[
    int,
    typer.Option(
        "--rounds",
        metavar="N",
        min=1,
        max=MAX_NUMBER,
        help="Timing rounds per variant, interleaved with the other variants.",
    ),
]
Slugs = Annotated[list[str] | None, typer.Argument(metavar="CELL", help="Slugs of the grid's cells, without the seed.")]
OfGrid = Annotated[
    str, typer.Option("--grid", metavar="GRID", help="Grid that the cells belong to.", autocompletion=grids)
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of every cell; repeatable.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write every number to this JSON file.")]


@bench_app.command("kernels")
@Documented
def bench_kernels(
    ops: Annotated[list[str] | None, typer.Argument()] = None,
    rounds: Rounds = 10,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time each kernel against its rivals, at the sizes of the 370M network.

    \b
    Example:
      atma-sweep bench kernels polar softmax --rounds 5

    Args:
        ops (OP): Operations to time; all by default.
    """
    from . import kernels, report

    kernels.check_ops(ops or [])
    report.check_output(out)
    report.run_and_report(
        kernels, lambda device, tell: kernels.run(ops or [], device, rounds=rounds, tell=tell), out, as_json
    )


@bench_app.command("train")
@Documented
def bench_train(
    cells: Slugs = None,
    grid: OfGrid = "full",
    set_: Set = None,
    graphs: list[Graphs] | None = None,
    rounds: Rounds = 3,
    profile: bool = False,
    gpus: str | None = None,
    part: list[str] | None = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time optimizer steps of cells on random tokens, and the delay of the first step.

    \b
    Example:
      atma-sweep bench train polar-baseline-d0-m0-w0 polar-baseline-d0-m1-w0

    Args:
        graphs (WAY): Time every cell with train.graphs on, off or auto; repeatable, interleaved.
        profile: Also report the device time by kind of kernel; --out lists every kernel.
        gpus (N,N..): Instead, time every cell on each of these numbers of GPUs, one after the other, such as 1,2,4.
        part (NAME): Instead, time the 370M network with this attn_type, such as fla:GatedDeltaNet; repeatable. One that the
            GPU refuses is left out with a line.
    """
    from . import report, train

    report.check_output(out)
    if part:
        report.run_and_report(
            train,
            lambda device, tell: train.run_parts(part, set_ or [], device, rounds=rounds, tell=tell),
            out,
            as_json,
        )
        return
    if gpus is not None:
        from . import scaling

        counts = scaling.parse_counts(gpus)
        timed = train.select_cells(grid, cells or [], set_ or [])
        rows = scaling.run(timed, counts, rounds=rounds, tell=report.tell)
        report.report_rows(scaling, rows, out, as_json)
        return
    chosen = train.with_graph_modes(
        train.select_cells(grid, cells or [], set_ or []), [way.value for way in graphs or []]
    )
    report.run_and_report(
        train, lambda device, tell: train.run(chosen, device, rounds=rounds, profile=profile, tell=tell), out, as_json
    )


@bench_app.command("decode")
@Documented
def bench_decode(
    cells: Slugs = None,
    grid: OfGrid = "full",
    texts: Annotated[list[int] | None, typer.Option(min=1, max=MAX_WRITTEN)] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, max=MAX_LENGTH)] = None,
    fp8: bool = False,
    rounds: Rounds = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time token-by-token generation with random weights, against the time to read the same bytes.

    \b
    Example:
      atma-sweep bench decode polar-baseline-d0-m1-w0 --texts 512 --context 512

    Args:
        texts (N): Texts per batch, instead of 1, 8, 64, 512; repeatable.
        context (TOKENS): Context tokens per text, instead of 512, 4096, 65536; repeatable.
        fp8: Also time a cache of keys and values in 8 bits, which wall can; approximate.
    """
    from . import decode, report, train

    report.check_output(out)
    chosen = train.select_cells(grid, cells or [], [])
    sizes = texts or decode.BATCHES, context or decode.CONTEXTS
    report.run_and_report(
        decode, lambda device, tell: decode.run(chosen, device, *sizes, rounds=rounds, fp8=fp8, tell=tell), out, as_json
    )


@bench_app.command("scale")
@Documented
def bench_scale(
    cells: Annotated[int, typer.Option(min=1, max=MAX_CELLS)] = 10_000,
    points: Annotated[int, typer.Option(min=1, max=MAX_NUMBER)] = 100,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time plan, supervisor, status and relaunch of a sweep of thousands of cells that trains nothing. Needs no GPU.

    \b
    Example:
      atma-sweep bench scale --cells 1000

    Args:
        cells (N): Approximate number of cells.
        points (N): Curve points per cell.
    """
    import tempfile

    from . import report, scale

    report.check_output(out)
    with tempfile.TemporaryDirectory(prefix="atma-scale-") as folder:
        rows = scale.run(cells, points, Path(folder), tell=report.tell)
    report.report_rows(scale, rows, out, as_json)


@bench_app.command("sweep")
@Documented
def bench_sweep(
    grid: Annotated[str, typer.Argument(autocompletion=grids)],
    attempts: str = "1,2,4,8,16",
    set_: Set = None,
    only: list[str] | None = None,
    runs: Runs = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time complete cells, from the first start to the last measurement, by the number of attempts at once.

    Each number trains all cells again, in a temporary database. Choose cells that train quickly, and at least as many
    as the largest number. Text that is prepared under --runs is used from there.
    On a GPU, the output also states whether NVIDIA's MPS runs.

    \b
    Example:
      atma-sweep bench sweep quick --attempts 1,2 --only attn_type=nope

    Args:
        grid (GRID): Grid file, or the name of a shipped grid such as quick.
        attempts (N,N..): Numbers of attempts at once, timed one after the other.
        only (AXIS=LEVEL,..): Only the cells with these levels; repeatable.
    """
    import tempfile

    from . import packing, report

    numbers = packing.parse_attempts(attempts)
    report.check_output(out)
    prepared = runs_folder(runs, None) / "corpora"
    with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
        result = packing.run(
            grid, numbers, Path(folder), sets=set_ or [], only=only or [], prepared=prepared if prepared.is_dir() else None,
            tell=report.tell,
        )  # fmt: skip
    report.report_rows(packing, result, out, as_json)
