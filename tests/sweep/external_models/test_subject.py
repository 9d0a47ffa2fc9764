"""Probes on a model with a tokenizer of its own: units, pairing by text, digits, and oracles with known scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, EvalConfig, TrainConfig
from atma_sweep.sweep.data.corpora import Corpus
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.errors import SweepError
from atma_sweep.sweep.external_models import hub_tokenizer as words_module
from atma_sweep.sweep.external_models.hub_tokenizer import HubTokenizer, passages, spread_over_tokens
from atma_sweep.sweep.external_models.subject import ChunkedScorer, NativeSubject, OpenWeightSubject, TextPairedSubject
from atma_sweep.sweep.external_models.tiny import save_tokenizer
from atma_sweep.sweep.probes.subject import run_probe
from optional_data import optional_data

pytestmark = pytest.mark.thorough
PIECES = "the model reads a long row of text and guesses — naïve as it is — what comes next: 中文, café".split()
V = 320


def story(count: int, seed: int) -> str:
    return " ".join(np.random.default_rng(seed).choice(PIECES, count))


class Fake:
    """Stand-in for a model of transformers: `predict` receives all tokens so far and returns logits for each."""

    def __init__(self, predict: Callable[[np.ndarray], np.ndarray]) -> None:
        self.predict = predict
        self.read: list[list[int]] = []

    def __call__(self, *, input_ids: Any, past_key_values: Any, use_cache: bool, logits_to_keep: int) -> Any:
        before = past_key_values or []
        row = [*before, *input_ids[0].tolist()]
        if not before:
            self.read.append([])
        self.read[-1] = row
        logits = torch.from_numpy(self.predict(np.array(row))[-logits_to_keep:])
        return SimpleNamespace(logits=logits[None].float(), past_key_values=row)


def uniform(row: np.ndarray) -> np.ndarray:
    return np.zeros((len(row), V))


@pytest.fixture(scope="module")
def hub_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    folder = tmp_path_factory.mktemp("words")
    save_tokenizer(folder)
    return HubTokenizer(folder)


def corpus_of(tokenizer: Any, *, documents: int = 4, count: int = 150) -> Corpus:
    def led(text: str) -> np.ndarray:
        return np.concatenate([[tokenizer.eot], tokenizer.encode(text)]).astype(tokenizer.dtype)

    empty = np.zeros(0, dtype=tokenizer.dtype)
    return Corpus(
        fingerprint="f" * 64, tokenizer=tokenizer.name, train=[empty],
        validation=np.concatenate([led(story(60, seed)) for seed in range(50, 70)]),
        heldout=[led(story(count + 10 * index, index)) for index in range(documents)],
        heldout_names=[str(index) for index in range(documents)], unigram_entropy=1.0, bigram_entropy=None,
    )  # fmt: skip


def subject_of(
    model: Any, tokenizer: Any, theirs: Any, kind: type[OpenWeightSubject] = TextPairedSubject, *, piece: int = 50, pair_file: bool = False,
    **settings: Any,
) -> OpenWeightSubject:  # fmt: skip
    small = {"lengths": (16, 32, 64), "documents": 3, "junk_rows": 4, "needle_trials": 16, "validation_tokens": 300}
    config = CellConfig(
        train=TrainConfig(seq_len=60, batch_tokens=60, micro_batch=1), eval=EvalConfig(**(small | settings))
    )
    corpus = corpus_of(theirs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Corpus, "load_tokenizer", lambda self: theirs)
        # byte pairs over every byte give their text back as GPT-2's do, which a file's name alone does not say
        lossless = (*words_module.LOSSLESS_TOKENIZERS, *(["json"] if pair_file else []))
        patch.setattr(words_module, "LOSSLESS_TOKENIZERS", lossless)
        return kind(ChunkedScorer(model, torch.device("cpu"), chunk_tokens=piece), tokenizer, corpus, config, None)


def numbers(subject: OpenWeightSubject, probe: str, lengths: tuple[int, ...]) -> dict[tuple[str, int], Any]:
    return {
        (measurement.metric, measurement.length): measurement
        for measurements, _ in run_probe(probe, subject, lengths)
        for measurement in measurements
    }


# --- text ---------------------------------------------------------------------------------------------------------


def test_passages_are_complete_characters_between_ends() -> None:
    tokenizer = load_tokenizer("bytes")
    all_tokens = [*"né".encode(), 256, *"中a".encode()]
    for first in range(len(all_tokens)):
        for last in range(first, len(all_tokens) + 1):
            tokens = np.array(all_tokens[first:last], dtype=np.int64)
            actual = list(passages(tokens, tokenizer))
            for passage in actual:
                inside = tokens[passage.first_token : passage.first_token + len(passage.ends)]
                assert bytes(inside.tolist()).decode() == passage.text, "no half characters, no end of text"
                assert passage.ends.tolist() == list(range(1, len(inside) + 1))
            text = "".join(passage.text for passage in actual)
            plain = bytes(token for token in tokens.tolist() if token != 256).decode(errors="ignore")
            assert text == plain


def test_spread_over_tokens_keeps_total_loss(hub_tokenizer: HubTokenizer) -> None:
    text = story(40, 3)
    theirs = load_tokenizer("bytes").encode(text)
    (passage,) = passages(theirs, load_tokenizer("bytes"))
    tokens, spans = hub_tokenizer.encode_with_offsets(text)
    draw = np.random.default_rng(0).random(len(tokens))
    losses = spread_over_tokens(draw, spans, passage)
    assert losses.shape == theirs.shape
    assert math.isclose(losses.sum(), draw.sum(), rel_tol=1e-12)
    # by hand, for tokens that stand for characters of one byte
    at = 0
    for nats, token in zip(draw, tokens, strict=True):
        size = len(hub_tokenizer.token_bytes(int(token)))
        if text[:20].isascii() and at + size <= 20:
            assert np.allclose(losses[at : at + size], nats / size)
        at += size if at < 20 else 0


# --- units --------------------------------------------------------------------------------------------------------


def test_uniform_model_costs_bits_of_its_tokens(hub_tokenizer: HubTokenizer) -> None:
    theirs = load_tokenizer("bytes")
    fake = Fake(uniform)
    who = subject_of(fake, hub_tokenizer, theirs)
    measured = numbers(who, "clean", (32, 64))
    for length in (32, 64):
        texts = [
            bytes(document_tokens[1 : length + 1].tolist()).decode(errors="ignore") for document_tokens in who.documents
        ]
        bits = math.log2(V) * sum(len(hub_tokenizer.encode(text)) for text in texts)
        size = sum(len(text.encode()) for text in texts)
        assert math.isclose(measured["bits_per_byte", length].value, bits / size, rel_tol=1e-6)
        assert math.isclose(measured["nats", length].value, bits * math.log(2) / size, rel_tol=1e-6), (
            "bytes are its tokens"
        )
        assert measured["nats", length].n == measured["bits_per_byte", length].n == size
    for read in fake.read:
        assert read[0] == hub_tokenizer.eot, "every text is led by the model's own first token"


def test_text_paired_subject_does_not_score_ends_of_text(hub_tokenizer: HubTokenizer) -> None:
    theirs = load_tokenizer("bytes")
    fake = Fake(uniform)
    who = subject_of(fake, hub_tokenizer, theirs, junk_rows=2)
    measured = numbers(who, "junk", (600,))
    rows = [who.corpus.validation[start : start + 601] for start in (0, 600)]
    assert all((row[1:] == 256).sum() for row in rows)
    texts = [
        [part.decode(errors="ignore") for part in bytes(t if t < 256 else 0 for t in row[1:].tolist()).split(b"\0")]
        for row in rows
    ]
    bits = math.log2(V) * sum(len(hub_tokenizer.encode(part)) for parts in texts for part in parts)
    size = sum(len(part.encode()) for parts in texts for part in parts)
    assert math.isclose(measured["bits_per_byte", 600].value, bits / size, rel_tol=1e-6)
    for read, row in zip(fake.read, rows, strict=True):
        # the start of the row, and each end of text except one at the start
        assert read.count(hub_tokenizer.eot) == 1 + int((row[1:] == 256).sum())


@pytest.fixture(scope="module")
def gpt2_hub_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    """GPT-2's tokenizer in the form of a checkpoint's files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    source = optional_data("data/gpt2")
    model = Tokenizer(models.BPE.from_file(str(source / "encoder.json"), str(source / "vocab.bpe")))
    model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("gpt2")
    PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)
    return HubTokenizer(folder)


def skewed(row: np.ndarray) -> np.ndarray:
    """Return logits that depend on the token and its position."""
    wave = np.sin(np.arange(50_257) * 0.37)
    return wave[None] * (1 + (row[:, None] * 7 + np.arange(len(row))[:, None]) % 5)


def test_text_paired_subject_with_tokenizer_of_corpus(gpt2: Any, gpt2_hub_tokenizer: HubTokenizer) -> None:
    who = subject_of(Fake(skewed), gpt2_hub_tokenizer, gpt2)
    rows = torch.from_numpy(np.stack([document[:65] for document in who.documents]).astype(np.int64))
    losses = who.losses(rows[:, :-1], rows[:, 1:])
    for row, nats in zip(rows, losses, strict=True):
        logits = torch.from_numpy(skewed(row.numpy()[:-1])).float()
        wanted = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
        assert torch.allclose(nats.float(), wanted, atol=1e-5)
    for probe, main in (("clean", "nats"), ("junk", "nats"), ("val", "val_loss")):
        length = 0 if probe == "val" else 64
        measured = numbers(who, probe, (length,))
        assert measured["bits", length].value == pytest.approx(measured[main, length].value / math.log(2), rel=1e-12)
        assert measured["bits", length].n == measured[main, length].n


def test_native_subject_reads_rows_of_its_own_tokens(hub_tokenizer: HubTokenizer, pairs: Any) -> None:
    theirs = load_tokenizer("bytes")
    who = subject_of(Fake(uniform), hub_tokenizer, theirs, NativeSubject)
    who.gpt2_tokenizer = pairs
    longest = who.config.eval.lengths[-1]
    assert all(len(document) > longest and document[0] == hub_tokenizer.eot for document in who.documents)
    assert hub_tokenizer.eot not in who.corpus.validation
    measured = numbers(who, "clean", (64,))
    assert measured["nats", 64].value == pytest.approx(math.log(V), rel=1e-6)
    texts = [hub_tokenizer.text(document[1:65]) for document in who.documents]
    tokens = sum(len(pairs.encode(text)) for text in texts)
    assert measured["bits", 64].value == pytest.approx(3 * 64 * math.log2(V) / tokens, rel=1e-6)


def test_subject_rejects_lossy_corpus_tokenizer(hub_tokenizer: HubTokenizer) -> None:
    theirs = SimpleNamespace(name="json:0123", eot=0, dtype=np.uint16, encode=lambda text: np.zeros(400, np.uint16))
    with pytest.raises(SweepError, match="uses tokenizer json:0123, which does not reproduce the text"):
        subject_of(Fake(uniform), hub_tokenizer, theirs)


# --- needle -------------------------------------------------------------------------------------------------------


def oracle(reach: int | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """Return a predictor that continues the longest match up to `reach` tokens back, else a constant digit."""

    def predict(row: np.ndarray) -> np.ndarray:
        n = len(row)
        match, logits = np.zeros(n + 1, dtype=np.int64), np.zeros((n, V))
        for t in range(n):
            match[1:] = np.where(row == row[t], match[:-1] + 1, 0)
            lengths = match[1 : t + 1].copy()
            if reach is not None:
                lengths[: max(0, t - reach)] = 0
            best = int(lengths.argmax()) if t else 0
            sure = t > 0 and lengths[best] >= 8
            logits[t, row[best + 1] if sure else SEVEN] = 20.0
        return logits

    return predict


SEVEN = 0


@pytest.mark.parametrize("theirs", ["bytes", "pairs"])
def test_subject_oracle_recalls_digits_within_its_reach(
    theirs: str, hub_tokenizer: HubTokenizer, pairs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digit_token,) = [n for n in range(hub_tokenizer.vocabulary) if hub_tokenizer.token_bytes(n) == b"7"]
    monkeypatch.setattr(f"{__name__}.SEVEN", digit_token)
    tokenizer = pairs if theirs == "pairs" else load_tokenizer("bytes")
    source = {"pair_file": theirs == "pairs"}
    measured = numbers(subject_of(Fake(oracle()), hub_tokenizer, tokenizer, **source), "needle", (16, 64))
    assert [measured["digit_accuracy", length].value for length in (16, 64)] == [1.0, 1.0]
    assert measured["steps_per_digit", 64].value == 2.0, "a space and a digit are two of its tokens; one is scored"
    blind = numbers(subject_of(Fake(oracle(reach=20)), hub_tokenizer, tokenizer, **source), "needle", (64,))
    assert blind["digit_accuracy", 64].value == blind["constant_accuracy", 64].value == 14 / 80


def test_subject_haystack_is_same_for_all_tokenizers(hub_tokenizer: HubTokenizer) -> None:
    theirs = load_tokenizer("bytes")
    who = subject_of(Fake(uniform), hub_tokenizer, theirs)
    hay = who.haystack(1, 40)
    assert hub_tokenizer.text(hay[1:]) == bytes(who.documents[1][1:40].tolist()).decode(errors="ignore")
