"""The paper's numbers (arXiv:2606.25156, versions 1 and 2) as CSV files in this folder, and as read-only sweeps.

`printed-v1` holds 100 cells, `printed-v2` 120, which include the 100. Both have the numbers of the training logs:
`clean`, `junk` and `needle` (accuracy and nats) at six lengths, `needle.absent_nats`, `throughput.train_seconds`,
`.mfu_paper`, the release of torch, and the training curve with the validation loss every 125 steps (17 points). The
logs do not contain the training loss. `val` is the value of the complete table, with three decimals; the last point of
a curve has more. Curves and nats have the digits that distinguish them in single precision, in which they were
measured.

A number as printed in Table N has the probe `table-N`, the metric `PROBE.METRIC` and its length. N follows the first
version: 4 is training throughput (6 in the second version), 6 the complete results (8). `printed-v2-open-weight` holds
the rows of the second version's tables of training budgets and of open-weight models.

`printed-tra`, `printed-wall` and `printed-atlas` hold the numbers of rival papers: threshold relative attention
(arXiv:2503.23174), Wall attention (its authors' blog) and the ATLAS memory (a blog). See rivals.py, and docs/explanation/recipes.md
for the sources.

Losses are nats per token (the open-weight table: bits per token), accuracies and MFU fractions, times seconds.

This package imports results/store; reports and results/exchange import it. Start at published_sweeps.py.
"""

from __future__ import annotations

from functools import cache, partial

from ..names import PUBLISHED
from ..store.records import AXES
from ..store.store import Store, temporary_store
from .base import rows
from .loading import OWNER, holds_published, load_published
from .published_sweeps import (
    ATLAS,
    DIGITS,
    LENGTHS,
    MOST_FREQUENT,
    OPEN_WEIGHT,
    PARAMETERS,
    SWEEPS,
    TRA,
    VERSIONS,
    WALL,
    is_published_cell,
)
from .rivals import SETS

__all__ = [
    "ATLAS", "AXES", "DIGITS", "LENGTHS", "MOST_FREQUENT", "OPEN_WEIGHT", "OWNER", "PARAMETERS", "SETS", "SWEEPS",
    "TRA", "VERSIONS", "WALL", "is_published", "is_published_cell", "load_published", "open_published", "rows",
    "shared_published", "with_published",
]  # fmt: skip


def open_published() -> Store:
    """Return a temporary database with all published sweeps; its file is deleted when the store is no longer used.

    Each call makes a new one. The ids of attempts are fixed.
    """
    return temporary_store("published", partial(load_published, alone=True))


def with_published(store: Store, sweep: str) -> Store:
    """Return the store if it holds the sweep, else, for a published sweep, a temporary store shared by the process.

    The temporary store is also used if the store holds a published sweep as an older release had it.

    Raises:
        SweepUnknown: the sweep is neither in the store nor published.
        StoreError: a sweep of the user has the name of a published one (possible in old databases).
    """
    if is_published(sweep):
        return store if holds_published(store, sweep) else shared_published(sweep)
    store.revision(sweep)  # raises SweepUnknown
    return store


def is_published(sweep: str | None) -> bool:
    """Return True if it is the name of a published sweep."""
    return sweep in PUBLISHED


@cache
def _temporary_published() -> Store:
    return temporary_store("published", lambda store: None)


def shared_published(sweep: str) -> Store:
    """Return the process's shared temporary database, with this published sweep loaded into it at the first request.

    It also holds the published sweeps that were requested before. An unknown name loads nothing and raises no error.
    """
    load_published(_temporary_published(), [sweep], alone=True)
    return _temporary_published()
