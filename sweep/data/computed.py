"""Corpora whose rows are computed when they are read: their prepared folder holds little more than a manifest."""

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
"""Version of the manifest, which enters the fingerprint."""
KEY = "computed"
"""Key of a manifest that marks a computed corpus, with its name, settings and splits."""
HASHED_ROWS = 64
"""Rows at the start of each split whose tokens enter the fingerprint, which thus covers more than the settings."""
UNSUPPORTED_FIELDS = ("path", "train_tokens", "heldout", "tokenizer_file", "end_of_text")
"""Fields of the data section that a computed corpus rejects."""


def request(data: DataConfig, kind: type[CorpusKind]) -> dict[str, Any]:
    """Return the JSON-serialisable facts that determine the rows of a computed corpus.

    Its keys are layout, corpus, path and heldout (both None), tokenizer, settings (all fields, defaults filled in) and,
    for a corpus of a plugin, plugin.

    Args:
        data: Data section of the config. `tokenizer` may be "bytes", the default, which is then ignored.
        kind: Class of the corpus that `data.corpus` names.

    Raises:
        CorpusError: `data` sets path, train_tokens, heldout, tokenizer_file or end_of_text, or another tokenizer.
        ValidationError: The settings of the corpus are invalid (pydantic).
    """
    for name in UNSUPPORTED_FIELDS:
        if getattr(data, name) is not None:
            raise CorpusError(
                f"data.{name}: corpus {data.corpus} is generated from data.settings.{data.corpus}; remove data.{name}"
            )
    if data.tokenizer not in ("bytes", kind.tokenizer):  # an explicit "bytes" cannot be told from the default
        raise CorpusError(f"data.tokenizer: corpus {data.corpus} has its own tokenizer; remove data.tokenizer")
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
    """Return the manifest of a computed corpus, without request, prepared_at, fingerprint and its own hash.

    Its keys are layout, tokenizer, tokenizer_file, shards, heldout_names, heldout_ends (these three empty),
    unigram_entropy, bigram_entropy (nats per token), documents and "computed" (`KEY`). `documents` is the number of
    rows of both splits. `KEY` holds corpus, settings and splits. Saves the tokenizer's file into `folder`, if it has
    one.

    Args:
        corpus_request: Result of `request`.
        folder: Folder of the prepared corpus; must exist.

    Raises:
        KeyError: The corpus is not registered.
    """
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
    """Return by split its number of tokens ("tokens") and the hash of its first rows ("first_rows").

    The splits are train and validation and, for a corpus with marks, train_marks and validation_marks.
    """
    rows = {"train": streams.train, "validation": streams.validation}
    if streams.train_marks is not None and streams.validation_marks is not None:
        rows |= {"train_marks": streams.train_marks, "validation_marks": streams.validation_marks}
    return {
        split: {"tokens": len(split_rows), "first_rows": _hash_first_rows(split_rows)}
        for split, split_rows in rows.items()
    }


def _hash_first_rows(rows: Rows) -> str:
    """Return the SHA-256 in hex of the first 64 rows (HASHED_ROWS) as little-endian uint16; fewer if there are fewer."""
    tokens = rows[: HASHED_ROWS * rows.length]
    return hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()


def open_streams(manifest: dict[str, Any]) -> Streams:
    """Return the splits of the computed corpus that a manifest describes, without comparing them with its hashes.

    Raises:
        CorpusError: No corpus of that name is registered, because its plugin is not loaded.
        ValidationError: The class of the corpus no longer accepts the settings (pydantic).
        KeyError: The manifest is not one of a computed corpus.
    """
    section = manifest[KEY]
    if section["corpus"] not in CORPORA:
        raise CorpusError(
            f"corpus {section['corpus']!r} is generated by a plugin that is not loaded; name it in the grid's plugins, or pass it to data commands with --plugin"
        )
    kind = CORPORA.load(section["corpus"])
    return kind.streams(kind.Config.model_validate(section["settings"]))


def differences(manifest: dict[str, Any], folder: Path) -> list[str]:
    """Return one line per recorded split that has changed; an empty list if none has.

    A split has changed if its number of tokens or its first rows differ from the manifest, or if the corpus no longer
    has it. New splits are ignored. A corpus that is not registered gives a single line with the reason.

    Args:
        manifest: Manifest of a computed corpus.
        folder: Folder of the prepared corpus, for the lines alone; no file is read.
    """
    try:
        current = _describe_splits(open_streams(manifest))
    except CorpusError as error:
        return [str(error)]
    recorded = manifest[KEY]["splits"]
    return [
        f"{folder}: the rows of {name} differ from those recorded when it was prepared"
        for name in recorded
        if recorded[name] != current.get(name)
    ]


def split_tokens(manifest: dict[str, Any]) -> dict[str, int]:
    """Return tokens by split ("train", "validation", "heldout") of a computed corpus; empty for a corpus of shards.

    "heldout" is always 0. Splits of marks are left out.
    """
    splits = manifest.get(KEY, {}).get("splits", {})
    return {name: splits[name]["tokens"] for name in ("train", "validation") if splits} | (
        {"heldout": 0} if splits else {}
    )
