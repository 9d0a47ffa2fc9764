"""Sweeps of our own that come along, as bundles without items beside this file: every reading command knows them.

They are what docs/replication.md is made of. A sweep of the same name in a database goes before. `import` takes a bundle into one.

Start at builtin_sweeps.py beside this folder, which opens them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..names import SHIPPED
from ..store.store import Store, scratch_store


def bundle_path(sweep: str) -> Path:
    """The file of one of `names.SHIPPED`."""
    return Path(__file__).with_name(f"{sweep}.zip")


def is_shipped(sweep: str | None) -> bool:
    """Whether it is the name of one of these sweeps."""
    return sweep in SHIPPED


@cache
def shared(sweep: str) -> Store:
    """A temporary database of this process with one of these sweeps alone; its file is removed at the end."""
    from ..exchange.importing import import_bundle  # only here, so that other commands start without it

    return scratch_store("shipped", lambda store: import_bundle(store, bundle_path(sweep)))
