"""Writer of results for the ranks after the first, which record nothing."""

from __future__ import annotations

from ...results.store.recorder import AttemptWriter


class NullWriter(AttemptWriter):
    """AttemptWriter that discards everything, since rank 0 records what all ranks computed together."""
