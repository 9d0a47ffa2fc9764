"""Commands that list, rename, tag and annotate sweeps."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ...results.console import completion
from ...results.console.command_line import AsJson, Db, Documented, print_result
from ...results.console.text import sanitize_all


def sweeps(db: Db = None, as_json: AsJson = False) -> None:
    """List all sweeps with their progress, who runs them now, their origin, tags and note.

    The column failed includes cells that diverged; open counts cells that are neither done nor failed.

    \b
    Example:
      atma-sweep sweeps
    """
    from ...results.builtin_sweeps import nothing_launched
    from ...results.console.streams import terminal_width
    from ...results.errors import StoreMissing
    from ...results.maintenance.overview import Overview, list_sweeps
    from ...results.store.store import open_store
    from ..host.processes import is_holder_active

    try:
        summary = list_sweeps(open_store(db), is_holder_active)
    except StoreMissing as error:
        if db is not None:
            raise
        summary = Overview((), nothing_launched(error))
    print_result(summary.as_json(), sanitize_all(summary).lines(terminal_width(sys.stdout)), as_json=as_json)


SWEEP = typer.Argument(metavar="SWEEP", help="Name of the sweep.", autocompletion=completion.sweeps)


@Documented
def rename(sweep: Annotated[str, SWEEP], new: str, db: Db = None, as_json: AsJson = False) -> None:
    """Rename a sweep that is not running. Cells, numbers and files stay as they are.

    The grid file still has the old name: launch it with --name NEW to continue this sweep.

    \b
    Example:
      atma-sweep rename quick first-try
      atma-sweep rename first-try quick

    Args:
        new (NEW): New name of the sweep.
    """
    from ...results.maintenance import names_tags_notes
    from ...results.store.store import open_store
    from ..host.processes import is_holder_active
    from ..orchestrator.control import current_user

    grid = names_tags_notes.rename(open_store(db), sweep, new, is_active=is_holder_active, who=current_user())
    line = f"sweep {sweep} is now named {new}; to continue it: atma-sweep launch {grid} --name {new}"
    print_result({"sweep": new, "before": sweep, "grid_file": grid}, [line], as_json=as_json)


@Documented
def tag(
    sweep: Annotated[str, SWEEP], tags: list[str], remove: bool = False, db: Db = None, as_json: AsJson = False
) -> None:
    """Add tags to a sweep, which `sweeps` and `status` show, or remove them.

    \b
    Example:
      atma-sweep tag quick paper baseline
      atma-sweep tag quick baseline --remove

    Args:
        tags (TAG...): Tags of letters, digits, '.', '_' and '-'.
        remove: Remove these tags instead.
    """
    from ...results.maintenance import names_tags_notes
    from ...results.store.store import open_store

    now = names_tags_notes.tag(open_store(db), sweep, tags, remove=remove)
    print_result({"sweep": sweep, "tags": now}, [f"{sweep}: {', '.join(now) or 'no tag'}"], as_json=as_json)


@Documented
def note(
    what: Annotated[str, typer.Argument(autocompletion=completion.sweeps_and_cells)],
    text: Annotated[str | None, typer.Argument()] = None,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Write a note about a sweep or a cell, which `sweeps`, `status` and `show` show. It stays in this database.

    \b
    Example:
      atma-sweep note quick "first try; the text was too short"
      atma-sweep note polar-baseline-d0-m1-w0-s0 "look at its gates"

    Args:
        what (SWEEP|CELL): Sweep by name, else a cell {BY_NAME}.
        text (TEXT): Text of the note; an empty text removes the note, no text shows it.
    """
    from ...results.maintenance import names_tags_notes
    from ...results.store.store import open_store

    kind, name, now = names_tags_notes.note(open_store(db), what, text)
    print_result(
        {kind: name, "note": now}, [f"{kind} {name}: {sanitize_all(now) if now else 'no note'}"], as_json=as_json
    )
