"""Text and tokens. A corpus of your own needs its base class, its texts or rows, and `register_corpus` from here."""

from importlib import import_module

from .registry import register_corpus

__all__ = ["CorpusConfig", "CorpusKind", "Rows", "Streams", "Text", "register_corpus"]

_LAZY = {
    "CorpusConfig": "corpus_kind",
    "CorpusKind": "corpus_kind",
    "Rows": "computed_rows",
    "Streams": "computed_rows",
    "Text": "sources",
}


def __getattr__(name: str) -> object:
    # Lazy, so that a command that reads no text imports nothing of it.
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
