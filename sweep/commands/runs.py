"""The commands that run, steer and watch attempts: launch, evaluate, logs, pause to retry, prune-checkpoints and doctor."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any, Literal

import typer

from ...model.bounds import MAX_LENGTH
from ...results import runs_folder
from ...results.console import completion
from ...results.console.command_line import BY_NAME, MAX_NUMBER, Address, AsJson, Cells, Db, Runs, SweepName, print_json
from ...results.console.text import Printed, cleaned, say
from ..completion import probes
from ..executors.registry import DEFAULT, chosen
from .options import Budget, Executor, GridName, Name, Rate, Set


def launch(
    grid: GridName,
    set_: Set = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="AXIS=LEVEL,..", help="Run only the cells with these levels now; repeatable."),
    ] = None,
    name: Name = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and leave; nothing is written.")] = False,
    executor: Executor = DEFAULT,
    address: Address = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave the sweep to the cluster and return at once; needs --address.")
    ] = False,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train cells again that diverged or whose weights are gone.")
    ] = False,
    code: Annotated[
        Literal["new", "kept"],
        typer.Option(
            "--code",
            metavar="new|kept",
            help="new: run the code as it is now; kept: the code that this sweep was last launched with.",
        ),
    ] = "new",
    notify: Annotated[
        str | None,
        typer.Option(
            "--notify", metavar="URL", help="Post one JSON to this http(s) address at the end, however it comes."
        ),
    ] = None,
    budget: Budget = None,
    rate: Rate = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="First download and prepare the text, as data prepare --grid does.")
    ] = False,
    most: Cells = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate every cell of a grid that is not done yet. Launch again to continue after any stop.

    A cell that another sweep has trained is not trained again.
    --dry-run shows the plan, with the disk that it needs and a line on its price; plan tells more.
    --budget starts what fits, pairs of the grid's contrasts first, and says what it left; a larger one goes on.
    Exit code 1: cells failed; status says why. Exit code 3: this machine lacks something; all of it is listed.

    \b
    Example:
      atma-sweep launch quick --dry-run
      atma-sweep launch quick --only attn_type=polar,nope --only memory=on
      atma-sweep launch quick --set train.tokens=5e4 --name try
      atma-sweep launch quick --budget 0.1h
    """
    from .launch import Asked, carry_out

    asked = Asked(
        grid, set_ or [], only or [], name, chosen(executor, address), address, detach, retrain, code, most, runs, db,
        notify, budget, rate, prepare,
    )  # fmt: skip
    if not carry_out(asked, dry_run=dry_run, as_json=as_json):
        raise typer.Exit(1)


def evaluate(
    cells: Annotated[
        list[str],
        typer.Argument(
            metavar="CELL|hf:MODEL",
            help=f"Trained cells {BY_NAME}; or hf: and a repository of the Hugging Face hub, or a folder.",
            autocompletion=completion.cells,
        ),
    ],
    probe: Annotated[
        list[str] | None,
        typer.Option("--probe", metavar="NAME", help="Only this probe; repeatable.", autocompletion=probes),
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            metavar="TOKENS",
            min=1,
            max=MAX_LENGTH,
            help="At this context length instead of the grid's; repeatable.",
        ),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="NAME",
            help="Name of the sweep; without it the one launched last that has the cell, or for a model the one launched last.",
            autocompletion=completion.sweeps,
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="For a model of the hub: its branch, tag or commit.")
    ] = None,
    pairing: Annotated[
        Literal["text", "native"] | None,
        typer.Option(
            "--pairing",
            metavar="text|native",
            help="For a model: text, the very characters that the sweep's cells read; native, as many of its own tokens. Without it text.",
        ),
    ] = None,
    executor: Executor = DEFAULT,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Measure trained cells again, or at other lengths, from their kept weights. Trains nothing.

    It needs the runs folder, but neither the grid nor the text.
    A length that the grid does not ask for stands in tables with report --length.
    hf:MODEL measures a model from elsewhere on the text of a sweep; report --table open-weight shows it beside the sweep's cells.
    Exit code 1: a cell could not be measured.

    \b
    Example:
      atma-sweep evaluate polar-baseline-d0-m1-w0-s0
      atma-sweep evaluate polar-baseline-d0-m1-w0-s0 --probe needle --length 2048
      atma-sweep evaluate hf:Qwen/Qwen3-0.6B-Base --sweep full
    """
    from ...results.store.store import open_store
    from ..orchestrator import display, evaluate, openweight

    executor = chosen(executor)
    measures_models = any(map(openweight.is_model, cells))
    if not measures_models:
        openweight.check_cell_options(revision=revision, pairing=pairing)
    store = open_store(db)
    where = runs_folder(runs, db, write=True)
    about: dict[str, Any] = {"runs": where, "probes": probe or [], "lengths": length or [], "sweep": sweep}
    revisions = None
    if measures_models:
        beside = openweight.plan(store, cells, **about, revision=revision, pairing=pairing or "text")
        shares, revisions = beside.shares, beside.revisions
        for line in beside.told:
            say(line, err=True)
    else:
        shares = evaluate.plan(store, cells, **about)
    console = display.Terminal(stderr=as_json, soft_wrap=True)
    with display.Display(console, sum(map(len, shares.values()))) as screen:
        measured = evaluate.run(store, shares, screen, runs=where, executor=executor, revisions=revisions)
    if as_json:
        print_json([row for cell in measured for row in cell.as_json()])
    else:
        for cell in measured:
            if cell.values:
                say(cleaned(cell).text())
    if not all(cell.values for cell in measured):
        raise typer.Exit(1)


def logs(
    cell: Annotated[
        str,
        typer.Argument(
            metavar="CELL",
            help=f"Cell {BY_NAME}.",
            autocompletion=completion.cells,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on printing new lines until the attempt ends.")
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", metavar="N", min=1, max=MAX_NUMBER, help="The N-th attempt of the cell; without it the newest."
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines",
            metavar="N",
            min=0,
            max=MAX_NUMBER,
            help="Begin with the last N lines; without it with the first.",
        ),
    ] = None,
    sweep: SweepName = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Print what an attempt printed, while it runs or afterwards; --json gives one object a line.

    \b
    Example:
      atma-sweep logs polar-baseline-d0-m1-w0-s0 --lines 20
      atma-sweep logs polar-baseline-d0-m1-w0-s0 --follow
    """
    from ...results.store.store import open_store
    from ..orchestrator import logs

    store = open_store(db)
    where = runs_folder(runs, db)
    path = logs.log_of(store, where, cell, attempt, sweep)
    out = logs.JsonLines(sys.stdout) if as_json else Printed(sys.stdout)
    if follow:
        alive = logs.alive_of(store, logs.attempt_of(store, cell, attempt, sweep))
        logs.follow(path, alive, out, lines=lines)
    else:
        out.write(logs.tail(path, lines))
    out.close()


def prune_checkpoints(
    sweep: SweepName = None,
    keep: Annotated[
        Literal["newest", "weights", "nothing"],
        typer.Option(
            "--keep",
            metavar="newest|weights|nothing",
            help="What stays. newest: weights, and two checkpoints of each unfinished cell; weights: no checkpoint; nothing: neither.",
        ),
    ] = "newest",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also those of orphans, cells that the grid no longer holds.")
    ] = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no launch needs any more. Cells that run now are left alone.

    Exit code 1: some could not be removed.

    \b
    Example:
      atma-sweep prune-checkpoints --dry-run
      atma-sweep prune-checkpoints --keep weights --orphans
    """
    from ...results.store.store import open_store
    from ..checkpoints.prune import prune

    found = prune(open_store(db), runs_folder(runs, db), sweep, keep=keep, dry=dry_run, orphans=orphans)
    if as_json:
        print_json(found.as_json())
    else:
        say("\n".join(cleaned(found).lines()))
    if found.problems:
        raise typer.Exit(1)


def doctor(address: Address = None, runs: Runs = None, db: Db = None, as_json: AsJson = False) -> None:
    """Look for what would stop a sweep on this machine: GPU, driver, kernels, Ray, disk, file system, database, clock.

    With --address it looks at the cluster, too.
    Exit code 3: something would stop a sweep.

    \b
    Example:
      atma-sweep doctor
    """
    from .. import doctor

    checks = doctor.examine(db, runs, address)
    if as_json:
        print_json(doctor.as_json(checks))
    else:
        say("\n".join(doctor.describe(cleaned(checks))))
    if doctor.exit_code(checks):
        raise typer.Exit(doctor.exit_code(checks))


def _ask(wish: Any, sweep: str | None, db: str | None, as_json: bool, cells: list[str] | None = None) -> None:
    from ...results.store.store import open_store
    from ..orchestrator.control import ask

    answer = ask(open_store(db), wish, sweep, cells or [])
    if as_json:
        print_json(asdict(answer))
    else:
        say(answer.text)


def pause(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Ask a running sweep to save its cells, free the machine and wait.

    Works from any shell, as resume, cancel and retry do; the sweep answers within seconds.

    \b
    Example:
      atma-sweep pause --sweep quick
    """
    _ask("pause", sweep, db, as_json)


def resume(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Ask a paused sweep to go on.

    \b
    Example:
      atma-sweep resume --sweep quick
    """
    _ask("resume", sweep, db, as_json)


def cancel(
    sweep: SweepName = None,
    finish: Annotated[
        bool, typer.Option("--finish", help="Let running cells end first, and start no others; resume takes that back.")
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running sweep to save its cells and stop; launch continues it.

    \b
    Example:
      atma-sweep cancel --sweep quick
      atma-sweep cancel --finish
    """
    _ask("finish" if finish else "cancel", sweep, db, as_json)


def retry(
    cells: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CELL",
            help=f"Failed cells {BY_NAME}; without any, all failed ones.",
            autocompletion=completion.cells,
        ),
    ] = None,
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Ask a running sweep to try cells again that it gave up.

    \b
    Example:
      atma-sweep retry
      atma-sweep retry polar-baseline-d0-m1-w0-s0 --sweep quick
    """
    _ask("retry", sweep, db, as_json, cells)
