"""The commands `atma-sweep bench`: parse, call one function, print."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ...model.bounds import MAX_LENGTH, MAX_WRITTEN
from ...results import runs_folder
from ...results.console.command_line import MAX_CELLS, MAX_NUMBER, AsJson, Runs
from ..completion import grids

bench_app = typer.Typer(
    help="Time kernels, training steps, whole cells, and sweeps of thousands of cells.", no_args_is_help=True
)


class Graphs(StrEnum):
    """Words of `train.graphs`."""

    ON, OFF, AUTO = "on", "off", "auto"


Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", metavar="N", min=1, max=MAX_NUMBER, help="How often each variant is timed, in turn with the others."
    ),
]
Slugs = Annotated[
    list[str] | None, typer.Argument(metavar="CELL", help="Slugs of cells of the grid, without their seed.")
]
OfGrid = Annotated[
    str, typer.Option("--grid", metavar="GRID", help="Grid that the cells belong to.", autocompletion=grids)
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a setting of every cell; repeatable."),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write every number to this JSON file.")]


@bench_app.command("kernels")
def bench_kernels(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operations to time; without any, all.")] = None,
    rounds: Rounds = 10,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time each kernel beside its rivals, at the sizes of the 370M network.

    \b
    Example:
      atma-sweep bench kernels polar softmax --rounds 5
    """
    from . import kernels, report

    kernels.check_ops(ops or [])
    report.check_place(out)
    report.show(kernels, lambda device, tell: kernels.run(ops or [], device, rounds=rounds, tell=tell), out, as_json)


@bench_app.command("train")
def bench_train(
    cells: Slugs = None,
    grid: OfGrid = "full",
    set_: Set = None,
    graphs: Annotated[
        list[Graphs] | None,
        typer.Option(
            "--graphs", metavar="WAY", help="Time every cell with train.graphs on, off or auto; repeatable, in turns."
        ),
    ] = None,
    rounds: Rounds = 3,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also say what the device spends its time on; --out has it kernel by kernel."),
    ] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time whole optimizer steps of cells on random tokens, and how long the first step takes to come.

    \b
    Example:
      atma-sweep bench train polar-baseline-d0-m0-w0 polar-baseline-d0-m1-w0
    """
    from . import report, train

    report.check_place(out)
    chosen = train.both_ways(train.choose(grid, cells or [], set_ or []), [way.value for way in graphs or []])
    report.show(
        train,
        lambda device, tell: train.run(chosen, device, rounds=rounds, profile=profile, tell=tell),
        out,
        as_json,
    )


@bench_app.command("decode")
def bench_decode(
    cells: Slugs = None,
    grid: OfGrid = "full",
    texts: Annotated[
        list[int] | None,
        typer.Option(
            "--texts",
            metavar="N",
            min=1,
            max=MAX_WRITTEN,
            help="Texts at a time, instead of 1, 8, 64, 512; repeatable.",
        ),
    ] = None,
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            metavar="TOKENS",
            min=1,
            max=MAX_LENGTH,
            help="Tokens behind each, instead of 512, 4096, 65536; repeatable.",
        ),
    ] = None,
    rounds: Rounds = 3,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time writing, token by token, with random weights, beside what reading the bytes would take.

    \b
    Example:
      atma-sweep bench decode polar-baseline-d0-m1-w0 --texts 512 --context 512
    """
    from . import decode, report, train

    report.check_place(out)
    chosen = train.choose(grid, cells or [], [])
    sizes = texts or decode.BATCHES, context or decode.CONTEXTS
    report.show(decode, lambda device, tell: decode.run(chosen, device, *sizes, rounds=rounds, tell=tell), out, as_json)


@bench_app.command("scale")
def bench_scale(
    cells: Annotated[
        int, typer.Option("--cells", metavar="N", min=1, max=MAX_CELLS, help="How many cells, about.")
    ] = 10_000,
    points: Annotated[
        int, typer.Option("--points", metavar="N", min=1, max=MAX_NUMBER, help="Points of each cell's curve.")
    ] = 100,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time plan, supervisor, status and relaunch of a sweep of thousands of cells that trains nothing. Needs no GPU.

    \b
    Example:
      atma-sweep bench scale --cells 1000
    """
    import sys
    import tempfile

    from . import report, scale

    report.check_place(out)
    with tempfile.TemporaryDirectory(prefix="atma-scale-") as folder:
        rows = scale.run(cells, points, Path(folder), tell=lambda line: print(line, file=sys.stderr, flush=True))
    report.show_rows(scale, rows, out, as_json)


@bench_app.command("sweep")
def bench_sweep(
    grid: Annotated[
        str,
        typer.Argument(
            metavar="GRID", help="Grid file, or the name of a shipped grid such as quick.", autocompletion=grids
        ),
    ],
    attempts: Annotated[
        str, typer.Option("--attempts", metavar="N,N..", help="How many at once, one after the other.")
    ] = "1,2,4,8,16",
    set_: Set = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=LEVEL,..", help="Only the cells with these levels; repeatable."),
    ] = None,
    runs: Runs = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time whole cells, from the start of the first attempt to the last number, by how many attempts share a device.

    Each number trains all the cells anew, in a database of its own that is removed afterwards; give it cells that are
    quick, and at least as many as the largest number. Text that is prepared under --runs is used from there.
    On a GPU it also says whether NVIDIA's MPS runs.

    \b
    Example:
      atma-sweep bench sweep quick --attempts 1,2 --only attn_type=nope
    """
    import sys
    import tempfile

    from . import packing, report

    numbers = packing.numbers(attempts)
    report.check_place(out)
    prepared = runs_folder(runs, None) / "corpora"
    with tempfile.TemporaryDirectory(prefix="atma-sweep-") as folder:
        found = packing.run(
            grid, numbers, Path(folder), sets=set_ or [], only=only or [], prepared=prepared if prepared.is_dir() else None,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    report.show_rows(packing, found, out, as_json)
