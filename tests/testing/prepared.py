"""Corpora prepared on the spot from small texts, and the same splits and fingerprints derived another way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from atma_sweep.sweep.config import DataConfig
from atma_sweep.sweep.data import prepare
from atma_sweep.sweep.data.corpora import Corpus, open_corpus
from atma_sweep.sweep.errors import SweepError
from tokenizers import models, pre_tokenizers

EOT = 256


def word_level(*vocabulary: str, end: str = "<eos>") -> tokenizers.Tokenizer:
    """Words between spaces, numbered in the order given after `[UNK]` and the end."""
    numbers = {word: number for number, word in enumerate(["[UNK]", end, *vocabulary])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([end])
    return tokenizer


def put(folder: Path, texts: Sequence[str], name: str = "{}.txt") -> Path:
    """Write one numbered file per text."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / name.format(number)).write_text(text)
    return folder


def files(path: Path, **settings: Any) -> DataConfig:
    """The config that asks for text under `path`, as bytes unless told otherwise."""
    return DataConfig(corpus="files", path=str(path), **settings)


def prepare_corpus(data: DataConfig, root: Path, **more: Any) -> Corpus:
    """Prepared and opened."""
    return open_corpus(root, prepare.prepare(data, root, **more))


def preparation_error(data: DataConfig, root: Path, **more: Any) -> str:
    """The one line that a preparation ends with, nothing prepared."""
    with pytest.raises(SweepError) as caught:
        prepare.prepare(data, root, **more)
    assert len(str(caught.value).splitlines()) == 1
    assert not list(root.glob("*/manifest.json"))
    return str(caught.value)


def document(text: str) -> list[int]:
    """A text as byte tokens, led by the end of the one before."""
    return [EOT, *text.encode()]


def joined(documents: Sequence[Sequence[int]]) -> list[int]:
    """Concatenate documents to one stream of tokens."""
    return [token for document in documents for token in document]


def stream(corpus: Corpus) -> list[int]:
    """Return all training tokens of a corpus, in order."""
    return joined([shard.tolist() for shard in corpus.train])


def parts(tokens: Sequence[int]) -> list[list[int]]:
    """The documents of a stream of bytes."""
    array = np.array(tokens)
    return [part.tolist() for part in np.split(array, np.flatnonzero(array == EOT))[1:]]


def number_of(name: str) -> float:
    """The number in [0, 1) by which a document's name draws its split."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16


def naive(named: dict[str, str], *, long: int, most: int = 64, train: int | None = None) -> dict[str, Any]:
    """The three splits as lists of documents, one text at a time, without batches, shards or files."""
    divided = _naive(named, long, most, train, tenth=False)
    return divided if divided["validation"] else _naive(named, long, most, train, tenth=True)


def _naive(named: dict[str, str], long: int, most: int, train: int | None, *, tenth: bool) -> dict[str, Any]:
    divided: dict[str, Any] = {"train": [], "validation": [], "heldout": {}}
    rest = 0
    for name, text in named.items():
        tokens, drawn = document(text), number_of(name)
        if drawn < 0.25 and len(tokens) >= long and len(divided["heldout"]) < most:
            divided["heldout"][name] = tokens
            continue
        rest += 1
        if (rest % 10 == 1) if tenth else (drawn < 0.05):
            divided["validation"].append(tokens)
            continue
        remaining = len(tokens) if train is None else train - len(joined(divided["train"]))
        divided["train"].append(tokens[:remaining])
        if train is not None and remaining <= len(tokens):
            break
    order = sorted(divided["heldout"], key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    divided["heldout"] = {name: divided["heldout"][name] for name in order}
    return divided


def rederived(corpus: Corpus) -> str:
    """The fingerprint, from the tokens: SHA-256 over JSON with the hashes of the splits, several shards as a list."""

    def digest(shards: Sequence[Sequence[int]], width: np.dtype[Any]) -> Any:
        hashes = [hashlib.sha256(np.array(shard, dtype=width).tobytes()).hexdigest() for shard in shards]
        return hashes if len(hashes) > 1 else hashes[0]

    documents = {
        "heldout": digest([joined([tokens.tolist() for tokens in corpus.heldout])], corpus.validation.dtype),
        "heldout_ends": [sum(map(len, corpus.heldout[: n + 1])) for n in range(len(corpus.heldout))],
        "heldout_names": corpus.heldout_names,
        "layout": 1,
        "tokenizer": corpus.tokenizer,
        "train": digest([shard.tolist() for shard in corpus.train], corpus.train[0].dtype),
        "validation": digest([corpus.validation.tolist()], corpus.validation.dtype),
    }
    if corpus.train_marks is not None and corpus.validation_marks is not None:
        documents["train_marks"] = digest([shard.tolist() for shard in corpus.train_marks], np.dtype(np.uint16))
        documents["validation_marks"] = digest([corpus.validation_marks.tolist()], np.dtype(np.uint16))
    return hashlib.sha256(json.dumps(dict(sorted(documents.items()))).encode()).hexdigest()


def divided(
    named: dict[str, str],
    *,
    long: int,
    train: int | None = None,
    validation: int | None = None,
    documents: int | None = None,
) -> dict[str, Any]:
    """The three splits of text that is divided by tokens, as lists of documents, each rule written out over whole lists."""
    order: list[str] = []
    for name in named:
        order.append(name)
        sizes = {name: len(document(named[name])) for name in order}
        total = sum(sizes.values())
        target = validation or max(1, min(2_097_153, total // 20))
        longest = sorted((size for size in sizes.values() if size >= long), reverse=True)
        held = sum(longest[: 16 if documents is None else documents])
        if documents is None:
            held = min(held, total / 4)
        if train is not None and total - held - target - max(sizes.values()) >= train:
            break
    queue = sorted(order, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    heldout: list[str] = []
    for name in queue:
        fits = documents is not None or sizes[name] + sum(sizes[member] for member in heldout) <= total / 4
        if sizes[name] >= long and fits and len(heldout) < min(16 if documents is None else documents, len(order) - 2):
            heldout.append(name)
    queue = [name for name in queue if name not in heldout]
    validated: list[str] = []
    for name in queue:
        if sum(sizes[member] for member in validated) + sizes[name] <= target and len(queue) - len(validated) > 1:
            validated.append(name)
    rest = [name for name in queue if name not in validated]
    if sum(sizes[name] for name in validated) < target and len(rest) > 1:
        validated.append(min(rest, key=lambda name: sizes[name]))
    tokens = joined([document(named[name]) for name in order if name not in heldout and name not in validated])
    return {
        "train": tokens[:train],
        "validation": joined([document(named[name]) for name in order if name in validated]),
        "heldout": {name: document(named[name]) for name in heldout},
    }
