"""Corpora whose rows are worked out as they are read: what a folder of prepared corpora says of one, a manifest alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from ..config import DataConfig
from . import tokenizer as tokenizers
from .computed_rows import Rows, Streams
from .corpus_kind import CorpusKind
from .registry import CORPORA
from .sources import CorpusError

LAYOUT = 1
"""Enters the fingerprint, as that of other corpora does."""
KEY = "computed"
"""The part of a manifest that says so."""
HASHED_ROWS = 64
"""Rows at the beginning of each split whose tokens enter the fingerprint, so that it follows what is read and not only settings."""
UNSUPPORTED_FIELDS = ("path", "train_tokens", "heldout", "tokenizer_file", "end_of_text")


def request(data: DataConfig, kind: type[CorpusKind]) -> dict[str, Any]:
    """What decides the rows, as JSON. Raises CorpusError for settings that they do not have."""
    for name in UNSUPPORTED_FIELDS:
        if getattr(data, name) is not None:
            raise CorpusError(
                f"data.{name}: corpus {data.corpus} is worked out as it is read, from data.settings.{data.corpus}; leave it out"
            )
    if data.tokenizer not in ("bytes", kind.tokenizer):  # the default cannot be told from what was said
        raise CorpusError(f"data.tokenizer: corpus {data.corpus} has tokens of its own; leave it out")
    settings = kind.Config.model_validate(data.settings.get(data.corpus, {})).model_dump(mode="json")
    plugin = {"plugin": data.corpus_source} if data.corpus_source is not None else {}
    unused = {"path": None, "heldout": None}
    return {
        "layout": LAYOUT,
        "corpus": data.corpus,
        **unused,
        "tokenizer": kind.tokenizer,
        "settings": settings,
        **plugin,
    }


def build_manifest(corpus_request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The manifest of what `request` asked for, as far as other corpora have the same."""
    kind = CORPORA.load(corpus_request["corpus"])
    streams = kind.streams(kind.Config.model_validate(corpus_request["settings"]))
    tokenizer = tokenizers.load_tokenizer(str(kind.tokenizer))
    return {
        "layout": LAYOUT,
        "tokenizer": tokenizer.name,
        "tokenizer_file": tokenizers.store_tokenizer(tokenizer, folder),
        "shards": {},
        "heldout_names": [],
        "heldout_ends": [],
        "unigram_entropy": streams.unigram_entropy,
        "bigram_entropy": streams.bigram_entropy,
        "documents": streams.train.rows + streams.validation.rows,
        KEY: {
            "corpus": corpus_request["corpus"],
            "settings": corpus_request["settings"],
            "splits": _describe_splits(streams),
        },
    }


def _describe_splits(streams: Streams) -> dict[str, Any]:
    """Tokens of each split, and the hash of its first rows."""
    rows = {"train": streams.train, "validation": streams.validation}
    if streams.train_marks is not None and streams.validation_marks is not None:
        rows |= {"train_marks": streams.train_marks, "validation_marks": streams.validation_marks}
    return {
        split: {"tokens": len(split_rows), "first_rows": _hash_first_rows(split_rows)}
        for split, split_rows in rows.items()
    }


def _hash_first_rows(rows: Rows) -> str:
    tokens = rows[: HASHED_ROWS * rows.length]
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def open_streams(manifest: dict[str, Any]) -> Streams:
    """The rows of which a manifest speaks. Raises CorpusError when this version has no such corpus."""
    section = manifest[KEY]
    if section["corpus"] not in CORPORA:
        raise CorpusError(
            f"corpus {section['corpus']!r} is worked out by a plugin, which is not loaded; name it with --plugin"
        )
    kind = CORPORA.load(section["corpus"])
    return kind.streams(kind.Config.model_validate(section["settings"]))


def differences(manifest: dict[str, Any], folder: Path) -> list[str]:
    """One line for each split whose first rows are not those of which the fingerprint was taken."""
    try:
        current = _describe_splits(open_streams(manifest))
    except CorpusError as error:
        return [str(error)]
    recorded = manifest[KEY]["splits"]
    return [
        f"{folder}: the rows of {name} are others than those of its preparation"
        for name in recorded
        if recorded[name] != current.get(name)
    ]


def split_tokens(manifest: dict[str, Any]) -> dict[str, int]:
    """Tokens by split, as a list of corpora shows them; nothing for a corpus of shards."""
    splits = manifest.get(KEY, {}).get("splits", {})
    return {name: splits[name]["tokens"] for name in ("train", "validation") if splits} | (
        {"heldout": 0} if splits else {}
    )
