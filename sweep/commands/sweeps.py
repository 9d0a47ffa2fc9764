"""Commands that list, rename, tag and annotate sweeps."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ...results.console import completion
from ...results.console.command_line import AsJson, Db, Documented, print_result
from ...results.console.text import sanitize_all


def sweeps(db: Db = None, as_json: AsJson = False) -> None:
    """List all sweeps: how far each is, who runs it now, where it comes from, its tags and its note.

    failed counts cells that diverged, too; open is all that is neither done nor failed.

    \b
    Example:
      atma-sweep sweeps
    """
    from ...results.builtin_sweeps import nothing_launched
    from ...results.console.terminal_table import terminal_width
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
    """Give a sweep another name. Cells, numbers and files stay as they are; not while somebody runs it.

    The grid file still says the old name: launch it with --name NEW to go on with this sweep.

    \b
    Example:
      atma-sweep rename quick first-try
      atma-sweep rename first-try quick

    Args:
        new (NEW): What it is called from now on.
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
    """Put tags on a sweep, which `sweeps` and `status` show, or take them off.

    \b
    Example:
      atma-sweep tag quick paper baseline
      atma-sweep tag quick baseline --remove

    Args:
        tags (TAG...): Letters, digits, '.', '_' and '-'.
        remove: Take these tags off instead.
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
        what (SWEEP|CELL): A sweep by its name, else a cell {BY_NAME}.
        text (TEXT): The note; empty takes it away, none shows the one there is.
    """
    from ...results.maintenance import names_tags_notes
    from ...results.store.store import open_store

    kind, name, now = names_tags_notes.note(open_store(db), what, text)
    print_result(
        {kind: name, "note": now}, [f"{kind} {name}: {sanitize_all(now) if now else 'no note'}"], as_json=as_json
    )
