"""Registry of corpora by name. A new corpus is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.registry import Registry

if TYPE_CHECKING:
    from .corpus_kind import CorpusKind

CORPORA: Registry[type[CorpusKind]] = Registry("corpus", __name__.rpartition(".")[0], {
    "stdlib": "known.local:StandardLibrary",
    "files": "known.local:OwnFiles",
    "shards": "known.local:OwnShards",
    "fineweb-edu": "known.hub:FineWebEdu",
    "fineweb-edu-shards": "known.hub:FineWebEduShards",
    "finepdfs": "known.hub:FinePDFs",
    "wikitext-103": "known.hub:WikiText103",
    "flipflop": "known.flipflop:FlipFlopCorpus",
    "mqar": "known.mqar:MqarCorpus",
})  # fmt: skip

register_corpus = CORPORA.register


def all_kinds() -> dict[str, type[CorpusKind]]:
    """Return every registered corpus kind by its name, which imports their modules."""
    return {name: CORPORA.load(name) for name in CORPORA}
