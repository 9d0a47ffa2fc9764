"""Associative recall corpus: rows against a slow drawing of the same numbers, and properties of each row."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
from atma_sweep.sweep.data.builtin.mqar import BLANK, KEYS, VALUES, MqarConfig, MqarCorpus, MqarRows, mark_answers
from atma_sweep.sweep.data.tokenizer import TokenizerError, load_tokenizer
from pydantic import ValidationError

SMALL = MqarConfig(length=34, pairs=4, keys=9, values=5, train_rows=50, validation_rows=7)


def rows(settings: MqarConfig = SMALL, count: int = 50, split: str = "train") -> MqarRows:
    return MqarRows(count, settings, split=split)


def by_hand(number: int, settings: MqarConfig, split: str) -> list[int]:
    """Return a row, draw by draw, from a separate generator that jumps to the start of the row."""
    key = int.from_bytes(hashlib.sha256(f"mqar/{settings.seed}/{split}".encode()).digest()[:16], "big")
    slots = settings.length // 2 - 1 - settings.pairs
    draws = settings.keys + settings.pairs + slots
    raw = np.random.Philox(key=key).advance(number * ((draws + 3) // 4)).random_raw(draws).tolist()  # type: ignore[union-attr]
    of_keys, of_values, of_slots = raw[: settings.keys], raw[settings.keys :][: settings.pairs], raw[-slots:]
    tokens = [KEYS + sorted(range(settings.keys), key=of_keys.__getitem__)[pair] for pair in range(settings.pairs)]
    values = [VALUES + int((drawn >> 11) / 2**53 * settings.values) for drawn in of_values]
    waits = [-math.log1p(-(drawn >> 11) / 2**53) * (n + 1) ** (1 - settings.gap) for n, drawn in enumerate(of_slots)]
    questions = sorted(range(slots), key=waits.__getitem__)[: settings.pairs]
    row = [BLANK, *(token for pair in zip(tokens, values, strict=True) for token in pair)]
    for slot in range(slots):
        pair = questions.index(slot) if slot in questions else None
        row += [BLANK, BLANK] if pair is None else [tokens[pair], values[pair]]
    return [*row, BLANK]


@pytest.mark.parametrize("settings", [SMALL, MqarConfig(length=18, pairs=4, keys=4, values=2, gap=1.0, seed=3)])
def test_mqar_rows_match_slow_drawing(settings: MqarConfig) -> None:
    numbers = np.array([0, 1, 2, 77, 78, 5, 10**9])
    actual = rows(settings, 10**9 + 1).made(numbers)
    assert actual.tolist() == [by_hand(int(number), settings, "train") for number in numbers]


def test_mqar_asks_each_key_once_with_its_value() -> None:
    for row, marks in zip(tokens := rows(count=500).made(np.arange(500)), mark_answers(tokens, 4), strict=True):
        pairs = dict(zip(row[1:9:2].tolist(), row[2:9:2].tolist(), strict=True))
        assert len(pairs) == 4
        positions = [position for position in range(9, 34) if KEYS <= row[position] < VALUES]
        assert sorted(row[positions].tolist()) == sorted(pairs)
        assert [row[position + 1] for position in positions] == [pairs[row[position]] for position in positions]
        assert np.flatnonzero(marks).tolist() == [position + 1 for position in positions]


def test_mqar_question_slots_follow_weights() -> None:
    """Slots of the first pair's question: the n-th has a share of n^(a - 1)."""
    settings = MqarConfig(length=34, pairs=1, keys=9, values=5, gap=0.3)
    tokens = rows(settings, 20_000).made(np.arange(20_000))
    slots = (np.argmax(mark_answers(tokens, 1), 1) - 4) // 2
    weight = np.arange(1, 16) ** (0.3 - 1.0)
    share = weight / weight.sum()
    count = np.bincount(slots, minlength=15) / 20_000
    assert (np.abs(count - share) <= 3.5 * np.sqrt(share * (1 - share) / 20_000)).all()


def test_mqar_entropies_match_rows() -> None:
    streams = MqarCorpus.streams(SMALL.model_copy(update={"train_rows": 40_000}))
    tokens = rows(count=40_000)[:].astype(np.int64)

    def entropy(counts: Counter[int]) -> float:
        total = sum(counts.values())
        return -sum(n / total * math.log(n / total) for n in counts.values())

    alone = entropy(Counter(tokens.tolist()))
    both = entropy(Counter((tokens[:-1] * 2048 + tokens[1:]).tolist()))
    assert streams.unigram_entropy == pytest.approx(alone, abs=2e-3)
    assert streams.bigram_entropy == pytest.approx(both - alone, abs=5e-3)
    assert streams.marked_share == pytest.approx(float(mark_answers(tokens[:-1].reshape(-1, 34), 4).mean()))


def test_mqar_tokenizer_round_trip() -> None:
    tokenizer = load_tokenizer("mqar")
    row = rows().made(np.array([3]))[0]
    text = b"".join(tokenizer.token_bytes(int(token)) or b"_ " for token in row).decode()
    assert tokenizer.encode(text).tolist() == row.tolist()
    for wrong in ("k512", "v511", "x1", "k", "k-1"):
        with pytest.raises(TokenizerError, match=f"got '{wrong}'"):
            tokenizer.encode(f"k0 {wrong}")


@pytest.mark.parametrize(("settings", "message"), [
    ({"length": 16, "pairs": 4}, "4 pairs and as many questions take 18 tokens"),
    ({"pairs": 8, "keys": 7}, "8 pairs of a row need as many keys, got 7"),
    ({"keys": 513}, "less than or equal to 512"),
])  # fmt: skip
def test_mqar_rejects_settings_that_do_not_fit(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MqarConfig(**settings)  # type: ignore[arg-type]
