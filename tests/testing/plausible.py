"""An invented sweep for the gallery whose numbers look like those of real networks: noisy, over three seeds, with limits.

The figures of probes are drawn from it, since no sweep that comes along has stored their items. Curves follow simple
laws (a power law of the position, a capacity of the memory, recall that falls beyond the training length) with noise
that depends on the names of what is drawn alone.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Example, Measurement, Owner
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.probes.diagnostics.gate_dynamics import THRESHOLDS, evictable_shares
from sweeps import cell

if TYPE_CHECKING:
    from torch import Tensor

NAME = "invented"
OWNER = Owner(name="ada", host="here", pid=1, started=0.0)
TRAINED = 1024
MIXERS, MEMORIES, SEEDS = ("fox", "rope"), ("off", "on"), (0, 1, 2)
GATED = {"fox"}
"""Mixers whose attention has gates."""
LOSS = {"fox": 3.10, "rope": 3.17}
TEXTS = {"books": 0.0, "code": -1.1, "stories": -0.6}
"""Further text -> how much its losses differ from those of the documents."""
LENGTHS = (512, 1024, 2048, 4096, 8192)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
BIN, DOCUMENT, DOCUMENTS = 16, 4096, 6
LAYERS, HEADS, DIGITS, TRIALS, CONSTANT = (1, 3, 5, 7), 4, 5, 16, 0.16
MAP_TOKENS = 12
TRACED = (1, 5, 7)
"""Layers whose gates are stored token by token: the first, the middle and the last."""
ROWS, BINS, TRACE = 8, 64, 256
"""Rows whose gates are read, points of a curve over their positions, tokens whose gates are stored one by one."""


def fill_plausible(store: Store) -> None:
    """Record the sweep `invented`: two mixers with and without memory, three seeds each, trained at 1K tokens."""
    levels = [(mixer, memory, seed) for mixer in MIXERS for memory in MEMORIES for seed in SEEDS]
    cells = [
        replace(cell(i + 1, attn_type=mixer, memory=memory, seed=seed), config={"train": {"seq_len": TRAINED}})
        for i, (mixer, memory, seed) in enumerate(levels)
    ]
    store.record_revision(NAME, grid_text="x", grid_file="x.yaml", cells=cells)
    for record, (mixer, memory, seed) in zip(cells, levels, strict=True):
        attempt = store.start_attempt(record.id, owner=OWNER, fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        draw = random.Random(f"{mixer} {memory} {seed}")
        _position_nll(recorder, mixer, memory, draw)
        for text, shift in TEXTS.items():
            own = random.Random(f"{mixer} {memory} {seed} {text}")
            _position_nll(recorder, mixer, memory, own, f"position_nll:{text}", shift)
            _further_text(recorder, mixer, memory, text, shift, own)
        for length in LENGTHS:
            _recall(recorder, mixer, memory, length, draw)
        _attention_map(recorder, mixer, draw)
        _gates(recorder, mixer, memory, seed)
        if mixer in GATED:
            _gate_dynamics(recorder, mixer, memory, seed)
        _memory_recall(recorder, mixer, memory, draw)
        _downstream(recorder, mixer, memory, draw)
        store.finish_attempt(attempt.id, 1, "done")


TASKS = "tasks"
ROW, PAIRS = 256, 16
"""Tokens and pairs of a row of associative recall."""
RECALL_CHANCE = 1 / 64
MAD_TASKS = {"recall": 0.95, "fuzzy": 0.5, "noisy": 0.9, "copying": 0.8, "compression": 0.5, "memorization": 0.9}


def fill_tasks(store: Store) -> None:
    """Record the sweep `tasks`: recall and MAD of two mixers and a memory, two difficulties a task, five head sizes."""
    parts = [("nope", "off"), ("fox", "off"), ("nope", "kda")]
    cells, numbers = [], []
    for mixer, memory in parts:
        ability = {"nope": 0.0, "fox": 0.05}[mixer] - 0.25 * (memory == "kda")
        levels: dict[str, Any] = {"attn_type": mixer, "memory": memory, "window": "on" if memory == "kda" else "off"}
        for size in (8, 16, 32, 64, 128):
            record = cell(len(cells) + 1, axes={"model.head_dim": str(size), "task": "mqar"}, **levels)
            record = replace(record, config={"train": {"seq_len": ROW}})
            state = 4 * size * size if memory == "kda" else 4 * ROW * 2 * size
            # a state holds pairs up to a number of bytes, attention up to a size of its keys
            excess = math.log2(state) - {"nope": 15.2, "fox": 14.6}[mixer] + 2.4 * (memory == "kda")
            accuracy = RECALL_CHANCE + (0.995 - RECALL_CHANCE) / (1 + math.exp(-1.1 * excess))
            cells.append(record)
            shares = [("mqar", "accuracy", accuracy), ("mqar", "exact", accuracy**PAIRS)]
            numbers.append([*shares, ("mqar", "questions", 500.0 * PAIRS), ("mqar", "state_bytes", float(state))])
        for (task, level), length in itertools.product(MAD_TASKS.items(), (128, 256)):
            axes = {"model.head_dim": "32", "task": f"{task}-{length}"}
            config = {"data": {"settings": {"mad": {"task": task, "length": length}}}}
            cells.append(replace(cell(len(cells) + 1, axes=axes, **levels), config=config))
            numbers.append([("mad", "accuracy", min(1.0, level + ability - 0.1 * (length > 128)))])
    store.record_revision(TASKS, grid_text="x", grid_file="x.yaml", cells=cells)
    for record, each in zip(cells, numbers, strict=True):
        attempt = store.start_attempt(record.id, owner=OWNER, fence=1)
        recorder = DatabaseRecorder(store, attempt.id, 1)
        for probe, metric, value in each:
            _write(recorder, probe, 0, 500, **{metric: value})
        if record.axes["task"] == "mqar":
            recall = next(value for _, metric, value in each if metric == "accuracy")
            fields: dict[str, Any] = {"probe": "mqar", "metric": "accuracy", "unit": "fraction", "n": 500}
            recorder.measurements([Measurement(value=recall, description={"chance": RECALL_CHANCE}, **fields)])
        store.finish_attempt(attempt.id, 1, "done")


def _write(recorder: DatabaseRecorder, probe: str, length: int, n: int, **values: float) -> None:
    recorder.measurements(
        [Measurement(probe=probe, metric=name, length=length, value=value, n=n) for name, value in values.items()]
    )


def _further_text(
    recorder: DatabaseRecorder, mixer: str, memory: str, text: str, shift: float, draw: random.Random
) -> None:
    """Loss and needle accuracy by length on a further text, which RoPE leaves beyond the training length."""
    level, slope = _loss_law(mixer, memory, shift)
    level += draw.gauss(0, 0.012) + sum(_difficulty(document) for document in range(DOCUMENTS)) / DOCUMENTS
    for length in LENGTHS:
        loss = sum(_loss_at(position + 0.5, level, slope) for position in range(length)) / length
        _write(recorder, f"clean:{text}", length, DOCUMENTS * length, nats=loss)
        share = _chance_of_digit(mixer, memory, length, 0.5) + 0.05 * shift + draw.gauss(0, 0.02)
        share = min(1.0, max(0.04, share))
        _write(recorder, f"needle:{text}", length, TRIALS * DIGITS, digit_accuracy=share, constant_accuracy=CONSTANT)


def _loss_law(mixer: str, memory: str, easier: float) -> tuple[float, float]:
    """Level of the loss, and its rise per octave beyond the training length."""
    level = LOSS[mixer] + easier - 0.12 * (memory == "on")
    return level, {"fox": 0.0, "rope": 0.45}[mixer] * (0.3 if memory == "on" else 1)


def _loss_at(position: float, level: float, slope: float) -> float:
    """Loss of a token at a position: a power law, and a rise beyond the training length."""
    return level + 3.2 * position**-0.42 + slope * max(0.0, math.log2(position / TRAINED))


def _difficulty(document: int) -> float:
    """Additional loss of a document, in nats per token."""
    return random.Random(f"document {document}").gauss(0, 0.15)


def _position_nll(
    recorder: DatabaseRecorder,
    mixer: str,
    memory: str,
    draw: random.Random,
    probe: str = "position_nll",
    easier: float = 0.0,
) -> None:
    """A power law of the position, which RoPE leaves beyond the training length; documents differ in difficulty."""
    level, slope = _loss_law(mixer, memory, easier)
    level += draw.gauss(0, 0.012)
    fields: dict[str, Any] = {"probe": probe, "metric": "nats", "length": DOCUMENT}
    examples = []
    for document in range(DOCUMENTS):
        for index in range(DOCUMENT // BIN):
            value = _loss_at((index + 0.5) * BIN, level, slope) + _difficulty(document)
            examples.append(Example(**fields, item=document, position=index, value=value + draw.gauss(0, 0.03)))
    recorder.examples(examples)
    _write(recorder, probe, DOCUMENT, DOCUMENTS, nats=level, end_nats=level, bin=float(BIN))


def _chance_of_digit(mixer: str, memory: str, length: int, depth: float) -> float:
    """Probability that a digit is recalled: it falls beyond the training length, the less so with a memory."""
    over = max(0.0, math.log2(length / TRAINED)) + 0.25 * math.log2(length / 512)
    loss_per_octave = {"fox": 0.16, "rope": 0.42}[mixer] * (0.45 if memory == "on" else 1)
    return max(0.11, 0.97 - loss_per_octave * over - 0.12 * (1 - depth) * over - 0.08 * (0.2 < depth < 0.8))


def _recall(recorder: DatabaseRecorder, mixer: str, memory: str, length: int, draw: random.Random) -> None:
    """Digits of a passkey at five depths, and of needle trials that differ in difficulty."""
    fields: dict[str, Any] = {"probe": "passkey", "metric": "digit_accuracy", "length": length}
    examples = [
        Example(
            **fields, item=trial, position=index * DIGITS + digit, detail={"depth": depth},
            value=float(draw.random() < _chance_of_digit(mixer, memory, length, depth)),
        )
        for index, depth in enumerate(DEPTHS) for trial in range(8) for digit in range(DIGITS)
    ]  # fmt: skip
    recorder.examples(examples)
    mean = sum(float(example.value or 0) for example in examples) / len(examples)
    _write(
        recorder,
        "passkey",
        length,
        len(examples),
        digit_accuracy=mean,
        exact_accuracy=mean**2,
        constant_accuracy=CONSTANT,
    )
    fields = {"probe": "needle", "metric": "digit_accuracy", "length": length}
    examples = []
    for trial in range(TRIALS):
        ease = random.Random(f"trial {trial} {length}").uniform(-0.35, 0.35)
        share = min(0.98, max(0.05, _chance_of_digit(mixer, memory, length, 0.5) + ease))
        examples += [
            Example(**fields, item=trial, position=digit, value=float(draw.random() < share)) for digit in range(DIGITS)
        ]
    recorder.examples(examples)
    mean = sum(float(example.value or 0) for example in examples) / len(examples)
    _write(recorder, "needle", length, len(examples), digit_accuracy=mean, constant_accuracy=CONSTANT)


def _attention_map(recorder: DatabaseRecorder, mixer: str, draw: random.Random) -> None:
    """Two layers of two heads: one attends to the tokens just before, the other to the first token and two others."""
    fields: dict[str, Any] = {"probe": "attention_map", "metric": "keys"}
    decay = {"fox": 0.9, "rope": 0.6}[mixer]
    examples = []
    for item, (layer, head) in enumerate((layer, head) for layer in (2, 6) for head in (0, 1)):
        for query in range(MAP_TOKENS):
            raw = [math.exp(-decay * (query - key) + draw.gauss(0, 0.3)) for key in range(query + 1)]
            if head == 1:
                raw = [
                    math.exp(draw.gauss(0, 0.4)) + 6.0 * (key == 0) + 5.0 * (key in (3, 7)) for key in range(query + 1)
                ]
            weights = [weight / sum(raw) for weight in raw]
            detail = {"layer": layer, "head": head, "weights": weights}
            keys = 1 / sum(weight**2 for weight in weights)
            examples.append(Example(**fields, item=item, position=query, value=keys, detail=detail))
    recorder.examples(examples)
    _write(recorder, "attention_map", 0, len(examples), keys=3.0, row_sum=1.0)


def _log_gates(owner: str, memory: str, seed: int) -> dict[int, Tensor]:
    """Natural log gates [rows, tokens, heads, 1] of the mixer or memory `owner` by layer, of rows of the training length.

    A gate's mean half-life is 3 to 800 tokens, longer in later layers and heads and with a memory; one head of the last
    layer never forgets. A gate forgets more at the first tokens of a row, and first heads forget at few tokens only.
    """
    import torch

    noise = np.random.default_rng([*owner.encode(), MEMORIES.index(memory), seed])
    early = 1 + 0.8 * np.exp(-np.arange(TRAINED) / 40)
    gates = {}
    for order, layer in enumerate(LAYERS):
        log_gate = np.zeros((ROWS, TRAINED, HEADS, 1))
        for head in range(HEADS):
            half_life = 2 ** (1.5 + 1.6 * order + 1.1 * head + 0.4 * (memory == "on") + noise.normal(0, 0.5))
            peakedness = 0.15 * 4.0**head
            forgotten = noise.gamma(peakedness, 1 / peakedness, (ROWS, TRAINED)) * early / early.mean()
            if (order, head) != (len(LAYERS) - 1, HEADS - 1):
                log_gate[..., head, 0] = -math.log(2) / half_life * forgotten
        gates[layer] = torch.from_numpy(log_gate)
    return gates


def _gates(recorder: DatabaseRecorder, mixer: str, memory: str, seed: int) -> None:
    """Means over tokens of the log gates of a mixer with gates and of a memory."""
    for metric, is_gated in (("retention", mixer in GATED), ("memory", memory == "on")):
        if not is_gated:
            continue
        # a memory has gates of its own
        log_gates = _log_gates(mixer if metric == "retention" else f"memory of {mixer}", memory, seed)
        examples = [
            Example(probe="gates", metric=metric, item=layer, position=head, value=math.exp(mean))
            for layer, log_gate in log_gates.items()
            for head, mean in enumerate(log_gate.mean((0, 1, 3)).tolist())
        ]
        recorder.examples(examples)
        mean = sum(float(example.value or 0) for example in examples) / len(examples)
        _write(recorder, "gates", 0, ROWS * TRAINED, **{metric: mean})
    _write(recorder, "gates", 0, 1, channels=1.0)


def _gate_dynamics(recorder: DatabaseRecorder, mixer: str, memory: str, seed: int) -> None:
    """Numbers and items of `_log_gates`, as the probe stores them: all of the same gates."""
    fields: dict[str, Any] = {"probe": "gate_dynamics"}
    examples, means, spreads, last = [], [], [], []
    for layer, log_gate in _log_gates(mixer, memory, seed).items():
        gate = log_gate.exp().squeeze(-1)
        mean, spread = gate.mean((0, 1)), gate.std((0, 1), correction=0)
        curve = gate.mean((0, 2)).reshape(-1, TRAINED // BINS).mean(1)
        for metric, values in (("mean", mean), ("spread", spread), ("bin", curve)):
            examples += [
                Example(**fields, metric=metric, item=layer, position=position, value=value)
                for position, value in enumerate(values.tolist())
            ]
        traced = [(head, token) for head in (int(spread.argmin()), int(spread.argmax())) for token in range(TRACE)]
        for position, (head, token) in enumerate(traced if layer in TRACED else ()):
            detail = {"head": head, "channel": 0, "token": token}
            value = float(gate[0, token, head])
            examples.append(
                Example(**fields, metric="trace", item=layer, position=position, value=value, detail=detail)
            )
        shares = evictable_shares(log_gate)
        for position, ((length, threshold), share) in enumerate(shares.items()):
            detail = {"length": length, "threshold": threshold}
            examples.append(
                Example(**fields, metric="evictable", item=layer, position=position, value=share, detail=detail)
            )
        means += mean.tolist()
        spreads += spread.tolist()
        last.append(shares[TRAINED, THRESHOLDS[1]])
    recorder.examples(examples)
    always_on = [mean > 0.99 and spread < 0.01 for mean, spread in zip(means, spreads, strict=True)]
    numbers = {"mean": np.mean(means), "spread": np.mean(spreads), "evictable": np.mean(last)}
    numbers |= {"always_on": np.mean(always_on), "bin": TRAINED // BINS, "trace": TRACE, "channels": 1}
    _write(recorder, "gate_dynamics", 0, ROWS * TRAINED, **{name: float(value) for name, value in numbers.items()})


def _memory_recall(recorder: DatabaseRecorder, mixer: str, memory: str, draw: random.Random) -> None:
    """Recall that falls around a capacity, never below chance; without memory only in context."""
    capacity = {"fox": 20.0, "rope": 9.0}[mixer] * 2 ** draw.gauss(0, 0.15)
    parts = [("context_share", [(row, 0) for row in range(8)], (4, 8, 16, 32), 1.6 if memory == "on" else 0.7)]
    if memory == "on":
        parts.append(("share", [(layer, head) for layer in LAYERS for head in range(2)], (4, 8, 16, 32, 64), 1.0))
    for metric, units, numbers, factor in parts:
        examples = []
        for index, pairs in enumerate(numbers):
            share = 1 / pairs + (1 - 1 / pairs) / (1 + (pairs / (factor * capacity)) ** 2.2)
            examples += [
                Example(
                    probe="memory_recall", metric=metric, item=item, position=2 * index + head,
                    value=min(1.0, max(0.0, share + draw.gauss(0, 0.06))), detail={"pairs": pairs, "chance": 1 / pairs},
                )
                for item, head in units
            ]  # fmt: skip
        recorder.examples(examples)
        mean = sum(float(example.value or 0) for example in examples) / len(examples)
        _write(recorder, "memory_recall", 0, len(examples), **{metric: mean})


DOWNSTREAM_TASKS = {"blimp/acc": (67_000, 0.5, 0.74), "hellaswag/acc_norm": (10_042, 0.25, 0.33), "piqa/acc_norm": (1_838, 0.5, 0.62)}  # fmt: skip
"""Number of questions, chance level and usual score of a task, by metric."""


def _downstream(recorder: DatabaseRecorder, mixer: str, memory: str, draw: random.Random) -> None:
    """Scores of three tasks, a little higher with forgetting attention, each with its standard error."""
    measurements = []
    for metric, (n, chance, usual) in DOWNSTREAM_TASKS.items():
        value = usual + 0.012 * (mixer == "fox") + 0.006 * (memory == "on") + draw.gauss(0, 0.005)
        error = math.sqrt(value * (1 - value) / n)
        facts = {"task": metric.partition("/")[0], "version": "1.0", "shots": 0, "main": True, "chance": chance}
        fields: dict[str, Any] = {"probe": "downstream", "unit": "fraction", "n": n}
        interval = {"low": value - 1.96 * error, "high": value + 1.96 * error}
        measurements += [
            Measurement(**fields, metric=metric, value=value, **interval, description=facts),
            Measurement(**fields, metric=f"{metric}_stderr", value=error, description={"task": facts["task"]}),
        ]
    recorder.measurements(measurements)
