"""The paper's numbers (arXiv:2606.25156, versions 1 and 2) as CSV beside this file, and as read-only sweeps.

`printed-v1` holds 100 cells, `printed-v2` 120; each of the 100 is one of the 120, so both have what its log says: `clean`,
`junk` and `needle` (accuracy and nats) at six lengths, `needle.absent_nats`, `throughput.train_seconds`, `.mfu_paper`, the
release of torch, and the training curve with the validation loss every 125 steps (17 points; of the training loss the logs
keep nothing). `val` is what the complete table prints, three decimals; the last point of a curve has the rest of them.
Curves and nats are shipped with the digits that tell them apart in single precision, in which they were measured.

A number as Table N prints it stands under the probe `table-N` with the metric `PROBE.METRIC` and the length it is about; N
follows the first version: 4 is training throughput (6 in the second version), 6 the complete results (8).
`printed-v2-open-weight` holds the rows of the second version's tables of training budgets and of open-weight models.

`printed-tra`, `printed-wall` and `printed-atlas` hold what rivals print, threshold relative attention (arXiv:2503.23174), Wall
attention (its authors' blog) and the ATLAS memory (a blog): rivals.py, and docs/recipes.md for the sources.

Losses are nats per token (the open-weight table: bits per token), accuracies and MFU fractions, times seconds.

Imports results/store; reports and results/exchange import it. Start at published_sweeps.py.
"""

from __future__ import annotations

from functools import cache, partial

from ..names import PUBLISHED
from ..store.records import AXES
from ..store.store import Store, scratch_store
from .base import rows
from .loading import OWNER, holds, load_published
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
    """A temporary database with the published sweeps; its file is removed when the store is no longer used."""
    return scratch_store("published", partial(load_published, alone=True))


def with_published(store: Store, sweep: str) -> Store:
    """The store itself when it holds the sweep, else, for a published one, a temporary one that the whole process shares.

    So, too, when it holds a published sweep as an older release had it. Raises SweepUnknown, and StoreError when a sweep of
    one's own has a published name, from a time when it could.
    """
    if is_published(sweep):
        return store if holds(store, sweep) else shared_published(sweep)
    store.revision(sweep)  # raises SweepUnknown
    return store


def is_published(sweep: str | None) -> bool:
    """Whether it is the name of one of this module's sweeps."""
    return sweep in PUBLISHED


@cache
def _scratch() -> Store:
    return scratch_store("published", lambda store: None)


def shared_published(sweep: str) -> Store:
    """The temporary database of this process, in which a sweep is put when it is first asked for."""
    load_published(_scratch(), [sweep], alone=True)
    return _scratch()
