"""Sweeps that every reading command knows, whatever the database holds: published numbers, and sweeps of ours that come along."""

from __future__ import annotations

from pathlib import Path

from . import paper, shipped
from .store.store import Store, StoreMissing, SweepUnknown, open_store
from .store.transactions import PATIENCE_S


def with_known(store: Store, sweep: str) -> Store:
    """The store itself when it holds the sweep, else, for one that is known, a temporary one that the whole process shares.

    Raises SweepUnknown, and StoreError when a sweep of one's own has a published name, from a time when it could.
    """
    try:
        return paper.with_published(store, sweep)
    except SweepUnknown:
        if not shipped.comes_along(sweep):
            raise
        return shipped.shared(sweep)


def open_known(
    db: str | Path | None, sweep: str | None, *, patience: float = PATIENCE_S, read_only: bool = False
) -> Store:
    """The database; when a known sweep is asked for that it lacks, or there is no database, a temporary one with that.

    Opened, and raises, as open_store does.
    """
    if sweep is None or not shipped.comes_along(sweep):
        return paper.open_with_published(db, sweep, patience=patience, read_only=read_only)
    try:
        return with_known(open_store(db, patience=patience, read_only=read_only), sweep)
    except StoreMissing:
        return shipped.shared(sweep)
