"""Capacity of memories and networks whose capacity is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from atma_sweep.kernels import features
from atma_sweep.kernels.omega.op import Rates, first_state
from atma_sweep.model.config import ModelConfig
from atma_sweep.model.memory.gated_delta import DeltaRates
from atma_sweep.model.registry import MEMORIES, register_memory
from atma_sweep.model.resolve import memory_settings
from atma_sweep.sweep.config import CellConfig, DataConfig, EvalConfig
from atma_sweep.sweep.data.builtin.mqar import BLANK, VALUES
from atma_sweep.sweep.data.tokenizer import load_tokenizer
from atma_sweep.sweep.probes import bound
from atma_sweep.sweep.probes.diagnostics.memory_recall import recall_capacity
from atma_sweep.sweep.probes.diagnostics.memory_state import average_rates, is_nearest, is_recalled, memories_of
from atma_sweep.sweep.probes.subject import CellSubject, run_probe
from scipy.stats import binom
from torch import Tensor

Make = Callable[..., CellSubject]
PROBE = "memory_recall"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def memory_of(name: str, size: int, **settings: Any) -> Any:
    """Return a memory with one head of that size."""
    sizes = {"d_model": 16, "n_heads": 1, "n_kv_heads": 1, "head_dim": size, "vocab_size": 64}
    config = ModelConfig(**sizes, memory=name, memories={name: settings})
    return MEMORIES.load(name)(config, memory_settings(config)).double()


def delta_rates(keep: float, step: float) -> DeltaRates:
    return DeltaRates(*(torch.tensor([rate], dtype=torch.float64) for rate in (keep, step)))


class TestTheMemoryAlone:
    def test_delta_memory_recalls_a_pair_per_channel(self) -> None:
        keys, values = torch.linalg.qr(normal(64, 64))[0][None, :, None], normal(1, 64, 1, 64, seed=1)
        memory = memory_of("deltanet", 64)
        rates = DeltaRates(*(rate.expand(1, 64, 1) for rate in delta_rates(0.0, 1.0)))
        _, state = memory.write(rates, keys, keys, values, None)
        assert (memory.answer(state, keys) - values).abs().max() < 1e-12
        assert is_recalled(memory, delta_rates(0.0, 1.0), keys, values).all()

    def test_memory_without_retention_recalls_last_pair(self) -> None:
        keys, values = torch.eye(32, dtype=torch.float64)[None, :20, None], normal(1, 20, 1, 32)
        right = is_recalled(memory_of("gated_delta", 32), delta_rates(-800.0, 1.0), keys, values)[0, :, 0]
        assert right.tolist() == [False] * 19 + [True]

    def test_hebbian_recall_is_limited_by_crosstalk(self) -> None:
        """A chunk computes all gradients at the empty memory: M = Σ v kᵀ."""
        keys, values = normal(3, 100, 1, 16), normal(3, 100, 1, 16, seed=1)
        memory = memory_of("omega", 16, window=1, chunk=128)
        unit_rate = torch.ones(1, dtype=torch.float64)
        right = is_recalled(memory, Rates(0 * unit_rate, unit_rate, unit_rate), keys, values).numpy()
        k, v = keys[:, :, 0].numpy(), values[:, :, 0].numpy()
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
        for draw in range(3):
            read = k[draw] @ k[draw].T @ v[draw]
            cosine = read @ (v[draw] / np.linalg.norm(v[draw], axis=1, keepdims=True)).T
            assert right[draw, :, 0].tolist() == (cosine.argmax(1) == np.arange(100)).tolist()
        assert 0.1 < right.mean() < 0.9

    def test_channel_products_recall_256_pairs(self) -> None:
        """Uses the best matrix for the pairs, which no sequence of writes surpasses."""
        keys, values = normal(1, 256, 1, 32), normal(1, 256, 1, 32, seed=1)
        shares = {}
        for name, feature in (("poly2", features.poly2), ("identity", lambda x: x)):
            unit = keys / keys.norm(dim=-1, keepdim=True)
            columns = feature(unit)[0, :, 0]
            columns = columns / columns.norm(dim=-1, keepdim=True)
            best = torch.linalg.lstsq(columns, values[0, :, 0], driver="gelsd").solution.T
            state = first_state([best], 1, 1, columns.shape[-1], 32, 1)
            memory = memory_of("omega", 32, features=name, window=1)
            shares[name] = is_nearest(memory.answer(state, keys), values).double().mean().item()
        assert shares["poly2"] == 1.0
        assert shares["identity"] < 0.7

    @pytest.mark.parametrize("pairs", [2, 16])
    def test_is_nearest_of_random_answers_is_chance(self, pairs: int) -> None:
        right = int(is_nearest(normal(100, pairs, 1, 8), normal(100, pairs, 1, 8, seed=1)).sum())
        low, high = binom.ppf((1e-4, 1 - 1e-4), 100 * pairs, 1 / pairs)
        assert low <= right <= high

    def test_is_nearest_rejects_zero_and_nan(self) -> None:
        values = normal(1, 4, 1, 8)
        assert not is_nearest(torch.zeros_like(values), values).any()
        assert not is_nearest(values * torch.nan, values).any()
        assert is_nearest(values, values).all()

    def test_average_rates_are_means_over_text(self, network: Any, subject: Make) -> None:
        model = network(awake=True, dtype=torch.float64, vocab_size=264, memory="atlas", n_layers=3).eval()
        who = subject(model, chunk_tokens=20)
        rows = who.validation_rows(5)
        assert isinstance(rows, Tensor)
        memory, seen = memories_of(model)[2], []
        hook = memory.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
        with torch.no_grad():
            model.features(rows, full_context=True)
            rates = average_rates(who, rows)[2]
            hook.remove()
            x, _, _, v = seen[0]
            wanted = memory.read_rates(x)
        for mine, all_BTH in zip(rates.rates, wanted, strict=True):
            assert mine.tolist() == pytest.approx(all_BTH.mean((0, 1)).tolist(), rel=1e-9)
        group = model.config.n_heads // model.config.n_kv_heads
        scale = v.square().mean((0, 1, 3)).sqrt().repeat_interleave(group)
        assert rates.scale_H.tolist() == pytest.approx(scale.tolist(), rel=1e-9)


class TestCapacity:
    def test_recall_capacity_interpolates_threshold(self) -> None:
        assert recall_capacity([2, 4, 8], [1.0, 1.0, 0.95]) == 8
        assert recall_capacity([2, 4, 8], [1.0, 1.0, 0.8]) == pytest.approx(4 * math.sqrt(2))
        assert recall_capacity([4, 8], [0.5, 0.4]) == pytest.approx(4 ** (0.1 / 0.5))
        assert recall_capacity([2, 4, 8, 16], [1.0, 0.7, 1.0, 1.0]) == pytest.approx(2 * 2 ** (1 / 3)), (
            "the first fall counts"
        )


class TestTheProbe:
    @pytest.mark.parametrize("name", list(MEMORIES))
    def test_memory_recall_of_every_memory(self, name: str, network: Any, subject: Make) -> None:
        model = network(awake=True, vocab_size=264, memory=name).eval()
        who = subject(model, settings={PROBE: {"pairs": [2, 6], "draws": 5, "rows": 3, "text": 4}})
        ((measured, examples),) = run_probe(PROBE, who, [0])
        numbers = {measurement.metric: measurement.value for measurement in measured}
        heads = model.config.n_heads
        mine = [example for example in examples if example.metric == "share"]
        assert [(e.item, e.position, e.detail) for e in mine] == [
            (2, index * heads + head, {"pairs": pairs, "head": head, "chance": 1 / pairs})
            for index, pairs in enumerate((2, 6))
            for head in range(heads)
        ]
        shares = {pairs: [e.value for e in mine if e.detail["pairs"] == pairs] for pairs in (2, 6)}
        means = [float(np.mean(shares[pairs])) for pairs in (2, 6)]
        assert numbers["share"] == pytest.approx(np.mean(means))
        assert numbers["pairs"] == pytest.approx(recall_capacity((2, 6), means))
        own = [e.value for e in examples if e.metric == "pairs"]
        assert own == pytest.approx([recall_capacity((2, 6), both) for both in zip(*shares.values(), strict=True)])
        assert bound(PROBE, who.config).chance(bound(PROBE, who.config).metric("share")) == pytest.approx(
            (1 / 2 + 1 / 6) / 2
        )

    def test_pair_counts_reach_four_head_sizes(self) -> None:
        config = CellConfig(model=ModelConfig(head_dim=16, n_heads=2, n_kv_heads=2, d_model=32))
        assert bound(PROBE, config).pair_counts == (2, 4, 8, 16, 32, 64)

    @pytest.mark.parametrize("pairs", [[4, 2], [1, 2], [2, 2]])
    def test_pair_counts_must_rise(self, pairs: list[int]) -> None:
        with pytest.raises(ValueError, match="pairs must rise from 2 or more"):
            bound(PROBE, CellConfig(eval=EvalConfig(settings={PROBE: {"pairs": pairs}})))

    def test_recall_without_memory_measures_network_alone(self, network: Any, subject: Make) -> None:
        options = {"settings": {PROBE: {"pairs": [2], "rows": 2, "text": 2}}}
        with MEMORIES.scope():
            register_memory("mute")(type("Mute", (MEMORIES.load("gated_delta"),), {"answer": None}))
            reasons = {"none": "n/a: the network has no memory", "mute": "n/a: memory mute defines no answer"}
            for memory, reason in reasons.items():
                ((measured, _),) = run_probe(
                    PROBE, subject(network(vocab_size=264, memory=memory).eval(), **options), [0]
                )
                assert [measurement.reason for measurement in measured] == [reason, reason, None, None, None]

    def test_memory_recall_with_short_text_has_reason(self, network: Any, subject: Make) -> None:
        who = subject(network(vocab_size=264, memory="kda").eval(), settings={PROBE: {"pairs": [8], "text": 60}})
        ((measured, examples),) = run_probe(PROBE, who, [0])
        assert examples == []
        assert {measurement.reason for measurement in measured} == {
            "too-short: the validation split holds 53 of 60 rows of 13 tokens",
            "n/a: the text has 14 different tokens, fewer than 8 pairs need",
        }


def looks_up(row: np.ndarray) -> np.ndarray:
    """Predict for each token the one that followed its last occurrence."""
    predicted = np.zeros(len(row), dtype=np.int64)
    value_of_key: dict[int, int] = {}
    for index, token in enumerate(row[:-1]):
        predicted[index] = value_of_key.get(token, 0)
        value_of_key[token] = row[index + 1]
    predicted[-1] = value_of_key.get(row[-1], 0)
    return predicted


class TestInContext:
    SETTINGS: ClassVar[dict[str, Any]] = {"pairs": [2, 4, 6], "rows": 40}

    def of_mqar(self, model: Any, subject: Make, **corpus: Any) -> CellSubject:
        network_subject = subject(model, settings={PROBE: self.SETTINGS})
        data = DataConfig(corpus="mqar", settings={"mqar": {"length": 24, "pairs": 3, "keys": 6, "values": 5} | corpus})
        config = network_subject.config.model_copy(update={"data": data})
        return CellSubject(model, load_tokenizer("mqar"), network_subject.corpus, config, torch.device("cpu"))

    def measure(self, rule: Any, subject: Make, predict: Any, *, mqar: bool) -> tuple[Any, Any, Any]:
        model = rule(predict, 1024)
        model.blocks = ()
        who = self.of_mqar(model, subject) if mqar else subject(model, settings={PROBE: self.SETTINGS})
        ((measured, examples),) = run_probe(PROBE, who, [0])
        measured_by_metric = {measurement.metric: measurement for measurement in measured}
        return measured_by_metric, [example for example in examples if example.metric == "context_share"], (model, who)

    @pytest.mark.parametrize("mqar", [False, True])
    def test_memory_recall_of_lookup_is_perfect(self, mqar: bool, rule: Any, subject: Make) -> None:
        measured, examples, (model, who) = self.measure(rule, subject, looks_up, mqar=mqar)
        assert (measured["context_share"].value, measured["context_pairs"].value) == (1.0, 6.0)
        assert measured["context_share"].n == 40 * (2 + 4 + 6)
        assert [(e.item, e.position) for e in examples] == [(i, p) for p in range(3) for i in range(40)]
        read = sum(rows.numel() for rows in model.seen)
        probe = bound(PROBE, who.config)
        # rows of the corpus are as long as its own, those of more pairs longer; the last token is not read
        lengths = [24, 24, 26] if mqar else [8, 16, 24]
        assert probe.tokens(0) == 40 * sum(lengths) + 8 * 13
        assert read == 40 * sum(length - mqar for length in lengths)
        assert not any(model.full), "the window of training stays"

    @pytest.mark.parametrize("mqar", [False, True])
    def test_memory_recall_of_random_values_is_chance(self, mqar: bool, rule: Any, subject: Make) -> None:
        draw = np.random.default_rng(0)

        def guesses(row: np.ndarray) -> np.ndarray:
            if mqar:
                pairs = int(np.argmax(row[1:] == BLANK)) // 2 if (row[1:] == BLANK).any() else 6
                first = [token for token in row[2 : 2 + 2 * pairs : 2] if token >= VALUES]
            else:
                first = list(row[2 : 2 + len(row) // 2 : 2])
            return draw.choice(first, len(row))

        measured, examples, _ = self.measure(rule, subject, guesses, mqar=mqar)
        for pairs in (2, 4, 6):
            mine = [e for e in examples if e.detail["pairs"] == pairs]
            chance = 1 / pairs + (1 - 1 / pairs) / 5 * mqar
            assert {e.detail["chance"] for e in mine} == {chance}
            right = sum(e.value for e in mine) * pairs
            low, high = binom.ppf((1e-4, 1 - 1e-4), 40 * pairs, chance)
            assert low <= right <= high
        assert measured["context_chance"].value == pytest.approx(np.mean([e.detail["chance"] for e in examples]))

    def test_memory_recall_rows_have_distinct_tokens(self, rule: Any, subject: Make) -> None:
        _, _, (model, _) = self.measure(rule, subject, looks_up, mqar=False)
        for row in (row.numpy() for rows in model.seen for row in rows):
            pairs = len(row) // 4
            assert row[0] == 256
            assert len(set(row[1 : 2 * pairs + 1])) == 2 * pairs
            first = dict(row[1 : 2 * pairs + 1].reshape(pairs, 2))
            assert set(row[2 * pairs + 1 :: 2]) == set(first)
            assert all(first[k] == v for k, v in row[2 * pairs + 1 : -1].reshape(-1, 2))

    def test_recall_of_network_with_few_positions_has_reason(self, network: Any, subject: Make) -> None:
        model = network(vocab_size=264, positions="ape", position_settings={"ape": {"length": 20}}).eval()
        ((measured, _),) = run_probe(PROBE, subject(model, settings={PROBE: self.SETTINGS}), [0])
        assert {measurement.reason for measurement in measured[2:]} == {
            "n/a: position scheme ape supports at most 20 tokens, fewer than 24"
        }

    def test_memory_recall_stops_at_number_of_keys(self, rule: Any, subject: Make) -> None:
        model = rule(looks_up, 1024)
        model.blocks = ()
        ((measured, examples),) = run_probe(PROBE, self.of_mqar(model, subject, keys=4), [0])
        assert {e.detail["pairs"] for e in examples} == {2, 4}
        assert {measurement.metric: measurement.value for measurement in measured}["context_pairs"] == 4
