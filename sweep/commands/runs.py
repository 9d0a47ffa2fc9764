"""Commands that run, control and watch attempts: launch, evaluate, logs, pause, cancel, retry, doctor and others."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ...model.bounds import MAX_COUNT, MAX_LENGTH, MAX_SHOTS
from ...results import runs_folder
from ...results.console import completion
from ...results.console.command_line import (
    MAX_NUMBER,
    Address,
    AsJson,
    Cells,
    Db,
    Documented,
    Runs,
    SweepName,
    print_json,
    print_result,
)
from ...results.console.text import LogSanitizer, echo_text, sanitize_all
from ..errors import SweepError
from ..executors.registry import DEFAULT_EXECUTOR, resolve_executor_name
from .options import CellName, Executor, GridName, Name, NamedSweep, ProbeNames, Rate, Set


@Documented
def launch(
    ctx: typer.Context,
    grid: GridName,
    set_: Set = None,
    only: list[str] | None = None,
    name: Name = None,
    dry_run: bool = False,
    list_: bool = False,
    executor: Executor = DEFAULT_EXECUTOR,
    address: Address = None,
    detach: bool = False,
    retrain: bool = False,
    code: Literal["new", "kept"] = "new",
    notify: str | None = None,
    budget: str | None = None,
    rate: Rate = None,
    prepare: bool = False,
    track: list[str] | None = None,
    most: Cells = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate every cell of a grid that is not done yet. Launch again to continue after any stop.

    A cell that another sweep has trained is not trained again.
    --dry-run shows the plan with its disk space and price; the command plan shows more.
    --budget starts the cells that fit, pairs of the grid's contrasts first, and lists the rest; a larger one continues.
    Exit code 1: cells failed; status shows why. Exit code 3: this machine lacks something; all of it is listed.

    \b
    Example:
      atma-sweep launch quick --dry-run
      atma-sweep launch quick --only attn_type=polar,nope --only memory=on
      atma-sweep launch quick --set train.tokens=5e4 --name try
      atma-sweep launch quick --budget 0.1h

    Args:
        only (AXIS=LEVEL,..): Run only the cells with these levels now; repeatable.
        dry_run: Show the plan and exit; nothing is written.
        list_: With --dry-run, list every cell.
        detach: Run the launch on the cluster and return at once; needs --address.
        retrain: Train cells again that diverged or whose weights are gone.
        code (new|kept): new: run the current code; kept: run the code of the last launch of this sweep.
        notify (URL): Post one JSON object to this http(s) address when the launch ends, for whatever reason.
        budget (HOURS): Limit on the total cost of the grid's cells after this launch, in GPU-hours (core-hours on the CPU),
            such as 40h; with --rate also in money, such as 100$.
        prepare: Download and prepare the text first, as data prepare --grid does.
        track (TRACKER): Send curves and results to wandb, tensorboard, mlflow or trackio while cells run; repeatable.
    """
    from .launch import LaunchOptions, run_launch_command

    options = LaunchOptions(
        grid, set_ or [], only or [], name, resolve_executor_name(executor, address), address, detach, retrain, code, most, runs, db,
        notify, budget, rate, prepare, track or [],
    )  # fmt: skip
    finding = (ctx.obj or {}).get("finding")
    if not run_launch_command(options, dry_run=dry_run, as_json=as_json, list_all=list_, finding=finding):
        raise typer.Exit(1)


@Documented
def evaluate(
    cells: Annotated[list[str], typer.Argument(autocompletion=completion.cells)],
    probe: ProbeNames = None,
    length: Annotated[list[int] | None, typer.Option(min=1, max=MAX_LENGTH)] = None,
    tasks: list[str] | None = None,
    include_path: str | None = None,
    shots: Annotated[int | None, typer.Option(min=0, max=MAX_SHOTS)] = None,
    limit: Annotated[int | None, typer.Option(min=1, max=MAX_COUNT)] = None,
    samples: bool = False,
    sweep: NamedSweep = None,
    revision: str | None = None,
    pairing: Literal["text", "native"] | None = None,
    plugin: list[Path] | None = None,
    executor: Executor = DEFAULT_EXECUTOR,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Measure trained cells again, or at other lengths, from their kept weights. Trains nothing.

    It needs the runs folder, but neither the grid nor the text.
    Lengths that are not in the grid appear in tables with report --length.
    hf:MODEL measures an open-weight model on the text of a sweep; report --table open-weight compares it with the cells.
    --tasks measures downstream tasks by lm-evaluation-harness, and report --table downstream shows them.
    Exit code 1: a cell could not be measured.

    \b
    Example:
      atma-sweep evaluate polar-baseline-d0-m1-w0-s0
      atma-sweep evaluate polar-baseline-d0-m1-w0-s0 --probe needle --length 2048
      atma-sweep evaluate polar-baseline-d0-m1-w0-s0 --tasks blimp --samples
      atma-sweep evaluate hf:Qwen/Qwen3-0.6B-Base --sweep full

    Args:
        cells (CELL|hf:MODEL): Trained cells {BY_NAME}; or hf: followed by a repository of the Hugging
            Face hub or by a folder.
        probe (NAME): Run only this probe; repeatable.
        length (TOKENS): Measure at this context length instead of the grid's; repeatable.
        tasks (TASK,...): Measure these tasks, groups or tags of lm-evaluation-harness instead of probes; repeatable.
        include_path (FOLDER): Folder with further task files (YAML) of lm-evaluation-harness.
        shots (N): Solved examples before each question; default: as the task says.
        limit (N): Only the first N questions of each task.
        samples: Keep each question of the tasks with its answers and scores, in a file per task (JSON Lines) that is
            named at the end.
        sweep (NAME): Name of the sweep; default: the one launched last that has the cell, or for a model the one
            launched last.
        revision (REV): Branch, tag or commit of a model of the hub.
        pairing (text|native): For a model: text measures on the same characters as the sweep's cells, native on as
            many of the model's own tokens; default: text.
        plugin (FILE): Python file that registers probes of your own, for cells; repeatable. Probes of installed
            packages need none.
    """
    from ...results.store.store import open_store
    from ..grid.plugins import load_plugins
    from ..orchestrator import display, evaluate, openweight

    executor = resolve_executor_name(executor)
    measures_models = any(map(openweight.is_model_reference, cells))
    if not measures_models:
        openweight.check_cell_options(revision=revision, pairing=pairing)
    elif plugin:
        raise SweepError(f"--plugin {plugin[0]}: applies to cells only; leave it out to measure models")
    store = open_store(db)
    runs_path = runs_folder(runs, db, write=True)
    settings = evaluate.task_settings(tasks or [], include_path=include_path, shots=shots, limit=limit, samples=samples)
    plan_options: dict[str, Any] = {
        "runs": runs_path, "probes": [*(probe or []), *settings], "lengths": length or [], "sweep": sweep,
        "settings": settings,
    }  # fmt: skip
    revisions = None
    if measures_models:
        model_plan = openweight.plan(store, cells, **plan_options, revision=revision, pairing=pairing or "text")
        shares, revisions = model_plan.tasks_by_sweep, model_plan.revisions
        for line in model_plan.notes:
            echo_text(line, err=True)
    else:
        shares = evaluate.plan(store, cells, **plan_options, plugins=load_plugins(plugin or []))
    evaluate.check_tasks(settings)
    console = display.SafeConsole(stderr=as_json, soft_wrap=True)
    with display.ProgressDisplay(console, sum(map(len, shares.values()))) as screen:
        measured = evaluate.run(store, shares, screen, runs=runs_path, executor=executor, revisions=revisions)
    if as_json:
        print_json([row for cell in measured for row in cell.as_json()])
    else:
        for cell in measured:
            if cell.values:
                echo_text(sanitize_all(cell).text())
    if not all(cell.values for cell in measured):
        raise typer.Exit(1)


@Documented
def logs(
    cell: CellName,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the attempt ends.")
    ] = False,
    attempt: Annotated[int | None, typer.Option(min=1, max=MAX_NUMBER)] = None,
    lines: Annotated[int | None, typer.Option(min=0, max=MAX_NUMBER)] = None,
    sweep: SweepName = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Print the log of an attempt, while it runs or afterwards; --json prints one object per line.

    \b
    Example:
      atma-sweep logs polar-baseline-d0-m1-w0-s0 --lines 20
      atma-sweep logs polar-baseline-d0-m1-w0-s0 --follow

    Args:
        cell (CELL): Cell {BY_NAME}.
        attempt (N): Number of the attempt of the cell; default: the newest.
        lines (N): Start with the last N lines; default: with the first line.
    """
    from ...results.store.store import open_store
    from ..orchestrator import logs

    store = open_store(db)
    runs_path = runs_folder(runs, db)
    path = logs.log_path(store, runs_path, cell, attempt, sweep)
    out = logs.JsonLines(sys.stdout) if as_json else LogSanitizer(sys.stdout)
    if follow:
        alive = logs.liveness_check(store, logs.resolve_attempt(store, cell, attempt, sweep))
        logs.follow(path, alive, out, lines=lines)
    else:
        out.write(logs.tail(path, lines))
    out.close()


@Documented
def prune_checkpoints(
    sweep: SweepName = None,
    keep: Literal["newest", "weights", "nothing"] = "newest",
    dry_run: bool = False,
    orphans: bool = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no launch needs any more. Running cells are not touched.

    Exit code 1: some checkpoints could not be removed.

    \b
    Example:
      atma-sweep prune-checkpoints --dry-run
      atma-sweep prune-checkpoints --keep weights --orphans

    Args:
        keep (newest|weights|nothing): What to keep. newest: weights, and two checkpoints of each unfinished cell;
            weights: no checkpoint; nothing: neither.
        dry_run: Only show what would be removed.
        orphans: Also remove those of orphans, which are cells that the grid no longer contains.
    """
    from ...results.store.store import open_store
    from ..checkpoints.prune import prune

    pruned = prune(open_store(db), runs_folder(runs, db), sweep, keep=keep, dry=dry_run, orphans=orphans)
    print_result(pruned.as_json(), sanitize_all(pruned).lines(), as_json=as_json)
    if pruned.problems:
        raise typer.Exit(1)


def doctor(address: Address = None, runs: Runs = None, db: Db = None, as_json: AsJson = False) -> None:
    """Check this machine for problems that would stop a sweep: GPU, driver, kernels, Ray, disk, file system, database, clock.

    With --address it checks the cluster, too.
    Exit code 3: a problem would stop a sweep.

    \b
    Example:
      atma-sweep doctor
    """
    from .. import doctor

    checks = doctor.examine(db, runs, address)
    print_result(doctor.as_json(checks), doctor.describe(sanitize_all(checks)), as_json=as_json)
    if doctor.exit_code(checks):
        raise typer.Exit(doctor.exit_code(checks))


def _send_and_print(
    command: Any, sweep: str | None, db: str | None, as_json: bool, cells: list[str] | None = None
) -> None:
    """Send a control command to the sweep's supervisor and print the result, without waiting for its effect.

    Errors of `send_command` pass through. That no supervisor runs the sweep is printed and no error.

    Args:
        command: pause, resume, finish, cancel or retry.
        sweep: Name of the sweep; None for the one launched last.
        db: Database, as for --db.
        as_json: True to print the fields of ControlResult as JSON.
        cells: Cells to retry, by id or slug; None for all failed ones.
    """
    from ...results.store.store import open_store
    from ..orchestrator.control import send_command

    result = send_command(open_store(db), command, sweep, cells or [])
    print_result(asdict(result), [result.message], as_json=as_json)


def pause(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Ask a running sweep to save its cells, free the machine and wait.

    Works from any shell, as do resume, cancel and retry; the sweep reacts within seconds.

    \b
    Example:
      atma-sweep pause --sweep quick
    """
    _send_and_print("pause", sweep, db, as_json)


def resume(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Ask a paused sweep to continue.

    \b
    Example:
      atma-sweep resume --sweep quick
    """
    _send_and_print("resume", sweep, db, as_json)


@Documented
def cancel(sweep: SweepName = None, finish: bool = False, db: Db = None, as_json: AsJson = False) -> None:
    """Ask a running sweep to save its cells and stop; launch continues it.

    \b
    Example:
      atma-sweep cancel --sweep quick
      atma-sweep cancel --finish

    Args:
        finish: Let running cells finish and start no others; resume undoes this.
    """
    _send_and_print("finish" if finish else "cancel", sweep, db, as_json)


@Documented
def retry(
    cells: Annotated[list[str] | None, typer.Argument(autocompletion=completion.cells)] = None,
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running sweep to retry cells that failed.

    \b
    Example:
      atma-sweep retry
      atma-sweep retry polar-baseline-d0-m1-w0-s0 --sweep quick

    Args:
        cells (CELL): Failed cells {BY_NAME}; default: all failed cells.
    """
    _send_and_print("retry", sweep, db, as_json, cells)
