"""WikiText-103."""

from __future__ import annotations

from typing import ClassVar

from ..corpus_kind import HubCorpus
from ..sources import HubSpec


class WikiText103(HubCorpus):
    """Articles, in the splits that it has."""

    spec = HubSpec(
        "Salesforce/wikitext",
        "wikitext-103-raw-v1",
        (("train", "train"), ("validation", "validation"), ("test", "heldout")),
        118_000_000,
        articles=True,
    )
    description = f"Wikipedia articles, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2"}
