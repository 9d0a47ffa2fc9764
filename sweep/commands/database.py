"""Commands that export, import, back up and check databases: parse, call one function, print."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...results import runs_folder
from ...results.console import completion
from ...results.console.command_line import (
    BY_NAME,  # noqa: F401 - named in docstrings
    MAX_NUMBER,
    AsJson,
    Db,
    Documented,
    Runs,
    SweepName,
    print_json,
    print_result,
)
from ...results.console.text import choices_hint, counted, echo_text, sanitize_all, sanitize_line
from ...results.exchange.trackers import EXPORTERS
from ...results.names import safe_file_name
from .options import CellName, ProbeNames

if TYPE_CHECKING:
    from ...results.store.store import Store

TRACKERS = ", ".join(name for name, exporter in EXPORTERS.items() if not exporter.ending)

db_app = typer.Typer(
    help="""Maintain the results database.

    \b
    Example:
      atma-sweep db backup
      atma-sweep db check
    """,
    no_args_is_help=True,
)


@db_app.command("upgrade")
def db_upgrade(db: Db = None, as_json: AsJson = False) -> None:
    """Upgrade an older database to this version's schema, after a backup next to it.

    \b
    Example:
      atma-sweep db upgrade
    """
    from ...results.store.upgrading import upgrade_store

    backup = upgrade_store(db)
    line = f"up to date; backup: {backup}" if backup else "up to date; nothing to do"
    print_result({"backup": backup}, [line], as_json=as_json)


@Documented
def export(
    cell: Annotated[str | None, typer.Argument(autocompletion=completion.cells)] = None,
    folder: Annotated[Path | None, typer.Argument()] = None,
    sweep: SweepName = None,
    out: Path | None = None,
    with_weights: bool = False,
    no_examples: bool = False,
    to: str | None = None,
    what: str | None = None,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write a sweep to one file (a bundle) that import reads elsewhere, or to files for another program.

    CELL --to hf FOLDER writes a trained cell as a model of Hugging Face transformers, with its tokenizer and a model
    card; AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) loads it.
    --to tensorboard, wandb, mlflow and trackio write curves and measurements, one run per cell, offline; they need the
    extra "trackers". View an mlflow export with mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db. --to optuna
    writes a study's trials as an Optuna database; view it with optuna-dashboard sqlite:///FILE.

    \b
    Example:
      atma-sweep export --sweep quick --out quick.zip
      atma-sweep export --to csv --what curves
      atma-sweep export polar-baseline-d0-m1-w0-s0 --to hf my-model

    Args:
        cell (CELL): With --to hf: cell {BY_NAME}.
        folder (FOLDER): With --to hf: folder to create; default: the cell's name.
        out (FILE|FOLDER): File or folder to write; default: <sweep>.zip, <sweep>-<what>.<to>, or <sweep>-<to>.
        with_weights: Include the kept weights and logs.
        no_examples: Leave out items, which are nine tenths of a bundle. Table and figure `items`, figures by
            position, written samples and `--what examples` need them.
        to (FORMAT): Instead of a bundle, write a table (csv, jsonl, parquet), a folder ({TRACKERS}), a study (optuna), or a
            trained cell (hf).
        what (TABLE): Table to write: measurements (the default), cells, curves, examples or attempts.
    """
    from ...results.builtin_sweeps import open_store_with_builtins
    from ...results.console.output_files import is_stdout

    store = open_store_with_builtins(db, sweep)
    if cell is not None or to == "hf":
        _export_cell(store, cell, folder or out, to, sweep=sweep, runs=runs_folder(runs, db), as_json=as_json)
        return
    name = sweep or store.default_sweep()
    bundle = {"weights": with_weights, "examples": not no_examples}
    written, line = _write_export(store, name, out, to, what, bundle, lambda: runs_folder(runs, db))
    to_stdout = is_stdout(out)  # messages then go to standard error
    if as_json:
        print_json(written, err=to_stdout)
        return
    echo_text(line, err=to_stdout)
    for note in written.get("notes", ()):
        echo_text(note, err=True)


@Documented
def track(
    tracker: str,
    out: str | None = None,
    sweep: SweepName = None,
    interval: Annotated[float, typer.Option(min=0.1, max=86_400)] = 5.0,
    until_end: bool = False,
    runs: Runs = None,
    db: Db = None,
) -> None:
    """Send a sweep's news to an experiment tracker while it runs: curves, measurements and states, one run per cell.

    The database stays the truth: a tracker that is down delays nothing and gets everything later. Start it again, and it
    goes on where it ended. launch --track does the same beside the launch.
    Exit code 1: the tracker could not be reached at the end.

    \b
    Example:
      atma-sweep track tensorboard --sweep quick --until-end

    Args:
        tracker (TRACKER): Tracker: {TRACKERS}.
        out (FOLDER|URI): Folder of tensorboard, wandb or trackio, or tracking URI of mlflow; default:
            <sweep>-<tracker>, or MLFLOW_TRACKING_URI or TRACKIO_DIR. WANDB_MODE and WANDB_PROJECT are respected.
        interval (SECONDS): Time between two looks at the database.
        until_end: Exit when no process runs the sweep and everything was sent.
    """
    from ...results.errors import StoreError, SweepUnknown
    from ...results.exchange.trackers.live import (
        TRACKED_LAUNCH,
        Follower,
        default_target,
        follow,
        memory_name,
        watch_owner,
    )
    from ...results.store.store import open_store

    names = [name for name, exporter in EXPORTERS.items() if not exporter.ending]
    if tracker not in names:
        raise StoreError(f"no tracker {tracker!r}; {choices_hint(tracker, names)}")
    store = open_store(db)
    name = sweep or store.default_sweep()
    launch = os.environ.get(TRACKED_LAUNCH)
    # a launch starts its trackers before it records the sweep
    with contextlib.suppress(*([SweepUnknown] if launch else [])):
        store.cell_states(name)  # a damaged database is refused here, before anything is sent
    target = out or default_target(name, tracker)
    memory = make_tracking_folder(runs_folder(runs, db)) / memory_name(name, tracker, target)
    echo_text(f"{name}: sending to {tracker}, {target}", err=True)
    with contextlib.closing(Follower(store, name, tracker, target, memory)) as follower:
        is_complete = follow(
            follower, watch_owner(store, name, launch), interval=interval, until_end=until_end,
            tell=lambda line: echo_text(f"{tracker}: {line}", err=True),
        )  # fmt: skip
    if not is_complete:
        echo_text(f"{tracker}: not everything was sent; run the command again when it can be reached", err=True)
        raise typer.Exit(1)


def make_tracking_folder(runs: Path) -> Path:
    """Create the folder of what was sent to trackers, below the runs folder, and return it."""
    from ...results.console.output_files import make_folder

    folder = runs / "tracking"
    make_folder(folder, "--runs", parents=True)
    return folder


def _export_cell(
    store: Store, cell: str | None, folder: Path | None, to: str | None, *, sweep: str | None, runs: Path, as_json: bool
) -> None:
    """Write a trained cell for transformers and print what was written, or a JSON object (`export_to_hugging_face`).

    Raises:
        StoreError: --to hf and a cell were not given together.
    """
    from ... import __version__
    from ...results.errors import StoreError
    from ..model_export.huggingface import export_to_hugging_face

    if cell is None:
        raise StoreError("--to hf writes one trained cell; name it: atma-sweep export CELL --to hf FOLDER")
    if to != "hf":
        raise StoreError("export CELL writes a model; add --to hf (name a sweep with --sweep)")
    target = folder or Path(store.find_cell(cell, sweep).slug)
    written = export_to_hugging_face(store, cell, target, runs=runs, sweep=sweep, version=__version__)
    line = (
        f"{target}: {written['slug']}, {written['parameters']:,} parameters, {counted(len(written['files']), 'file')}"
    )
    print_result(
        written,
        [line, f"Next: AutoModelForCausalLM.from_pretrained({str(target)!r}, trust_remote_code=True)"],
        as_json=as_json,
    )


def _write_export(
    store: Store, name: str, out: Path | None, to: str | None, what: str | None, bundle: dict[str, bool],
    runs: Callable[[], Path],
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Write a sweep as a bundle, a table or files of another program.

    Args:
        store: Database.
        name: Name of the sweep.
        out: File or folder to write; None for a default name in the working folder.
        to: Format from --to; None to derive it from the ending of `out`, or a bundle without `out`.
        what: Table from --what; None for measurements. Only for tables.
        bundle: Options of a bundle: weights (True for kept weights and logs), examples (True for items).
        runs: Returns the runs folder; called for a bundle only.

    Returns:
        A dict for JSON, and the same as one line. For a table the dict has the keys sweep, file and rows; for another
        program sweep, file or folder, and the number of exported items under their name; for a bundle the fields of its
        summary.

    Raises:
        StoreError: Options contradict each other, or the format is unknown.
    """
    from dataclasses import asdict

    from ...results.console.output_files import resolve_format
    from ...results.errors import StoreError
    from ...results.exchange.exporting import export_sweep
    from ...results.exchange.tables import FORMAT_BY_SUFFIX, export_table

    plain = safe_file_name(name)
    formats = {".zip": "bundle", **FORMAT_BY_SUFFIX}
    kind = to if to is not None and to in EXPORTERS else resolve_format(out, to, formats, "bundle", option="--to")
    if kind not in (*EXPORTERS, *FORMAT_BY_SUFFIX.values(), "bundle"):
        raise StoreError(f"{kind!r} is not a format; {choices_hint(kind, (*FORMAT_BY_SUFFIX.values(), *EXPORTERS))}")
    if bundle["weights"] and kind != "bundle":
        raise StoreError("--with-weights applies to a bundle, not to a table; leave --to out, and end --out in .zip")
    if not bundle["examples"] and kind != "bundle":
        raise StoreError("--no-examples applies to a bundle; a table holds what --what names")
    if exporter := EXPORTERS.get(kind):
        if what is not None:
            raise StoreError(f"--to {kind} exports everything that it supports; leave --what out")
        path = out or Path(f"{plain}-{kind}{exporter.ending}")
        count = exporter.export(store, name, path)
        written = {"sweep": name, "file" if exporter.ending else "folder": path, exporter.counts: count}
        return written, f"{path}: {count} {exporter.counts} of sweep {name}"
    if kind == "bundle":
        if what is not None:
            raise StoreError("a bundle holds every table; leave --what out, or name a table's format with --to")
        summary = export_sweep(store, name, out or Path(f"{plain}.zip"), **bundle, runs=runs())
        counts = ", ".join(f"{count} {table}" for table, count in summary.added.items() if count)
        size = f"{summary.bytes / 1e6:.1f} MB ({counts}, {counted(summary.files, 'file')})"
        return asdict(summary), f"{summary.file}: sweep {name} in {size}"
    what = what or "measurements"
    file = out or Path(f"{plain}-{what}.{kind}")
    rows = export_table(store, what, file, kind, name)  # type: ignore[arg-type]
    return {"sweep": name, "file": file, "rows": rows}, f"{file}: {counted(rows, 'row')} of {what} of sweep {name}"


@Documented
def import_(
    file: Path, name: str | None = None, large: bool = False, runs: Runs = None, db: Db = None, as_json: AsJson = False
) -> None:
    """Import a bundle into the database. Adds what is missing and changes no existing data, so it can be repeated.

    \b
    Example:
      atma-sweep import quick.zip
      atma-sweep import quick.zip --name theirs

    Args:
        file (FILE): Bundle that atma-sweep export wrote.
        name (NAME): Name of the sweep in this database, to keep it apart from one of the same name.
        large: Accept a file of any size, if you trust its author.
    """
    from dataclasses import asdict

    from ...results.exchange.importing import check_import, import_bundle
    from ...results.store.store import open_store
    from .verify import derive, identify

    where = runs_folder(runs, db)
    check_import(file, db, where, large=large)
    store = open_store(db, create=True)
    summary = import_bundle(store, file, rename=name, runs=where, identify=identify, derive=derive, large=large)
    if as_json:
        print_json(asdict(summary))
        return
    counts = ", ".join(f"{count} {table}" for table, count in summary.added.items() if count) or "nothing new"
    echo_text(
        f"sweep {summary.sweep}: added {counts}; already present: {counted(summary.present.get('attempt', 0), 'attempt')}"
    )
    for note in summary.notes:
        echo_text(note, err=True)


@db_app.command("forget")
@Documented
def db_forget(
    cell: CellName,
    probe: ProbeNames = None,
    length: Annotated[list[int] | None, typer.Option(min=0, max=MAX_NUMBER)] = None,
    yes: bool = False,
    sweep: SweepName = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Delete measurements of a cell, after listing them and the sweeps that will measure them again. An event records it.

    \b
    Example:
      atma-sweep db forget polar-baseline-d0-m1-w0-s0 --probe needle --yes

    Args:
        cell (CELL): Cell {BY_NAME}.
        probe (NAME): Only measurements of this probe; repeatable.
        length (TOKENS): Only measurements at this context length; repeatable.
        yes: Delete without asking.
    """
    import sys

    from ...results.errors import StoreError
    from ...results.maintenance.deletion import delete_measurements, plan_measurements
    from ...results.store.store import open_store
    from ..orchestrator.control import current_user

    store = open_store(db)
    forgotten = plan_measurements(store, cell, probes=probe or [], lengths=length or [], sweep=sweep)
    if not as_json:
        echo_text("\n".join(sanitize_all(forgotten).lines()))
    if forgotten.rows and not yes and not as_json and sys.stdin.isatty():
        yes = typer.confirm("delete these?")
    if forgotten.rows and yes:
        forgotten = delete_measurements(store, forgotten, who=current_user())
        if not as_json:
            echo_text("deleted")
    if as_json:
        print_json(forgotten.as_json())
    if forgotten.rows and not forgotten.deleted:
        raise StoreError("nothing was deleted; confirm with --yes")


@db_app.command("backup")
@Documented
def db_backup(to: Path | None = None, db: Db = None, as_json: AsJson = False) -> None:
    """Copy a SQLite database while it is in use. The copy is checked and never overwrites anything.

    \b
    Example:
      atma-sweep db backup --to backups.db

    Args:
        to (FILE|FOLDER): Folder or file; default: <db>.<UTC time>.backup next to the database.
    """
    from ...results.maintenance.backup import backup

    copy = backup(db, to)
    size = copy.stat().st_size
    back = "to restore: stop launches, move the database away with its -wal and -shm, and give this file its name"
    print_result({"backup": copy, "bytes": size}, [f"{copy}: {size / 1e6:.1f} MB", back], as_json=as_json)


@db_app.command("check")
@Documented
def db_check(skip_weights: bool = False, runs: Runs = None, db: Db = None, as_json: AsJson = False) -> None:
    """Check a database for problems, and print a remedy for each.

    It reads every file of kept weights, about a second per GB.
    Exit code 1: a problem puts numbers at risk.

    \b
    Example:
      atma-sweep db check

    Args:
        skip_weights: Do not read the kept weights to compare them with their hashes.
    """
    from dataclasses import asdict

    from .verify import check

    findings = check(db, runs_folder(runs, db), weights=not skip_weights, tell=lambda line: echo_text(line, err=True))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            echo_text(
                f"{sanitize_line(finding.severity)}: {sanitize_line(finding.what)}\n  -> {sanitize_line(finding.remedy)}"
            )
        if not findings:
            echo_text("no problems found")
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)
