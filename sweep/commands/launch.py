"""The command `atma-sweep launch`: the plan alone, a supervisor left on a cluster, or a launch that stays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from ...results import runs_folder
from ...results.console.command_line import print_json
from ...results.console.output_files import make_folder
from ...results.console.text import echo_text
from ...results.errors import StoreMissing
from ...results.store.store import Store, open_store
from ..errors import MachineError, SweepError
from ..grid.grid import Grid, load_grid
from ..orchestrator import display, launch, requirements
from ..orchestrator.launch import LaunchOutcome, LaunchRequest
from ..orchestrator.notify import validated_url
from ..orchestrator.requirements import Lack, Refusal
from ..planning import admission, cost_estimate, difference, render, replicates
from ..planning.cost_estimate import Bill, hours_of, rate_of
from ..planning.planner import Plan
from ..planning.replicates import StopOutlook
from ..planning.studies import space_of
from . import tuning
from .data_display import PrepareDisplay


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line says of a launch."""

    grid: str
    """A file, or the name of a shipped grid."""
    sets: Sequence[str]
    only: Sequence[str]
    name: str | None
    executor: str
    address: str | None
    detach: bool
    retrain: bool
    code: str
    most: int | None
    """Cells that the grid may have."""
    runs: Path | None
    db: str | None
    notify: str | None = None
    """Web address that is told of the end."""
    budget: str | None = None
    rate: str | None = None
    prepare: bool = False
    """Whether text that has to be downloaded is."""


def carry_out(asked: LaunchOptions, *, dry_run: bool, as_json: bool) -> bool:
    """Launches, or with `dry_run` only tells the plan; False when cells are left that failed.

    Ends with exit code 3, and says all that is missing, where the machine lacks something that the cells need.
    """
    if asked.detach and asked.address is None:
        raise SweepError("--detach leaves the supervisor on a cluster; name that with --address")
    if asked.prepare and dry_run:
        raise SweepError("--prepare gets text, and --dry-run writes nothing; leave one of them out")
    console = display.SafeConsole(stderr=as_json, soft_wrap=True)
    ahead = preview_launch(asked, console)
    lacking = requirements.lacks(ahead.request, ahead.made)
    if dry_run:
        request, known = ahead.request, ahead.store
        billed = _billed(asked, ahead)
        outlook = replicates.outlook(
            request.grid, request.cells, known, lambda cells: billed(launch.plan(replace(request, cells=cells), known))
        )
        bill = billed(ahead.made.with_proposals())
        show_plan(ahead.made, request.grid, ahead.remarks, bill, outlook, lacking, as_json)
        return True
    if any(lack.blocks and not (asked.prepare and lack.kind == "text") for lack in lacking):
        _refuse(asked, ahead, lacking, as_json)
    try:
        request, _ = requested(asked, console, dry=False)
    except MachineError as error:
        texts = [lack for lack in lacking if lack.kind == "text"]
        if not texts:
            raise
        failed = replace(
            texts[0],
            problem=f"{texts[0].problem}; getting it failed: {error}",
            remedy=f"try again with a network: {texts[0].numbers['command']}",
        )
        _refuse(asked, ahead, [failed if lack is texts[0] else lack for lack in lacking], as_json)
    store = open_store(asked.db, create=True)
    make_folder(request.runs, "--runs", parents=True)
    if asked.detach and request.grid.tune is not None:
        raise SweepError("a launch with tune stays until its studies are made; leave --detach out")
    if asked.detach:
        run_detached_command(request, store, console, as_json)
        return True
    ready = tuning.run_studies(request, store, console, stay)
    if ready is None:
        return False
    outcome = stay(ready, store, console)
    show_outcome(outcome, request.grid.name, console, as_json)
    return outcome.finished


def _billed(options: LaunchOptions, ahead: LaunchPreview) -> Callable[[Plan], Bill]:
    """Return the pricing of plans on this machine's GPUs."""
    prices = cost_estimate.machine_prices(ahead.request.representative_cells, ahead.request.runs, ahead.store)
    return lambda plan: cost_estimate.bill(plan, prices, gpus=cost_estimate.gpus_here(), rate=rate_of(options.rate))


def _refuse(options: LaunchOptions, ahead: LaunchPreview, lacking: Sequence[Lack], as_json: bool) -> NoReturn:
    """Say what the launch lacks and what works instead, and end the command with exit code 3."""
    plan = ahead.made.with_proposals()
    cells = len(plan.cells) if plan.study is None else ahead.request.max_cells
    refusal = Refusal(ahead.request.grid, cells, plan.tokens, _billed(options, ahead)(plan), lacking)
    if as_json:
        print_json(refusal.as_json())
    else:
        echo_text("\n".join(refusal.lines()), err=True)
    raise typer.Exit(MachineError.exit_code)


def requested(asked: LaunchOptions, console: Console, *, dry: bool) -> tuple[LaunchRequest, list[str]]:
    """The launch, its text prepared where it lies on this machine or may be downloaded, and remarks; a dry run prepares
    nothing.
    """
    listener = validated_url(asked.notify) if asked.notify is not None else None
    hours = hours_of(asked.budget, rate_of(asked.rate)) if asked.budget is not None else None
    grid = load_grid(asked.grid, sets=asked.sets, rename=asked.name, most=asked.most)
    runs = runs_folder(asked.runs, asked.db, write=not dry)
    with PrepareDisplay(console, "text") as tell:
        cells, remarks = admission.expand_grid(grid, runs / "corpora", dry=dry, download=asked.prepare, tell=tell)
    space = space_of(grid, cells, runs / "corpora")
    if space is not None and (asked.only or hours is not None):
        raise SweepError(
            f"{'--only' if asked.only else '--budget'} chooses among cells of a factorial; a study makes its trials one by one"
        )
    request = LaunchRequest(
        grid=grid, cells=cells if space is None else [], space=space, runs=runs, executor=asked.executor, address=asked.address,
        only=asked.only, retrain=asked.retrain, code=asked.code, notify=listener, budget=hours,
    )  # fmt: skip
    return request, remarks


@dataclass(frozen=True)
class LaunchPreview:
    """What a launch would do now."""

    request: LaunchRequest
    store: Store | None
    """None where there is no database yet."""
    made: Plan
    unprepared: list[str]
    """On text that is not prepared, and so was not looked at."""
    remarks: list[str]
    """These, and others."""


def preview_launch(asked: LaunchOptions, console: Console) -> LaunchPreview:
    """Prepares and writes nothing. Raises what a launch would, CorpusError for prepared text that is too short among it."""
    request, unprepared = requested(asked, console, dry=True)
    store = store_if_any(asked.db)
    request, studies, lines = tuning.plan_studies(request, store)
    request = launch.with_stop_seeds(request, store)
    for one in tuning.first_launches(request, studies):
        launch.check_launch_corpora(one, dry=True)
    made = launch.plan(request, store)
    made = made if studies is None else replace(made, before=list(studies.parts.values()))
    remarks = [*unprepared, *lines, *difference.describe_design(request.grid, request.cells, store)]
    return LaunchPreview(request, store, made, unprepared, remarks)


def store_if_any(db: str | None) -> Store | None:
    """The database, None where there is none yet."""
    try:
        return open_store(db)
    except StoreMissing:
        return None


def run_detached_command(request: LaunchRequest, store: Store, console: Console, as_json: bool) -> None:
    """Leaves a supervisor on the cluster, and says what it plans."""
    from ..orchestrator import detached  # which needs Ray

    for line in detached.launch_detached(request, store):
        console.print(line, highlight=False, markup=False)
    sweep = request.grid.name
    console.print(f"{sweep} goes on without this command. Next: atma-sweep status --watch", highlight=False)
    if as_json:
        print_json({"sweep": sweep, "supervisor": detached.actor_name(store, sweep)})


def stay(request: LaunchRequest, store: Store, console: Console) -> LaunchOutcome:
    """Launches, and shows how it goes until it has ended."""

    def tell(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    def planned(plan: Plan) -> None:
        for line in display.describe_plan(plan, request.grid.name):
            tell(line)
        screen.set_total(plan.expected, plan.tokens)

    for line in difference.describe_design(request.grid, launch.with_stop_seeds(request, store).cells, store):
        tell(line)
    with display.ProgressDisplay(console, request.max_cells) as screen:
        return launch.run(request, store, screen, on_plan=planned, tell=tell)


def show_plan(
    plan: Plan,
    grid: Grid,
    remarks: list[str],
    bill: Bill,
    outlook: StopOutlook | None,
    lacking: Sequence[Lack],
    as_json: bool,
) -> None:
    """What a launch would do: every cell and how it stands, then the sum."""
    sweep = grid.name
    if as_json:
        rows = [
            {
                "cell": c.id,
                "slug": c.slug,
                "seed": c.config.seed,
                **c.levels,
                "axes": c.axes,
                "state": plan.standings[c.id],
            }
            for c in plan.cells
        ]
        print_json(
            {
                "sweep": sweep,
                "cells": rows,
                "counts": plan.counts,
                "to_train": [task.cell.id for task in plan.training],
                "to_evaluate": [task.cell.id for task in plan.evaluating],
                "tokens": plan.tokens,
                **(plan.disk.as_json() if plan.disk is not None else {}),
                **({"study": plan.study.as_json()} if plan.study is not None else {}),
                **({"design": grid.chosen.as_json()} if grid.chosen is not None else {}),
                **replicates.as_json(outlook),
                "price": cost_estimate.as_json(bill),
                "remarks": [*plan.damaged, *remarks],
                "lacks": [lack.as_json() for lack in lacking],
            }
        )
        return
    lines = (f"{cell.id}  {plan.standings[cell.id]:<12} {cell.slug}" for cell in plan.cells)
    while part := list(itertools.islice(lines, 1000)):  # the terminal is told once, not a hundred thousand times
        echo_text("\n".join(part))
    stop = outlook.told() if outlook is not None else []
    echo_text(
        "\n".join(
            [*display.describe_plan(plan, sweep), render.short(bill), *stop, *requirements.remarks(remarks, lacking)]
        )
    )


def show_outcome(outcome: LaunchOutcome, sweep: str, console: Console, as_json: bool) -> None:
    """Where the cells stand after a launch, and what comes next."""
    counts = {word: count for word, count in sorted(outcome.standings.items()) if count}
    if as_json:
        print_json(
            {"sweep": sweep, "counts": counts, "finished": outcome.finished, "left": list(outcome.over_budget)}
            | ({"stop": list(outcome.stop_messages)} if outcome.stop_messages else {})
            | ({"study": outcome.study.as_json()} if outcome.study is not None else {})
        )
        return
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    table = "study" if outcome.study is not None else "6"
    rest = (
        f"atma-sweep report --table {table}"
        if outcome.finished
        else "atma-sweep status tells why; launch again to continue"
    )
    for line in [*outcome.over_budget, *(outcome.study.best() if outcome.study is not None else [])]:
        console.print(line, highlight=False, markup=False)
    console.print(f"{sweep}: {words}. Next: {rest}", highlight=False, markup=False)
