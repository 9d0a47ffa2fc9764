"""The database: schema, store, recorder and migrations; bundles, tables and frames for other places and programs.

from atma_sweep.results import open_store

losses = open_store("atma.db").frames("quick").measurements().query("metric == 'val_loss'")

Imports nothing of sweep, model or reports, and neither torch nor Ray. Start at store/store.py; errors.py, metrics.py and
failure_classes.py say what a number, an end and a mistake may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .store.store import Store, open_store

__all__ = ["Store", "open_store"]


def __getattr__(name: str) -> Any:
    # only now, so that a command that needs no database does not wait for SQLAlchemy
    if name in __all__:
        from .store import database_connection, store

        database_connection.explain = _damage_of
        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _damage_of(engines: Any) -> Any:
    """Return the error that names a damaged value of these databases; None where they hold none."""
    from .maintenance.values import damage_of

    return damage_of(engines)


def runs_folder(runs: Path | None, db: str | None, *, write: bool = False) -> Path:
    """The folder for artifacts; with `write` only one that can be made and written to, else StoreError or WriteRefused."""
    from .console.output_files import check_folder_writable
    from .store.store import default_runs

    where = (runs or default_runs(db)).absolute()
    if write:
        check_folder_writable(where, "--runs")
    return where
