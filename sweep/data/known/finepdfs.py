"""FinePDFs."""

from __future__ import annotations

from typing import ClassVar

from ..corpus_kind import HubCorpus
from ..sources import HubSpec


class FinePDFs(HubCorpus):
    """A sample of 100M tokens."""

    spec = HubSpec("codelion/finepdfs-100M", None, (("train", None),), 10**8)
    description = f"long coherent documents, from the hub ({spec.repository})"
    preset: ClassVar = {"tokenizer": "gpt2"}
