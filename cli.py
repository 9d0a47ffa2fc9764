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
from .sweep.bench.commands import bench_app
from .sweep.data_commands import data_app
from .sweep.options import AsJson, Db, Executor, Runs, SweepName, print_json, runs_folder

app = typer.Typer(
    name="atma-sweep",
    help="From a YAML grid of sequence mixers to the finished ablation appendix.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
db_app = typer.Typer(help="Look after the results database.", no_args_is_help=True)
app.add_typer(db_app, name="db")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")


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
    where = runs_folder(runs, db)
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
        print_json(
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
        print_json({"sweep": sweep, "counts": counts, "finished": outcome.finished})
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
    where = runs_folder(runs, db)
    shares = evaluate.plan(store, cells, runs=where, probes=probe or [], lengths=length or [], sweep=sweep)
    console = Console(stderr=as_json, soft_wrap=True)
    with display.Display(console, sum(map(len, shares.values()))) as screen:
        measured = evaluate.run(store, shares, screen, runs=where, executor=executor)
    if as_json:
        print_json([row for cell in measured for row in cell.as_json()])
    else:
        for cell in measured:
            if cell.values:
                typer.echo(cell.text())
    if not all(cell.values for cell in measured):
        raise typer.Exit(1)


@app.command()
def status(
    sweep: SweepName = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show one sweep live until Ctrl-C.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="How often --watch looks again.")
    ] = 2.0,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="With --watch: leave when nobody runs the sweep any more.")
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Show where sweeps stand: counts, running cells with their speed and time left, failures with their cause."""
    from .results.store import open_store

    if watch:
        from rich.console import Console

        from .reports.watch import watch as follow

        follow(open_store(db), sweep, Console(), interval=interval, until_end=until_end, as_json=as_json)
        return
    from .reports.status import status_of

    report = status_of(open_store(db), sweep)
    if as_json:
        print_json(report.as_json())
    else:
        typer.echo(report.text())


@app.command()
def logs(
    cell: Annotated[str, typer.Argument(help="Cell by id, the beginning of one, or slug, with or without its seed.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is appended, until it ends.")] = False,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="The cell's N-th attempt; else its newest.")
    ] = None,
    lines: Annotated[int | None, typer.Option("--lines", min=0, help="Begin with the last lines; else all.")] = None,
    sweep: SweepName = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Print what an attempt printed, while it runs or afterwards; --json gives one object a line."""
    from .results.store import open_store
    from .sweep import logs

    store = open_store(db)
    where = runs_folder(runs, db)
    path = logs.log_of(store, where, cell, attempt, sweep)
    out = logs.JsonLines(sys.stdout) if as_json else sys.stdout
    if follow:
        alive = logs.alive_of(store, logs.attempt_of(store, cell, attempt, sweep))
        logs.follow(path, alive, out, lines=lines)
    else:
        out.write(logs.tail(path, lines))
    if isinstance(out, logs.JsonLines):
        out.close()


@app.command("prune-checkpoints")
def prune_checkpoints(
    sweep: SweepName = None,
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            help="newest: weights, and two checkpoints of each unfinished cell; weights: only those; nothing: nothing.",
        ),
    ] = "newest",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    orphans: Annotated[bool, typer.Option("--orphans", help="Also of cells that the grid dropped since.")] = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints that no launch needs any more. Cells that run now are left alone."""
    from .results.store import open_store
    from .sweep.pruning import prune

    found = prune(open_store(db), runs_folder(runs, db), sweep, keep=keep, dry=dry_run, orphans=orphans)  # type: ignore[arg-type]
    if as_json:
        print_json(found.as_json())
    else:
        typer.echo("\n".join(found.lines()))
    if found.problems:
        raise typer.Exit(1)


@app.command()
def doctor(runs: Runs = None, db: Db = None, as_json: AsJson = False) -> None:
    """Look for what would stop a sweep on this machine: GPU, driver, kernels, Ray, disk, database, clock."""
    from .sweep import doctor

    checks = doctor.examine(db, runs)
    if as_json:
        print_json(doctor.as_json(checks))
    else:
        typer.echo("\n".join(doctor.describe(checks)))
    if doctor.exit_code(checks):
        raise typer.Exit(doctor.exit_code(checks))


def _ask(wish: Any, sweep: str | None, db: str | None, as_json: bool, cells: list[str] | None = None) -> None:
    from dataclasses import asdict

    from .results.store import open_store
    from .sweep.wishes import ask

    answer = ask(open_store(db), wish, sweep, cells or [])
    if as_json:
        print_json(asdict(answer))
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
        print_json(sheet.as_json())
    else:
        typer.echo(sheet.text())


@app.command()
def report(
    table: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="N|NAME", help="Table by the first paper's number (6: complete results) or name."
        ),
    ] = None,
    sweep: SweepName = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="terminal, md, csv, tex, html or json; else by the ending of --out.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write to this file instead; with --all, to this folder.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar="SWEEP", help="Put the numbers beside another sweep's: printed-v2."),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option("--check", metavar="FILE", help="Exit 1 if this table no longer is so; repeatable."),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Write every table, with an index, into the folder --out.")
    ] = False,
    seeds: Annotated[
        bool, typer.Option("--seeds", help="List every seed instead of mean and deviation (table 6).")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace/--no-trace", help="Leave out what --check needs.")] = True,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write tables of the paper from the database, compare them with published numbers, or check written ones."""
    from .reports.data import ReportError
    from .reports.render import SUFFIXES, render
    from .reports.tables import make_table

    if not (table or compare or all_ or check):
        raise ReportError("say what to report: --table 6, --compare printed-v2, --all --out FOLDER or --check FILE")
    if check:
        _check_tables(check, db, as_json)
        return
    store = _report_store(db, sweep)
    format_ = "json" if as_json else format_ or (SUFFIXES.get(out.suffix.lower()) if out else None) or "terminal"
    if all_:
        _write_tables(store, sweep, out, compare, seeds)
        return
    options: dict[str, Any] = {"seeds": True} if seeds and table == "6" and not compare else {}
    if compare:
        options = {"reference": compare} | ({"table": table} if table and table != "compare" else {})
    made = make_table("compare" if compare else str(table), store, sweep, **options)
    if out is None:
        color = format_ == "terminal" and sys.stdout.isatty()
        typer.echo(render(made, format_, trace=trace, color=color), nl=False)
        return
    text = render(made, format_, trace=trace)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {out}", err=True)


def _report_store(db: str | None, sweep: str | None) -> Any:
    """The database, or a temporary one with the published numbers when those are asked for and it lacks them."""
    from .results.paper import OPEN_WEIGHT, SWEEPS, open_published, with_published
    from .results.store import StoreMissing, open_store

    if sweep not in (*SWEEPS, OPEN_WEIGHT):
        return open_store(db)
    try:
        return with_published(open_store(db), sweep)
    except StoreMissing:
        return open_published()


def _check_tables(files: list[Path], db: str | None, as_json: bool) -> None:
    from .reports.check import check_file, sweep_of

    rows = [{"file": str(file), "problems": check_file(file, _report_store(db, sweep_of(file)))} for file in files]
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            typer.echo("\n".join(row["problems"]) if row["problems"] else f"{row['file']}: as the database says")
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


def _write_tables(store: Any, sweep: str | None, out: Path | None, compare: str | None, seeds: bool) -> None:
    from .reports.bundle import write_all
    from .reports.data import ReportError
    from .results.paper import SWEEPS

    if out is None:
        raise ReportError("--all writes many files; say where with --out FOLDER")
    written = write_all(store, sweep, out=out, reference=compare or SWEEPS[-1], seeds=seeds)
    for name, why in written.left_out.items():
        typer.echo(f"left out {name}: {why}", err=True)
    typer.echo(f"wrote {len(written.files)} files in {out}; start at {out / 'index.html'}", err=True)


@app.command()
def schema(out: Annotated[Path | None, typer.Option("--out", help="Write to this file instead.")] = None) -> None:
    """Print the JSON Schema of a grid file, for editors."""
    from .sweep.schema import grid_schema

    text = json.dumps(grid_schema(), indent=1) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@db_app.command("upgrade")
def db_upgrade(db: Db = None, as_json: AsJson = False) -> None:
    """Bring an older database to this version's schema, after a backup beside it."""
    from .results.store import upgrade_store

    backup = upgrade_store(db)
    if as_json:
        print_json({"backup": backup})
    else:
        typer.echo(f"up to date; backup: {backup}" if backup else "up to date; nothing to do")


@app.command("export")
def export(
    sweep: SweepName = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; else <sweep>.zip, or <sweep>-<what>.<to>.")
    ] = None,
    with_weights: Annotated[bool, typer.Option("--with-weights", help="Take kept weights and logs along.")] = False,
    to: Annotated[str | None, typer.Option("--to", help="A table instead of a bundle: csv, jsonl or parquet.")] = None,
    what: Annotated[
        str, typer.Option("--what", help="Which table: measurements, cells, curves, examples or attempts.")
    ] = "measurements",
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write a sweep into one file that `import` takes in elsewhere, or one of its tables for another program."""
    import re
    from dataclasses import asdict

    from .results.interchange import export_sweep, export_table
    from .results.store import StoreError, open_store

    store = open_store(db)
    name = sweep or store.default_sweep()
    plain = re.sub(r"[^\w.-]+", "_", name)
    if to is not None:
        if with_weights:
            raise StoreError("--with-weights goes into a bundle, not into a table; leave --to out")
        file = out or Path(f"{plain}-{what}.{to}")
        rows = export_table(store, what, file, to, name)  # type: ignore[arg-type]
        if as_json:
            print_json({"sweep": name, "file": file, "rows": rows})
        else:
            typer.echo(f"{file}: {rows} rows of {what} of sweep {name}")
        return
    summary = export_sweep(store, name, out or Path(f"{plain}.zip"), weights=with_weights, runs=runs_folder(runs, db))
    if as_json:
        print_json(asdict(summary))
        return
    counts = ", ".join(f"{count} {table}" for table, count in summary.added.items() if count)
    typer.echo(f"{summary.file}: sweep {name} in {summary.bytes / 1e6:.1f} MB ({counts}, {summary.files} files)")
    for note in summary.notes:
        typer.echo(note, err=True)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A bundle that atma-sweep export wrote.")],
    name: Annotated[str | None, typer.Option("--name", help="Call the sweep so here.")] = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Take a bundle into the database: what is missing is added, nothing is changed, and twice is as once."""
    from dataclasses import asdict

    from .results.interchange import import_bundle
    from .results.store import open_store

    store = open_store(db, create=True)
    summary = import_bundle(store, file, rename=name, runs=runs_folder(runs, db), identify=_identify)
    if as_json:
        print_json(asdict(summary))
        return
    counts = ", ".join(f"{count} {table}" for table, count in summary.added.items() if count) or "nothing new"
    typer.echo(f"sweep {summary.sweep}: added {counts}; {summary.present.get('attempt', 0)} attempts were here already")
    for note in summary.notes:
        typer.echo(note, err=True)


def _identify(config: Any) -> str:
    from .sweep.cell import CellConfig, cell_id

    return cell_id(CellConfig.model_validate(config))


@db_app.command("backup")
def db_backup(
    to: Annotated[
        Path | None, typer.Option("--to", help="Folder or file; else <db>.<UTC time>.backup beside the database.")
    ] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Copy a SQLite database while it is in use. The copy is checked and never overwrites anything."""
    from .results.maintenance import backup

    copy = backup(db, to)
    if as_json:
        print_json({"backup": copy, "bytes": copy.stat().st_size})
    else:
        typer.echo(f"{copy}: {copy.stat().st_size / 1e6:.1f} MB")
        typer.echo("to go back: stop launches, move the database away with its -wal and -shm, give this file its name")


@db_app.command("check")
def db_check(runs: Runs = None, db: Db = None, as_json: AsJson = False) -> None:
    """Look for everything that is wrong with a database, and say what to do; exit 1 when numbers are in danger."""
    from dataclasses import asdict

    from .results.maintenance import check

    findings = check(db, runs=runs_folder(runs, db), identify=_identify)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{finding.severity}: {finding.what}\n  -> {finding.remedy}")
        if not findings:
            typer.echo("nothing is wrong")
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


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
