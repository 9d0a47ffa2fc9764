"""Command `atma-sweep plan`: differences between a grid and the database, work to do, and its price."""

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

    Lists the cells by state, the changes since the last launch, and the price: hours, finish time, energy, disk and
    money. Times are measured on attempts of similar cells on similar machines, else by --calibrate, else estimated
    from FLOPs.

    \b
    Example:
      atma-sweep plan quick
      atma-sweep plan full --gpus 8 --gpu H200 --rate 2.50/h

    Args:
        only (AXIS=LEVEL,..): Plan only the cells with these levels; repeatable.
        gpus (N): Number of GPUs to plan for; default: those of this machine.
        gpu (NAME): GPU model, such as H200; default: the grid's, or this machine's.
        watts (W): Measured power of a GPU in watts; default: the power limit of its board.
        calibrate: First, time a few steps of every kind of cell on this machine and store the times in the runs folder.
        list_: List every cell, change and kind of cell.
        retrain: Plan to train cells again that diverged or whose weights are gone.
    """
    from ..planning.cost_estimate import parse_rate
    from .launch import LaunchOptions

    options = LaunchOptions(grid, set_ or [], only or [], name, "local", None, False, retrain, "new", most, runs, db)
    rates = {"rate": parse_rate(rate), "watts": watts}
    run_plan_command(options, rates, gpus=gpus, gpu=gpu, calibrate=calibrate, list_all=list_, as_json=as_json)


def run_plan_command(
    options: LaunchOptions, rates: dict[str, float | None], *, gpus: int | None, gpu: str | None, calibrate: bool,
    list_all: bool, as_json: bool,
) -> None:  # fmt: skip
    """Plan a launch, calibrate if requested, price it, and print the result on standard output.

    Requirements that this machine lacks are listed only without `gpus` and `gpu`; they end nothing. The JSON object has
    the keys sweep, counts, tokens, price, remarks and lacks, the changes since the last launch, and the study or the
    forecast of the `stop` rule where there is one.

    Args:
        options: Options of the launch.
        rates: rate (price of a GPU-hour or core-hour) and watts (power of a GPU); None where not given.
        gpus: Number of GPUs to price for; None for this machine's.
        gpu: Type of GPU to price for; None for the grid's, or this machine's.
        calibrate: True to time training steps first, which trains for minutes and writes calibrations.
        list_all: True to list every cell, change and kind of cell.
        as_json: True to print JSON.
    """
    from ...results.console.text import echo_text
    from ..orchestrator import display, launch, requirements
    from ..planning import cost_estimate, difference, render, replicates
    from .launch import preview_launch

    preview = preview_launch(options, display.SafeConsole(stderr=True, soft_wrap=True))
    request, store, launch_plan = preview.request, preview.store, preview.launch_plan
    changes = difference.diff(
        request.grid, launch_plan, launch_plan.cells if launch_plan.study is not None else request.cells, store
    )
    prices = cost_estimate.machine_prices(request.representative_cells, request.runs, store, gpu=gpu)
    if calibrate:
        _calibrate(request, launch_plan.with_proposals(), prices, preview.unprepared_remarks)
        prices = cost_estimate.machine_prices(request.representative_cells, request.runs, store, gpu=gpu)
    n_gpus = gpus if gpus is not None else cost_estimate.local_gpu_count()

    def price(plan: Plan) -> cost_estimate.Bill:
        return cost_estimate.bill(plan, prices, gpus=n_gpus, **rates)

    bill = price(launch_plan.with_proposals())
    outlook = replicates.outlook(
        request.grid, request.cells, store, lambda cells: price(launch.plan(replace(request, cells=cells), store))
    )
    # with --gpu or --gpus the plan is not about this machine
    lacking = requirements.lacks(request, launch_plan) if gpu is None and gpus is None else []
    if as_json:
        result: dict[str, Any] = {
            "sweep": request.grid.name,
            "counts": launch_plan.counts,
            "tokens": launch_plan.tokens,
        }
        disk = launch_plan.disk.as_json() if launch_plan.disk is not None else {}
        result |= {**render.difference_json(changes), **replicates.as_json(outlook)}
        result |= {"study": launch_plan.study.as_json()} if launch_plan.study is not None else {}
        result |= {"price": cost_estimate.as_json(bill) | disk, "remarks": [*launch_plan.damaged, *preview.remarks]}
        print_json(result | {"lacks": [lack.as_json() for lack in lacking]})
        return
    excluded_text = f"; {launch_plan.num_filtered_out} more excluded by --only" if launch_plan.num_filtered_out else ""
    heading = (
        f"{counted(len(launch_plan.cells), 'cell')}{excluded_text}"
        if launch_plan.study is None
        else launch_plan.study.describe()
    )
    lines = [f"{request.grid.name}: {heading}", *render.difference_lines(changes, list_all=list_all)]
    lines += render.price_lines(bill, list_all=list_all)
    lines += outlook.lines() if outlook is not None else []
    lines += launch_plan.disk.describe() if launch_plan.disk is not None else []
    echo_text("\n".join([*lines, *launch_plan.damaged, *requirements.remarks(preview.remarks, lacking)]))


def _calibrate(request: LaunchRequest, launch_plan: Plan, prices: Pricer, unprepared_remarks: list[str]) -> None:
    """Time training steps of every kind of cell that is to be trained and was not measured on this machine.

    A kind is a speed class: configs that train at the same speed. One cell of each is trained, for minutes in all.
    Creates the runs folder, stores each calibration in it at once, and prints progress to standard error.

    Args:
        request: Launch to calibrate for.
        launch_plan: Its plan.
        prices: Pricing, which knows the measured kinds.
        unprepared_remarks: Remarks on unchecked text, printed first if there is something to time.
    """
    import sys

    from ...results.console.output_files import make_folder
    from ..bench import calibrate
    from ..planning import speed_model

    speeds = prices.speeds
    kinds = {
        speeds.speed_classes.key(single.config): single
        for task in reversed(launch_plan.training)
        if "measured" not in speeds.lookup(task.cell.config)
        # one GPU is timed, and several are extrapolated from it
        for single in [replace(task.cell, config=speed_model.single_rank_config(task.cell.config))]
    }
    make_folder(request.runs, "--runs", parents=True)

    def print_progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    for line in unprepared_remarks if kinds else ():
        print_progress(line)
    for like, cell in reversed(kinds.items()):
        speed_model.save_calibrations(
            request.runs, [calibrate.calibrate_cell(cell, like, speeds.machine, tell=print_progress)]
        )
