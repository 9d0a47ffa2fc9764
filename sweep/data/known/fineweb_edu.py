"""FineWeb-Edu."""

from __future__ import annotations

from typing import ClassVar

from ..corpus_kind import HubCorpus
from ..sources import HubSpec


class FineWebEdu(HubCorpus):
    """Its sample of 10B tokens."""

    spec = HubSpec("HuggingFaceFW/fineweb-edu", "sample-10BT", (("train", None),), 10**10)
    description = f"web text filtered for education, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2", "train_tokens": 10**9, "heldout": "finepdfs"}
