"""Sweeps that come with the program, as bundles (without items) next to this file; every reading command can show them.

docs/experiments/replication.md is based on them. A sweep of the same name in a database has precedence. `import` copies a bundle
into a database.

Start at builtin_sweeps.py in the parent folder, which opens them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..names import SHIPPED
from ..store.store import Store, temporary_store


def bundle_path(sweep: str) -> Path:
    """Return the bundle file of a shipped sweep; the name is not checked."""
    return Path(__file__).with_name(f"{sweep}.zip")


def is_shipped(sweep: str | None) -> bool:
    """Return True if it is the name of a shipped sweep."""
    return sweep in SHIPPED


@cache
def shipped_store(sweep: str) -> Store:
    """Return a cached temporary store that holds only this shipped sweep; its file is deleted when the process ends.

    The first call imports the bundle, which takes a moment. Raises BundleError for a sweep that is not shipped.
    """
    from ..exchange.importing import import_bundle  # only here, so that other commands start without it

    return temporary_store("shipped", lambda store: import_bundle(store, bundle_path(sweep)))
