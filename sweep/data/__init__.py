"""Corpora, tokenizers and batches of tokens.

May import sweep.config, sweep.host, model and results; probes, planning, attempts and commands import it. Start reading
in corpora.py (a prepared corpus), then prepare.py. Plugins that add a corpus need only the names that this package
exports.
"""

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
    """Import an exported name from its module on first use.

    Raises:
        AttributeError: The package exports no such name.
    """
    # lazy, so that commands that read no text do not import these modules
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
