"""Commands that delete data and files after showing them: parse, call one function, ask, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from ...results import runs_folder
from ...results.console import completion
from ...results.console.command_line import MAX_NUMBER, AsJson, Db, Documented, Runs, print_json
from ...results.console.text import echo_text, sanitize_all
from .options import ProbeNames

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm(*, yes: bool, as_json: bool, action: str) -> None:
    """Ask the user to confirm a deletion that was shown; return if it is confirmed.

    The user is asked only if standard input is a terminal.

    Args:
        yes: True if --yes confirmed it already; nobody is asked then.
        as_json: True for JSON output, which never asks.
        action: Past participle for the question, such as "deleted".

    Raises:
        StoreError: The user refused, or cannot be asked (exit code 2).
    """
    from ...results.errors import StoreError

    if not yes and not as_json and sys.stdin.isatty():
        yes = typer.confirm(f"this will be {action}; continue?")
    if not yes:
        raise StoreError(f"nothing was {action}; confirm with --yes")


@Documented
def delete(
    names: Annotated[list[str], typer.Argument(autocompletion=completion.sweeps_and_cells)],
    probe: ProbeNames = None,
    metric: Annotated[list[str] | None, typer.Option(autocompletion=completion.metrics)] = None,
    length: Annotated[list[int] | None, typer.Option(min=0, max=MAX_NUMBER)] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    no_backup: bool = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Delete sweeps, cells or single measurements from the database: everything or nothing, after a backup.

    Lists what will be deleted and asks for confirmation. Data that another sweep shares, or that is in use by a
    launch, stays. Files stay until gc removes them.

    \b
    Example:
      atma-sweep delete quick --dry-run
      atma-sweep delete polar-baseline-d0-m1-w0-s0 --probe needle --yes
      atma-sweep delete polar-baseline-d0-m1-w0-s0 --yes
      atma-sweep delete quick --yes

    Args:
        names (SWEEP|CELL...): Sweeps by name, else cells by complete id or slug.
        probe (NAME): Delete only this probe's numbers of one cell; repeatable.
        metric (NAME): Delete only this metric of one cell; repeatable.
        length (TOKENS): Delete only numbers of one cell at this context length; repeatable.
        no_backup: Make no copy of the database first. A PostgreSQL database needs this option and a backup of your own.
    """
    from ...results.maintenance import deletion
    from ...results.store.store import open_store
    from ..host.processes import is_holder_active
    from ..orchestrator.control import current_user

    if probe or metric or length:
        _delete_measurements(names, probe or [], metric or [], length or [], dry_run, yes, no_backup, db, as_json)
        return
    store = open_store(db)
    deletion_plan = deletion.plan_deletion(store, names, holds=is_holder_active, runs=runs_folder(runs, db))
    if not as_json:
        echo_text("\n".join(sanitize_all(deletion_plan).lines()))
    if not dry_run and not deletion_plan.is_empty:
        confirm(yes=yes, as_json=as_json, action="deleted")
        deletion_plan = replace(deletion_plan, backup=_backup(db, no_backup, as_json))
        deletion_plan = deletion.execute_deletion(
            store, deletion_plan, names, holds=is_holder_active, who=current_user()
        )
        if not as_json:
            echo_text("deleted")
    if as_json:
        print_json(deletion_plan.as_json())


def _delete_measurements(
    names: Sequence[str],
    probes: list[str],
    metrics: list[str],
    lengths: list[int],
    dry: bool,
    yes: bool,
    no_backup: bool,
    db: str | None,
    as_json: bool,
) -> None:
    """Delete measurements of one cell, after showing them, asking, and a backup; print the result.

    Asks and deletes nothing if no measurement matches. The filters are combined by "and". The JSON object has the path
    of the backup under backup, None without one.

    Args:
        names: Exactly one cell, by complete id or slug.
        probes: Only these probes; empty for all.
        metrics: Only these metrics; empty for all.
        lengths: Only these context lengths in tokens; empty for all.
        dry: True to show only.
        yes: True to delete without asking.
        no_backup: True to make no backup.
        db: Database, as for --db.
        as_json: True to print JSON.

    Raises:
        StoreError: Several names or a sweep are given, or the deletion is refused: by the user, or since the cell runs
            or another sweep shares it.
    """
    from ...results.errors import StoreError
    from ...results.maintenance import deletion, names_tags_notes
    from ...results.store.store import open_store
    from ..host.processes import is_holder_active
    from ..orchestrator.control import current_user

    store = open_store(db)
    if len(names) != 1:
        raise StoreError("--probe, --metric and --length select numbers of one cell; name exactly one cell")
    kind, cell = store.read(lambda session: names_tags_notes.resolve_target(session, names[0], complete=True))
    if kind != "cell":
        raise StoreError(
            f"--probe, --metric and --length select numbers of one cell, and {cell} is a sweep; name a cell"
        )
    store.write(lambda session: deletion.require_unshared(session, cell, is_holder_active))
    deletion_plan = deletion.plan_measurements(store, cell, probes=probes, lengths=lengths, metrics=metrics)
    copy = None
    if not as_json:
        echo_text("\n".join(sanitize_all(deletion_plan).lines()))
    if not dry and deletion_plan.rows:
        confirm(yes=yes, as_json=as_json, action="deleted")
        copy = _backup(db, no_backup, as_json)
        deletion_plan = deletion.delete_measurements(
            store,
            deletion_plan,
            who=current_user(),
            check=lambda session: deletion.require_unshared(session, cell, is_holder_active),
        )
        if not as_json:
            echo_text("deleted")
    if as_json:
        print_json(deletion_plan.as_json() | {"backup": copy})


def _backup(db: str | None, without: bool, as_json: bool) -> str | None:
    """Back up the database before a deletion and return the copy's path; None if `without` is set.

    Prints the path unless `as_json`.

    Raises:
        StoreError: The database is on a server; the message has the command that backs it up.
    """
    from ...results.errors import StoreError
    from ...results.maintenance.backup import backup, dump_command
    from ...results.store.database import resolve_url, sqlite_file

    if without:
        return None
    if sqlite_file(resolve_url(db)) is None:
        raise StoreError(
            f"a database on a server is backed up with its own tool: {dump_command(resolve_url(db))}; then delete again with --no-backup"
        )
    copy = backup(db)
    if not as_json:
        echo_text(f"backup: {copy}")
    return str(copy)


@Documented
def gc(
    place: list[str] | None = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    runs: Runs = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Remove files of the runs folder that no database entry owns: those of deleted attempts, plugins, launch logs.

    Lists the files and asks for confirmation. Running attempts are never touched; for existing cells, use
    prune-checkpoints.
    Exit code 1: some files could not be removed.

    \b
    Example:
      atma-sweep gc --dry-run
      atma-sweep gc --yes

    Args:
        place (URL|FOLDER): Also search this checkpoint.path, which no other database may use; repeatable.
    """
    from ...results.store.store import open_store
    from ..checkpoints import garbage

    store = open_store(db)
    unowned = garbage.find_garbage(store, runs_folder(runs, db), place or [])
    if not as_json:
        echo_text("\n".join(sanitize_all(unowned).lines()))
    if unowned.things and not dry_run:
        confirm(yes=yes, as_json=as_json, action="removed")
        unowned = garbage.remove_garbage(store, unowned)
        if not as_json:
            echo_text("\n".join(sanitize_all(unowned).problems or ["removed"]))
    if as_json:
        print_json(unowned.as_json())
    if unowned.problems:
        raise typer.Exit(1)
