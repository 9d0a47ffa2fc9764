"""Command `atma-sweep launch`: a dry run, a detached launch on a cluster, or a launch in the foreground."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console

from ...results import runs_folder
from ...results.console.command_line import print_json
from ...results.console.output_files import make_folder
from ...results.console.text import choices_hint, echo_text
from ...results.errors import StoreMissing
from ...results.exchange.trackers import EXPORTERS
from ...results.exchange.trackers.live import TRACKED_LAUNCH
from ...results.names import safe_file_name
from ...results.store.store import Store, open_store
from ..errors import MachineError, SweepError
from ..grid.grid import Grid, load_grid
from ..orchestrator import display, launch, requirements
from ..orchestrator.launch import LaunchOutcome, LaunchRequest
from ..orchestrator.notify import validated_url
from ..orchestrator.requirements import Lack, Refusal
from ..planning import admission, cost_estimate, difference, render, replicates
from ..planning.cost_estimate import Bill, parse_budget, parse_rate
from ..planning.initial_weights import WeightsFinder
from ..planning.planner import Plan
from ..planning.replicates import StopOutlook
from ..planning.studies import space_of
from . import tuning
from .data_display import PrepareDisplay
from .database import make_tracking_folder


@dataclass(frozen=True)
class LaunchOptions:
    """Command-line options of `launch` and `plan`."""

    grid: str
    """Grid file, or name of a shipped grid."""
    sets: Sequence[str]
    """Settings that every cell gets, as KEY=VALUE."""
    only: Sequence[str]
    """Selections of cells, as AXIS=LEVEL,..; empty for all."""
    name: str | None
    """Name of the sweep; None for the grid's."""
    executor: str
    """Registry name of the executor, as `resolve_executor_name` returns it."""
    address: str | None
    """HOST:PORT of the cluster; None without one."""
    detach: bool
    """True to leave the supervisor on the cluster."""
    retrain: bool
    """True to train cells again that diverged or whose weights are gone."""
    code: str
    """"new" to run the current code, "kept" to run that of the last launch."""
    max_cells: int | None
    """Maximum number of cells that the grid may have; None for the default limit."""
    runs: Path | None
    """Runs folder; None for the database's own."""
    db: str | None
    """Database, as for --db; None for the default."""
    notify: str | None = None
    """Web address that receives a summary at the end; None for none."""
    budget: str | None = None
    """Budget as text, in hours or money; None for no limit."""
    rate: str | None = None
    """Price of a GPU-hour or core-hour as text, such as 2.50/h; None for none."""
    prepare: bool = False
    """True to download and prepare missing text."""
    track: Sequence[str] = ()
    """Experiment trackers that get the sweep's news while it runs."""


Finding = Callable[[Store, str], str | None]
"""Returns the finding of a sweep by its name, as sentences; None if nothing was measured."""


def run_launch_command(
    options: LaunchOptions, *, dry_run: bool, as_json: bool, list_all: bool = False, finding: Finding | None = None
) -> bool:
    """Launch a grid, or with `dry_run` only print the plan. Return False if cells are not finished.

    Plans without writing first. Then prepares text, creates the database and the runs folder, runs the grid's studies,
    and prints plan, progress and outcome. True also for a dry run and for a detached launch that has begun.

    Args:
        options: Options of the command.
        dry_run: True to print the plan and write nothing.
        list_all: True for a plan that lists every cell.
        as_json: True to print JSON on standard output; progress then goes to standard error.
        finding: Returns the finding that is printed at the end; None prints none.

    Raises:
        SweepError: Options contradict each other. All errors of `launch.run` pass through, too.
        Exit: With code 3, after listing everything that this machine lacks, if one of these blocks the launch. A text
            that `--prepare` may get does not.
    """
    if options.detach and options.address is None:
        raise SweepError("--detach runs the supervisor on a cluster; pass its --address")
    check_trackers(options)
    if list_all and not dry_run:
        raise SweepError("--list lists the cells of a plan; add --dry-run")
    if options.prepare and dry_run:
        raise SweepError("--prepare writes text, and --dry-run writes nothing; leave one of them out")
    console = display.SafeConsole(stderr=as_json, soft_wrap=True)
    preview = preview_launch(options, console)
    lacking = requirements.lacks(preview.request, preview.launch_plan, trial=not dry_run)
    if dry_run:
        request, existing_store = preview.request, preview.store
        price = _plan_pricing(options, preview)
        outlook = replicates.outlook(
            request.grid,
            request.cells,
            existing_store,
            lambda cells: price(launch.plan(replace(request, cells=cells), existing_store)),
        )
        bill = price(preview.launch_plan.with_proposals())
        show_plan(
            preview.launch_plan, request.grid, preview.remarks, bill, outlook, lacking, as_json, list_all=list_all
        )
        return True
    try:
        request, store = prepare_launch(options, preview, lacking, console)
    except RequirementsMissing as refused:
        if as_json:
            print_json(refused.refusal.as_json())
        else:
            echo_text(str(refused), err=True)
        raise typer.Exit(refused.exit_code) from refused
    if options.detach:
        run_detached_command(request, store, console, as_json)
        return True
    with tracking(options, request, console):
        outcome = launch_in_foreground(request, store, console)
    if outcome is None:
        return False
    sentence = finding(store, request.grid.name) if finding and not as_json and outcome.study is None else None
    show_outcome(outcome, request.grid.name, console, as_json, sentence)
    return outcome.finished


class RequirementsMissing(MachineError):
    """This machine lacks something without which no cell can start; `refusal` lists all of it."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__("\n".join(refusal.lines()))


def prepare_launch(
    options: LaunchOptions, preview: LaunchPreview, lacking: Sequence[Lack], console: Console
) -> tuple[LaunchRequest, Store]:
    """Return the request of a launch and its database, after preparing the text and creating database and runs folder.

    Args:
        options: Options of the launch.
        preview: Plan of the launch.
        lacking: Requirements that this machine does not meet. A text that `prepare` may get does not block.
        console: Console for the progress of text preparation.

    Raises:
        RequirementsMissing: A requirement blocks the launch, or its text cannot be prepared.
        SweepError: `detach` is set, and the grid has a `tune` section.
    """
    if any(lack.blocks and not (options.prepare and lack.kind == "text") for lack in lacking):
        raise RequirementsMissing(_refusal(options, preview, lacking))
    try:
        request, _ = build_request(options, console, is_dry_run=False)
    except MachineError as error:
        texts = [lack for lack in lacking if lack.kind == "text"]
        if not texts:
            raise
        failed = replace(
            texts[0],
            problem=f"{texts[0].problem}; preparing it failed: {error}",
            remedy=f"try again with network access: {texts[0].numbers['command']}",
        )
        lacking = [failed if lack is texts[0] else lack for lack in lacking]
        raise RequirementsMissing(_refusal(options, preview, lacking)) from error
    store = open_store(options.db, create=True)
    make_folder(request.runs, "--runs", parents=True)
    if options.detach and request.grid.tune is not None:
        raise SweepError(
            "a launch with a tune section runs its studies first and cannot be detached; leave --detach out"
        )
    return request, store


TRACKING_WAIT_S = 15.0
"""Seconds that a launch waits at its end for its trackers to get the last numbers."""


def check_trackers(options: LaunchOptions) -> None:
    """Check the names of `--track`, and that their packages are installed.

    Raises:
        SweepError: There is no such tracker, or the launch is detached.
        PackageMissing: Its package is not installed.
    """
    names = [name for name, exporter in EXPORTERS.items() if not exporter.ending]
    for name in options.track:
        if name not in names:
            raise SweepError(f"--track: no tracker {name!r}; {choices_hint(name, names)}")
        EXPORTERS[name].load()
    if options.track and options.detach:
        raise SweepError("--track runs beside the launch; with --detach run atma-sweep track in a terminal instead")


@contextlib.contextmanager
def tracking(options: LaunchOptions, request: LaunchRequest, console: Console) -> Iterator[None]:
    """Run `atma-sweep track` for each tracker of `--track` beside the launch, and wait at the end for the last numbers.

    A tracker fails and delays nothing: its process has its own session and writes to its own log.
    """
    processes = []
    for name in options.track:
        log = make_tracking_folder(request.runs) / f"{safe_file_name(request.grid.name)}-{name}.log"
        command = [
            sys.executable,
            "-m",
            "atma_sweep",
            "track",
            name,
            "--sweep",
            request.grid.name,
            "--until-end",
        ]
        command += ["--runs", str(request.runs)]
        command += ["--db", options.db] if options.db is not None else []
        with log.open("ab") as stream:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
                env=os.environ | {TRACKED_LAUNCH: str(os.getpid())},
            )
        processes.append((name, child, log))
    try:
        yield
    finally:
        deadline = time.monotonic() + TRACKING_WAIT_S
        for name, child, log in processes:
            try:
                code: int | None = child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                state = "is still catching up" if code is None else f"ended with exit code {code}"
                remedy = f"atma-sweep track {name} --until-end sends the rest"
                console.print(f"{name} {state}: {log}; {remedy}", highlight=False, markup=False)


def launch_in_foreground(request: LaunchRequest, store: Store, console: Console) -> LaunchOutcome | None:
    """Run the studies of the grid's `tune` section, if any, and then the grid; return the outcome.

    None if a study is not finished. Plan and progress are printed on `console`.
    """
    request_after_studies = tuning.run_studies(request, store, console, launch_attached)
    return None if request_after_studies is None else launch_attached(request_after_studies, store, console)


def _plan_pricing(options: LaunchOptions, preview: LaunchPreview) -> Callable[[Plan], Bill]:
    """Return a function that prices plans on this machine's GPUs, at the rate of `--rate`.

    The machine's measured speeds are read once, here, and not by the function.
    """
    prices = cost_estimate.machine_prices(preview.request.representative_cells, preview.request.runs, preview.store)
    return lambda plan: cost_estimate.bill(
        plan, prices, gpus=cost_estimate.local_gpu_count(), rate=parse_rate(options.rate)
    )


def _refusal(options: LaunchOptions, preview: LaunchPreview, lacking: Sequence[Lack]) -> Refusal:
    """Return what the launch lacks, with its size and price and the commands that work instead."""
    plan = preview.launch_plan.with_proposals()
    cells = len(plan.cells) if plan.study is None else preview.request.max_cells
    return Refusal(preview.request.grid, cells, plan.tokens, _plan_pricing(options, preview)(plan), lacking)


def build_request(options: LaunchOptions, console: Console, *, is_dry_run: bool) -> tuple[LaunchRequest, list[str]]:
    """Return the launch request, and remarks on it; prepares text unless this is a dry run.

    The request of a study has no cells yet. Seeds of a `stop` rule and best settings of `tune` are not applied yet.

    Args:
        options: Options of the command.
        console: Console for the progress of text preparation.
        is_dry_run: True to prepare nothing and to create no folder; cells then have provisional ids where text is
            missing.

    Raises:
        GridError: The grid or an option is invalid.
        SweepError: `--only` or `--budget` is given for a study, or the address of `--notify` is invalid.
        CorpusError: The text is unusable.
        MachineError: Text would have to be downloaded without `--prepare`, or the download failed.
    """
    notify_url = validated_url(options.notify) if options.notify is not None else None
    hours = parse_budget(options.budget, parse_rate(options.rate)) if options.budget is not None else None
    grid = load_grid(options.grid, sets=options.sets, rename=options.name, max_cells=options.max_cells)
    runs = runs_folder(options.runs, options.db, write=not is_dry_run)
    grid = replace(grid, initial=WeightsFinder(options.db, runs, is_dry_run, options.prepare))
    with PrepareDisplay(console, "text") as tell:
        cells, remarks = admission.expand_grid(
            grid, runs / "corpora", dry=is_dry_run, download=options.prepare, tell=tell
        )
    space = space_of(grid, cells, runs / "corpora")
    if space is not None and (options.only or hours is not None):
        raise SweepError(
            f"{'--only' if options.only else '--budget'} selects cells of a factorial, but a study proposes its trials one at a time; leave it out"
        )
    request = LaunchRequest(
        grid=grid, cells=cells if space is None else [], space=space, runs=runs, executor=options.executor,
        address=options.address,
        only=options.only, retrain=options.retrain, code=options.code, notify=notify_url, budget=hours,
    )  # fmt: skip
    return request, remarks


@dataclass(frozen=True)
class LaunchPreview:
    """Plan of a launch, made without writing anything."""

    request: LaunchRequest
    store: Store | None
    """Database; None if there is none yet."""
    launch_plan: Plan
    unprepared_remarks: list[str]
    """Remarks on text that is not prepared, and was therefore not checked."""
    remarks: list[str]
    """All remarks, including those on unprepared text."""


def preview_launch(options: LaunchOptions, console: Console) -> LaunchPreview:
    """Return the plan of a launch. Prepares and writes nothing; raises the errors that a launch would raise.

    With a `tune` section, the plan has the unfinished studies in `before`, and cells at the best settings so far.

    Raises:
        CorpusError: Prepared text is too short for a cell.
        StoreError: The database exists and cannot be opened.
    """
    request, unprepared = build_request(options, console, is_dry_run=True)
    store = open_existing_store(options.db)
    request, studies, lines = tuning.plan_studies(request, store)
    request = launch.with_stop_seeds(request, store)
    for first_request in tuning.first_launches(request, studies):
        launch.check_launch_corpora(first_request, dry=True)
    launch_plan = launch.plan(request, store)
    launch_plan = launch_plan if studies is None else replace(launch_plan, before=list(studies.studies.values()))
    remarks = [*unprepared, *lines, *difference.describe_design(request.grid, request.cells, store)]
    return LaunchPreview(request, store, launch_plan, unprepared, remarks)


def open_existing_store(db: str | None) -> Store | None:
    """Open the database; return None if there is none yet. Other errors of `open_store` pass through."""
    try:
        return open_store(db)
    except StoreMissing:
        return None


def run_detached_command(request: LaunchRequest, store: Store, console: Console, as_json: bool) -> None:
    """Start a detached supervisor on the cluster and print its plan; with `as_json` also its actor's name.

    Returns once there is a plan; the launch then goes on without this process. The JSON object has the keys sweep and
    supervisor. Errors of `launch_detached` pass through.
    """
    from ..orchestrator import detached  # imports Ray

    for line in detached.launch_detached(request, store):
        console.print(line, highlight=False, markup=False)
    sweep = request.grid.name
    console.print(f"{sweep} now runs detached on the cluster. Next: atma-sweep status --watch", highlight=False)
    if as_json:
        print_json({"sweep": sweep, "supervisor": detached.actor_name(store, sweep)})


def launch_attached(request: LaunchRequest, store: Store, console: Console) -> LaunchOutcome:
    """Launch in the foreground with a progress display until the launch has ended; return the outcome.

    Prints the design, the plan and the progress on `console`. Errors of `launch.run` pass through.
    """

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    def on_plan(plan: Plan) -> None:
        for line in display.describe_plan(plan, request.grid.name):
            print_line(line)
        screen.set_total(plan.num_expected_attempts, display.training_tokens(plan))

    for line in difference.describe_design(request.grid, launch.with_stop_seeds(request, store).cells, store):
        print_line(line)
    with display.ProgressDisplay(
        console, request.max_cells, name=request.grid.name, results=store.measurements
    ) as screen:
        return launch.run(request, store, screen, on_plan=on_plan, tell=print_line)


def show_plan(
    plan: Plan,
    grid: Grid,
    remarks: list[str],
    bill: Bill,
    outlook: StopOutlook | None,
    lacking: Sequence[Lack],
    as_json: bool,
    *,
    list_all: bool = False,
) -> None:
    """Print the plan of a launch: its cells by state, then the summary; or all of it as one JSON object.

    Its keys are sweep, cells, counts (cells by standing), to_train and to_evaluate (ids), tokens, price, remarks and
    lacks. Each of the cells is an object of cell (id), slug, seed, the five levels, axes and state (its standing). Disk
    sizes, study, design and the forecast of the `stop` rule follow where the plan has them.

    Args:
        plan: Plan to print.
        grid: Its grid.
        remarks: Remarks on the plan.
        bill: Price of the plan.
        outlook: Forecast of the `stop` rule; None without one.
        lacking: Requirements that this machine does not meet.
        as_json: True to print JSON, which has every cell.
        list_all: True to list every cell, however many there are.
    """
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
    lines = render.cell_lines(plan, list_all=list_all)
    while part := list(itertools.islice(lines, 1000)):  # in blocks, since one write per line is slow for 100,000 cells
        echo_text("\n".join(part))
    stop = outlook.lines() if outlook is not None else []
    echo_text(
        "\n".join(
            [
                *display.describe_plan(plan, sweep),
                render.price_line(bill),
                *stop,
                *requirements.remarks(remarks, lacking),
            ]
        )
    )


def show_outcome(
    outcome: LaunchOutcome, sweep: str, console: Console, as_json: bool, finding: str | None = None
) -> None:
    """Print the number of cells by state after a launch, its finding, and the command to run next; or one JSON object.

    Its keys are sweep, counts (without zeros), finished and left (lines on cells over budget), and stop and study where
    there are any. JSON goes to standard output, text to `console`.
    """
    counts = {word: count for word, count in sorted(outcome.standings.items()) if count}
    if as_json:
        print_json(
            {"sweep": sweep, "counts": counts, "finished": outcome.finished, "left": list(outcome.over_budget)}
            | ({"stop": list(outcome.stop_messages)} if outcome.stop_messages else {})
            | ({"study": outcome.study.as_json()} if outcome.study is not None else {})
        )
        return
    counts_text = ", ".join(f"{count} {word}" for word, count in counts.items())
    table = "study" if outcome.study is not None else "6"
    next_step = (
        f"atma-sweep report --table {table}"
        if outcome.finished
        else "atma-sweep status shows why; launch again to continue"
    )
    for line in [*outcome.over_budget, *(outcome.study.best() if outcome.study is not None else [])]:
        console.print(line, highlight=False, markup=False)
    lines = [f"{sweep}: {counts_text}", *([finding] if finding else []), f"Next: {next_step}"]
    console.print("\n".join(lines), highlight=False, markup=False)
