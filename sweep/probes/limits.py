"""The longest context length that a probe can measure, from the text alone: known before anything is loaded or written."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import PROBES

if TYPE_CHECKING:
    from ..config import EvalConfig
    from ..data.corpora import Corpus


def longest(probe: str, config: EvalConfig, corpus: Corpus) -> int | None:
    """The longest length of a probe, in tokens; 0 where the text gives it none, None where no limit is known."""
    named = PROBES[probe].longest
    if not named:
        return None
    found: int = getattr(importlib.import_module(__name__), named)(config, corpus)
    return max(0, found)


def documents(config: EvalConfig, corpus: Corpus) -> int:
    """Of a probe that reads the first L tokens of each of `eval.documents` held-out documents."""
    chosen = corpus.heldout[: config.documents]
    return min(map(len, chosen)) if len(chosen) == config.documents else 0


def targets(config: EvalConfig, corpus: Corpus) -> int:
    """Of one that also needs the token after them."""
    return documents(config, corpus) - 1


def rows(config: EvalConfig, corpus: Corpus) -> int:
    """Of one that reads `eval.junk_rows` rows of L tokens, and the token after the last, of the validation split."""
    return (len(corpus.validation) - 1) // config.junk_rows
