"""The Python standard library."""

from __future__ import annotations

from ...config import DataConfig
from ..corpus_kind import CorpusKind
from ..sources import Source, Stdlib


class StandardLibrary(CorpusKind):
    """Sources and help topics of the Python that runs."""

    description = "the Python standard library's sources and help topics, always there"
    at_hand = True
    by_tokens = False

    @classmethod
    def source(cls, data: DataConfig) -> Source:
        """Each file and topic a document."""
        return Stdlib()

    @classmethod
    def lent(cls) -> Source:
        """The same."""
        return Stdlib()
