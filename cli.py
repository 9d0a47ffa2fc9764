"""Typer commands: parse, call one function, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __version__

app = typer.Typer(
    name="atma-sweep",
    help="From a YAML grid of sequence mixers to the finished ablation appendix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db_app = typer.Typer(help="Look after the results database.", no_args_is_help=True)
app.add_typer(db_app, name="db")
data_app = typer.Typer(help="Prepare, list and verify corpora.", no_args_is_help=True)
app.add_typer(data_app, name="data")

bench_app = typer.Typer(help="Time kernels and whole training steps on this machine's GPU.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Db = Annotated[str | None, typer.Option("--db", metavar="URL|FILE", help="Database; else ATMA_DB, else atma.db here.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with the names of the database's columns.")]
Executor = Annotated[str, typer.Option("--executor", help="ray, or local: one attempt after another without Ray.")]
Runs = Annotated[Path | None, typer.Option("--runs", help="Folder for artifacts; else <db name>-runs beside it.")]
SweepName = Annotated[str | None, typer.Option("--sweep", help="Sweep by name; else the one launched last.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"atma-sweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


def _check_word(option: str, word: str, allowed: list[str]) -> None:
    from .sweep.errors import GridError

    if word not in allowed:
        raise GridError(option, None, word, f"no such {option.removeprefix('--')}", allowed, word)


def _check_executor(name: str) -> None:
    _check_word("--executor", name, ["ray", "local"])


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, default=str))


@app.command()
def launch(
    grid: Annotated[str, typer.Argument(help="Grid file, or the name of a shipped grid such as quick.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a setting; needs --name.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="AXIS=LEVEL,..", help="Run only these cells now.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Launch under another sweep name.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and leave; nothing is written.")] = False,
    executor: Executor = "ray",
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train again what diverged or whose weights are gone.")
    ] = False,
    code: Annotated[
        str, typer.Option("--code", help="new: run the code as it is now; kept: as this sweep was launched last.")
    ] = "new",
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate every cell of a grid that is not done yet. Launch again to continue after any stop."""
    from rich.console import Console

    from .results.store import StoreMissing, open_store
    from .sweep import display, launch, texts
    from .sweep.grid import load_grid
    from .sweep.preparing import Preparing

    _check_executor(executor)
    _check_word("--code", code, ["new", "kept"])
    loaded = load_grid(grid, sets=set_ or [], rename=name)
    console = Console(stderr=as_json, soft_wrap=True)
    where = _runs(runs, db)
    with Preparing(console, "text") as preparing:
        cells, remarks = texts.expand(loaded, where / "corpora", dry=dry_run, tell=preparing)
    if dry_run:
        try:
            store = open_store(db)
        except StoreMissing:
            store = None
        plan = launch.plan(loaded, cells, store, only=only or [], retrain=retrain, runs=where)
        _show_plan(plan, loaded.name, remarks, as_json)
        return
    store = open_store(db, create=True)
    where.mkdir(parents=True, exist_ok=True)

    def planned(plan: Any) -> None:
        for line in display.describe_plan(plan, loaded.name):
            console.print(line, highlight=False, markup=False)
        screen.expect(len(plan.tasks))

    with display.Display(console, len(cells)) as screen:
        outcome = launch.run(
            loaded,
            cells,
            store,
            screen,
            runs=where,
            executor=executor,
            only=only or [],
            retrain=retrain,
            code=code,
            planned=planned,
            tell=lambda line: console.print(line, highlight=False, markup=False),
        )
    _show_outcome(outcome, loaded.name, console, as_json)
    if not outcome.finished:
        raise typer.Exit(1)


def _show_plan(plan: Any, sweep: str, remarks: list[str], as_json: bool) -> None:
    from .sweep.display import describe_plan

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
        _print_json(
            {
                "sweep": sweep,
                "cells": rows,
                "counts": plan.counts,
                "to_train": [task.cell.id for task in plan.training],
                "to_evaluate": [task.cell.id for task in plan.evaluating],
                "tokens": plan.tokens,
                **plan.disk.as_json(),
                "remarks": remarks,
            }
        )
        return
    for cell in plan.cells:
        typer.echo(f"{cell.id}  {plan.standings[cell.id]:<12} {cell.slug}")
    for line in describe_plan(plan, sweep, remarks):
        typer.echo(line)


def _show_outcome(outcome: Any, sweep: str, console: Any, as_json: bool) -> None:
    counts = {word: count for word, count in sorted(outcome.standings.items()) if count}
    if as_json:
        _print_json({"sweep": sweep, "counts": counts, "finished": outcome.finished})
        return
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    rest = (
        "atma-sweep report --table 6" if outcome.finished else "atma-sweep status tells why; launch again to continue"
    )
    console.print(f"{sweep}: {words}. Next: {rest}", highlight=False, markup=False)


@app.command()
def evaluate(
    cells: Annotated[
        list[str], typer.Argument(metavar="CELL", help="Trained cells by id, the beginning of one, or slug.")
    ],
    probe: Annotated[
        list[str] | None, typer.Option("--probe", metavar="NAME", help="Only this probe, given once or more.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", metavar="TOKENS", help="At this context length instead of the config's; repeatable."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option("--sweep", help="Sweep by name; else the one launched last that has the cell.")
    ] = None,
    executor: Executor = "ray",
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Measure trained cells again, or at other lengths, from their kept weights. Trains nothing."""
    from rich.console import Console

    from .results.store import open_store
    from .sweep import display, evaluate

    _check_executor(executor)
    store = open_store(db)
    where = _runs(runs, db)
    shares = evaluate.plan(store, cells, runs=where, probes=probe or [], lengths=length or [], sweep=sweep)
    console = Console(stderr=as_json, soft_wrap=True)
    with display.Display(console, sum(map(len, shares.values()))) as screen:
        measured = evaluate.run(store, shares, screen, runs=where, executor=executor)
    if as_json:
        _print_json([row for cell in measured for row in cell.as_json()])
    else:
        for cell in measured:
            if cell.values:
                typer.echo(cell.text())
    if not all(cell.values for cell in measured):
        raise typer.Exit(1)


@app.command()
def status(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Show where sweeps stand: counts, running cells with their speed and time left, failures with their cause."""
    from .reports.status import status_of
    from .results.store import open_store

    report = status_of(open_store(db), sweep)
    if as_json:
        _print_json(report.as_json())
    else:
        typer.echo(report.text())


def _ask(wish: Any, sweep: str | None, db: str | None, as_json: bool, cells: list[str] | None = None) -> None:
    from dataclasses import asdict

    from .results.store import open_store
    from .sweep.wishes import ask

    answer = ask(open_store(db), wish, sweep, cells or [])
    if as_json:
        _print_json(asdict(answer))
    else:
        typer.echo(answer.text)


@app.command()
def pause(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Let a running sweep save its cells, free the machine and wait."""
    _ask("pause", sweep, db, as_json)


@app.command()
def resume(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Let a paused sweep go on."""
    _ask("resume", sweep, db, as_json)


@app.command()
def cancel(sweep: SweepName = None, db: Db = None, as_json: AsJson = False) -> None:
    """Let a running sweep save its cells and stop; launch continues it."""
    _ask("cancel", sweep, db, as_json)


@app.command()
def retry(
    cells: Annotated[list[str] | None, typer.Argument(help="Failed cells by id or slug; all of them if none.")] = None,
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Let a running sweep try cells again that it has given up."""
    _ask("retry", sweep, db, as_json, cells)


@app.command()
def show(
    cell: Annotated[str, typer.Argument(help="Cell by id, the beginning of one, or slug.")],
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show one cell: its config, its attempts, its curve and its measurements."""
    from .reports.status import cell_sheet
    from .results.store import open_store

    sheet = cell_sheet(open_store(db), cell, sweep)
    if as_json:
        _print_json(sheet.as_json())
    else:
        typer.echo(sheet.text())


@app.command()
def report(
    table: Annotated[str, typer.Option("--table", help="Table by the paper's number; 6 is the complete results.")],
    sweep: SweepName = None,
    format_: Annotated[str, typer.Option("--format", help="terminal, md, csv, tex or json.")] = "terminal",
    out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead.")] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write a table of the paper from the database."""
    from .reports.tables import make_table, render
    from .results.store import open_store

    text = render(make_table(table, open_store(db), sweep), "json" if as_json else format_)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out}", err=True)


@app.command()
def schema(out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead.")] = None) -> None:
    """Print the JSON Schema of a grid file, for editors."""
    from .sweep.schema import grid_schema

    text = json.dumps(grid_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


def _runs(runs: Path | None, db: str | None) -> Path:
    from .results.store import default_runs

    return (runs or default_runs(db)).absolute()


@data_app.command("prepare")
def data_prepare(
    what: Annotated[
        str | None, typer.Argument(metavar="NAME|PATH", help="A known corpus (see data list --known), text or shards.")
    ] = None,
    grid: Annotated[str | None, typer.Option("--grid", help="Prepare what this grid needs instead.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Call it so; a grid then says data.corpus: NAME.")] = None,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="bytes, gpt2 or json.")] = None,
    tokenizer_file: Annotated[Path | None, typer.Option("--tokenizer-file", help="The tokenizer's file.")] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option("--end-of-text", help="The token that ends a text, where that file names it unusually."),
    ] = None,
    tokens: Annotated[
        float | None, typer.Option("--tokens", help="Training tokens, such as 1e9; else all, or the grids' number.")
    ] = None,
    heldout: Annotated[
        str | None, typer.Option("--heldout", help="Corpus or path that lends the long documents.")
    ] = None,
    heldout_tokens: Annotated[
        int | None, typer.Option("--heldout-tokens", help="Tokens that a long document needs; else 65601.")
    ] = None,
    path: Annotated[Path | None, typer.Option("--path", help="For a known corpus: a local copy of it.")] = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Tokenise text into shards, or adopt shards. Run again to go on after a stop."""
    from rich.console import Console

    from .sweep import preparing
    from .sweep.training import corpora
    from .sweep.training.prepare import prepare

    root = _runs(runs, db) / "corpora"
    given = {
        "tokenizer": tokenizer,
        "tokenizer_file": str(tokenizer_file.resolve()) if tokenizer_file else None,
        "end_of_text": end_of_text,
        "train_tokens": tokens,
        "heldout": preparing.lender(heldout),
        "heldout_tokens": heldout_tokens,
        "path": str(path.resolve()) if path else None,
    }
    console = Console(stderr=as_json, soft_wrap=True)
    found = []
    for data in preparing.chosen(grid, what, given, name):
        with preparing.Preparing(console, data.corpus) as tell:
            found.append(prepare(data, root, name=name, tell=tell))
    rows = corpora.listing(root, only=found)
    if as_json:
        _print_json(rows)
    else:
        typer.echo("\n".join(preparing.table(rows, root)))


@data_app.command("list")
def data_list(
    known: Annotated[bool, typer.Option("--known", help="The corpora that can be prepared by name.")] = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show what is prepared for a database."""
    from .sweep import preparing
    from .sweep.training import corpora

    root = _runs(runs, db) / "corpora"
    if known:
        rows: Any = [{"corpus": name, "description": text} for name, text in corpora.CORPORA.items()]
        lines = [f"{name:<20} {text}" for name, text in corpora.CORPORA.items()]
    else:
        rows = corpora.listing(root)
        lines = preparing.table(rows, root)
    if as_json:
        _print_json(rows)
    else:
        typer.echo("\n".join(lines))


@data_app.command("verify")
def data_verify(
    what: Annotated[
        str | None, typer.Argument(metavar="NAME|FINGERPRINT", help="One corpus; else all that are prepared.")
    ] = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Read every token of prepared corpora again and compare hashes and fingerprint; exit 1 when something differs."""
    from .sweep.training import corpora

    root = _runs(runs, db) / "corpora"
    folders = [corpora.choose(root, what)] if what else corpora.folders(root)
    rows = [{"folder": str(folder), "problems": corpora.verify(folder)} for folder in folders]
    if as_json:
        _print_json(rows)
    else:
        for row in rows:
            typer.echo("\n".join(row["problems"]) if row["problems"] else f"{row['folder']}: as prepared")
        if not rows:
            typer.echo(f"nothing is prepared in {root}")
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


Rounds = Annotated[int, typer.Option("--rounds", min=1, help="How often the variants take turns.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write every number to this JSON file.")]


@bench_app.command("kernels")
def bench_kernels(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to time; all of them if none is named.")] = None,
    rounds: Rounds = 10,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time each kernel beside its rivals, at the sizes of the 370M network."""
    from .sweep.bench import kernels, report

    report.show(kernels, lambda device, tell: kernels.run(ops or [], device, rounds=rounds, tell=tell), out, as_json)


@bench_app.command("train")
def bench_train(
    cells: Annotated[list[str] | None, typer.Argument(help="Slugs of cells, without their seed; see --grid.")] = None,
    grid: Annotated[str, typer.Option("--grid", help="Grid that the cells belong to.")] = "full",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a setting.")] = None,
    rounds: Rounds = 3,
    profile: Annotated[bool, typer.Option("--profile", help="Also say what the device's time goes to.")] = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Time whole optimizer steps of cells on random tokens, and the way to the first step."""
    from .sweep.bench import report, train

    chosen = train.choose(grid, cells or [], set_ or [])
    report.show(
        train, lambda device, tell: train.run(chosen, device, rounds=rounds, profile=profile, tell=tell), out, as_json
    )


@db_app.command("upgrade")
def db_upgrade(db: Db = None, as_json: AsJson = False) -> None:
    """Bring an older database to this version's schema, after a backup beside it."""
    from .results.store import upgrade_store

    backup = upgrade_store(db)
    if as_json:
        _print_json({"backup": backup})
    else:
        typer.echo(f"up to date; backup: {backup}" if backup else "up to date; nothing to do")


def _expected(error: BaseException) -> int | None:
    """The exit code of an error that a user can mend; None for one that is a bug of ours."""
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, int) and type(error).__module__.startswith("atma_sweep.") else None


def main(command: Callable[[], Any] = app) -> None:
    """Runs the command line: one clear line and an exit code for every error that was foreseen."""
    # Imports make many objects that live on; collecting garbage meanwhile costs `status` a tenth of its time.
    gc.set_threshold(200_000)
    try:
        command()
    except Exception as error:
        code = _expected(error)
        if code is None:
            raise
        typer.echo(f"atma-sweep: {' '.join(str(error).split())}", err=True)
        sys.exit(code)
    except KeyboardInterrupt:
        typer.echo("atma-sweep: stopped; launch again to continue", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
