"""The results database: schema, store, recorder and migrations; bundles, tables and frames for other programs.

    from atma_sweep.results import open_store

    losses = open_store("atma.db").frames("quick").measurements().query("metric == 'val_loss'")

This package imports neither sweep, model and reports nor torch and Ray. Start at store/store.py; metrics.py,
failure_classes.py and errors.py define the metrics, the failure classes and the errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from .store.store import Store, open_store

__all__ = ["Store", "open_store"]


def __getattr__(name: str) -> Any:
    """Import and return `Store` or `open_store` at its first use, since SQLAlchemy takes long to import.

    Also installs the hook that looks for damaged values after an unforeseen error of a read. Raises AttributeError for
    other names.
    """
    if name in __all__:
        from .store import database_connection, store

        database_connection.explain = _damage_of
        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _damage_of(engines: Any) -> Any:
    """Return the error that names a damaged value of these databases (engines); None if they hold none."""
    from .maintenance.values import damage_of

    return damage_of(engines)


def runs_folder(runs: Path | None, db: str | None, *, write: bool = False) -> Path:
    """Return the folder for artifacts as an absolute path: `runs`, or the default of the database.

    The folder is not created.

    Args:
        runs: folder; None for the default.
        db: database URL or file, which need not exist; None for the default one.
        write: raise StoreError or WriteRefused unless the folder can be created and written to.
    """
    from .console.output_files import check_folder_writable
    from .store.store import default_runs

    folder = (runs or default_runs(db)).absolute()
    if write:
        check_folder_writable(folder, "--runs")
    return folder
