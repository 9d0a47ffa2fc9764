"""Registry of corpora by name. A new corpus is one file and one line here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...model.registry import Registry

if TYPE_CHECKING:
    from .corpus_kind import CorpusKind

CORPORA: Registry[type[CorpusKind]] = Registry("corpus", __name__.rpartition(".")[0], {
    "stdlib": "builtin.local:StandardLibrary",
    "files": "builtin.local:OwnFiles",
    "shards": "builtin.local:OwnShards",
    "fineweb-edu": "builtin.hub:FineWebEdu",
    "fineweb-edu-shards": "builtin.hub:FineWebEduShards",
    "finepdfs": "builtin.hub:FinePDFs",
    "hub": "builtin.hub:AnyDataset",
    "wikitext-103": "builtin.hub:WikiText103",
    "flipflop": "builtin.flipflop:FlipFlopCorpus",
    "mqar": "builtin.mqar:MqarCorpus",
    "mad": "builtin.mad:MadCorpus",
})  # fmt: skip

register_corpus = CORPORA.register


def all_kinds() -> dict[str, type[CorpusKind]]:
    """Return every registered corpus kind by its name, which imports their modules."""
    return {name: CORPORA.load(name) for name in CORPORA}
