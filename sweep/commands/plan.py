"""The command `atma-sweep plan`: what lies between a grid and the database, and what it would cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...model.bounds import MAX_CPUS, MAX_WATTS
from ...results.console.command_line import AsJson, Cells, Db, Documented, Runs, print_json
from ...results.console.text import counted
from .options import GridName, Name, Rate, Set

if TYPE_CHECKING:
    from ..orchestrator.launch import LaunchRequest
    from ..planning.cost_estimate import Pricer
    from ..planning.planner import Plan
    from .launch import LaunchOptions


@Documented
def plan(
    grid: GridName,
    set_: Set = None,
    only: list[str] | None = None,
    name: Name = None,
    gpus: Annotated[int | None, typer.Option(min=1, max=MAX_CPUS)] = None,
    gpu: str | None = None,
    rate: Rate = None,
    watts: Annotated[float | None, typer.Option(min=1, max=MAX_WATTS)] = None,
    calibrate: bool = False,
    list_: bool = False,
    retrain: bool = False,
    most: Cells = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show what a launch of the grid would do and what it would cost. Nothing is trained, nothing written to the database.

    Cells by what is to be done about them, what changed since the last launch, and the price: hours, end, energy,
    disk and money. Its times come from attempts of such cells on such a machine, else from --calibrate, else from FLOPs.

    \b
    Example:
      atma-sweep plan quick
      atma-sweep plan full --gpus 8 --gpu H200 --rate 2.50/h

    Args:
        only (AXIS=LEVEL,..): Plan only the cells with these levels; repeatable.
        gpus (N): GPUs to finish on; without it those of this machine.
        gpu (NAME): Kind of GPU, such as H200; without it the grid's, or this machine's.
        watts (W): What a GPU takes, measured; without it its board's limit.
        calibrate: First time a few steps of every kind of cell here; kept in the runs folder.
        list_: List every cell, change and kind of cell.
        retrain: As if cells were trained again that diverged or whose weights are gone.
    """
    from ..planning.cost_estimate import rate_of
    from .launch import LaunchOptions

    asked = LaunchOptions(grid, set_ or [], only or [], name, "local", None, False, retrain, "new", most, runs, db)
    rates = {"rate": rate_of(rate), "watts": watts}
    carry_out(asked, rates, gpus=gpus, gpu=gpu, calibrate=calibrate, every=list_, as_json=as_json)


def carry_out(
    asked: LaunchOptions, rates: dict[str, float | None], *, gpus: int | None, gpu: str | None, calibrate: bool, every: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plans, calibrates if that is asked for, prices and prints."""
    from ...results.console.text import echo_text
    from ..orchestrator import display, launch, requirements
    from ..planning import cost_estimate, difference, render, replicates
    from .launch import preview_launch

    ahead = preview_launch(asked, display.SafeConsole(stderr=True, soft_wrap=True))
    request, store, made = ahead.request, ahead.store, ahead.made
    between = difference.between(request.grid, made, made.cells if made.study is not None else request.cells, store)
    prices = cost_estimate.machine_prices(request.representative_cells, request.runs, store, gpu=gpu)
    if calibrate:
        _calibrate(request, made.with_proposals(), prices, ahead.unprepared)
        prices = cost_estimate.machine_prices(request.representative_cells, request.runs, store, gpu=gpu)
    count = gpus if gpus is not None else cost_estimate.gpus_here()

    def billed(plan: Plan) -> cost_estimate.Bill:
        return cost_estimate.bill(plan, prices, gpus=count, **rates)

    bill = billed(made.with_proposals())
    outlook = replicates.outlook(
        request.grid, request.cells, store, lambda cells: billed(launch.plan(replace(request, cells=cells), store))
    )
    # whoever names other GPUs does not ask about this machine
    lacking = requirements.lacks(request, made) if gpu is None and gpus is None else []
    if as_json:
        found: dict[str, Any] = {"sweep": request.grid.name, "counts": made.counts, "tokens": made.tokens}
        disk = made.disk.as_json() if made.disk is not None else {}
        found |= {**render.difference_json(between), **replicates.as_json(outlook)}
        found |= {"study": made.study.as_json()} if made.study is not None else {}
        found |= {"price": cost_estimate.as_json(bill) | disk, "remarks": [*made.damaged, *ahead.remarks]}
        print_json(found | {"lacks": [lack.as_json() for lack in lacking]})
        return
    left = f"; {made.left_out} more left out by --only" if made.left_out else ""
    first = f"{counted(len(made.cells), 'cell')}{left}" if made.study is None else made.study.describe()
    lines = [f"{request.grid.name}: {first}", *render.describe(between, every=every)]
    lines += render.priced(bill, every=every)
    lines += outlook.told() if outlook is not None else []
    lines += made.disk.describe() if made.disk is not None else []
    echo_text("\n".join([*lines, *made.damaged, *requirements.remarks(ahead.remarks, lacking)]))


def _calibrate(request: LaunchRequest, made: Plan, prices: Pricer, unprepared: list[str]) -> None:
    """Times every kind of cell that is to be trained and was not measured here, and keeps what it finds.

    `unprepared`: what is to be said of text that could not be checked, before minutes are spent on a grid that cannot be launched.
    """
    import sys

    from ...results.console.output_files import make_folder
    from ..bench import calibrate
    from ..planning import speed_model

    speeds = prices.speeds
    kinds = {
        speeds.likeness.of(task.cell.config): task.cell
        for task in reversed(made.training)
        if "measured" not in speeds.of(task.cell.config)
    }
    make_folder(request.runs, "--runs", parents=True)

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for line in unprepared if kinds else ():
        tell(line)
    for like, cell in reversed(kinds.items()):
        speed_model.keep_calibrations(request.runs, [calibrate.calibrate_cell(cell, like, speeds.place, tell=tell)])
