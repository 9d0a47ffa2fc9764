"""Invented results of the probes that have figures of their own, for tests of reports, which train nothing."""

from __future__ import annotations

import itertools
import math
from typing import Any

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Example, Measurement

FIGURES = (
    "position-nll",
    "texts",
    "retention",
    "gate-dynamics",
    "evictable-keys",
    "passkey",
    "attention-map",
    "extrapolation",
    "memory-recall",
    "recall-state",
    "downstream",
)
"""The figures of `probe_items`."""


def probe_items(
    recorder: DatabaseRecorder, loss: float, share: float = 0.5, *, lengths: tuple[int, ...] = (128, 256)
) -> None:
    """Numbers and items of these probes at these lengths: a network of that loss, which is right in that share of trials."""
    for length in lengths:
        position_nll(recorder, length, loss)
        passkey(recorder, length, share)
        _numbers(recorder, "extrapolation", length, 1000, nats=loss, perplexity=2.718281828 ** (loss + length / 1000))
        further_texts(recorder, length, loss, share)
    attention_map(recorder, loss)
    gate_dynamics(recorder, share)
    gates(recorder, share, channels=1)
    memory_recall(recorder, share)
    downstream(recorder, share)


def recall(recorder: DatabaseRecorder, loss: float, share: float) -> None:
    """Recall in that share of trials with the bytes of state, 2 KiB per nat."""
    numbers = {"accuracy": share, "exact": share**8, "state_bytes": float(round(2048 * loss))}
    _numbers(recorder, "mqar", 0, 500, **numbers)


def _numbers(recorder: DatabaseRecorder, probe: str, length: int, n: int, **values: float) -> None:
    recorder.measurements(
        [Measurement(probe=probe, metric=name, length=length, value=value, n=n) for name, value in values.items()]
    )


def downstream(recorder: DatabaseRecorder, share: float, *, n: int = 400) -> None:
    """Scores of two tasks with their standard errors: a share of right answers, and a perplexity."""
    for metric, value, error in (("blimp/acc", share, 0.02), ("lambada_openai/perplexity", 10 + 40 * share, 1.5)):
        facts = {"task": metric.partition("/")[0], "version": "2.0", "shots": 0, "main": True}
        fields: dict[str, Any] = {"probe": "downstream", "unit": "fraction" if value <= 1 else "1", "n": n}
        interval = {"low": value - 1.96 * error, "high": value + 1.96 * error}
        recorder.measurements(
            [
                Measurement(**fields, metric=metric, value=value, **interval, description=facts),
                Measurement(**fields, metric=f"{metric}_stderr", value=error, description={"task": facts["task"]}),
            ]
        )


def gates(
    recorder: DatabaseRecorder, share: float, *, channels: int, heads: int = 4, layers: tuple[int, ...] = (2, 6)
) -> None:
    """Gates that keep more from head to head and from layer to layer, of the mixer and of a memory."""
    numbers = {"retention": 0.5, "lowest": 0.1, "highest": 1.0, "channels": float(channels), "memory": 0.9}
    _numbers(recorder, "gates", 0, 100, **numbers)
    for metric, each in (("retention", heads * channels), ("memory", heads)):
        recorder.examples(
            [
                Example(
                    probe="gates", metric=metric, item=layer, position=step,
                    value=1 - 0.5 ** (1 + layer + step + 4 * share) if step or layer > 2 else 1.0,
                )
                for layer in layers
                for step in range(each)
            ]
        )  # fmt: skip


def gate_dynamics(
    recorder: DatabaseRecorder, share: float, *, channels: int = 4, heads: int = 2, layers: tuple[int, ...] = (2, 6),
    tokens: int = 32, bin: int = 8,
) -> None:  # fmt: skip
    """Gates that keep more the higher their index; the first one never closes, the last one at every fourth to sixth token."""
    fields: dict[str, Any] = {"probe": "gate_dynamics"}
    gates_per_layer = heads * channels
    examples = []
    for layer in layers:
        for index in range(gates_per_layer):
            spread = 0.3 * index / gates_per_layer * (1 - layer / 12)
            examples.append(
                Example(**fields, metric="mean", item=layer, position=index, value=1 - spread * (0.5 + share / 4))
            )
            examples.append(Example(**fields, metric="spread", item=layer, position=index, value=spread))
        for index in range(tokens // bin):
            value = 1 - 0.3 * (1 - 0.4 * share) * (1 - layer / 12) * (1 - index * bin / tokens / 3)
            examples.append(Example(**fields, metric="bin", item=layer, position=index, value=value))
        for rank, index in enumerate((0, gates_per_layer - 1)):
            for token in range(tokens):
                detail = {"head": index // channels, "channel": index % channels, "token": token}
                value = 0.4 + layer / 20 if rank and token % (4 + layer % 3) == 3 else 1 - rank / 20
                position = rank * tokens + token
                examples.append(
                    Example(**fields, metric="trace", item=layer, position=position, value=value, detail=detail)
                )
        for position, (power, threshold) in enumerate(itertools.product(range(5), (1e-2, 1e-3, 1e-4))):
            # as if the slowest channel lost the same of a key at every token
            length, half_life = 64 << power, 20 * 2 ** (layer / 3) * (1 + share)
            faded = max(0.0, 1 - half_life * -math.log2(threshold) / length)
            detail = {"length": length, "threshold": threshold}
            examples.append(
                Example(**fields, metric="evictable", item=layer, position=position, value=faded, detail=detail)
            )
    recorder.examples(examples)
    numbers = {
        "mean": 0.9,
        "spread": 0.1,
        "always_on": 0.1,
        "bin": float(bin),
        "trace": float(tokens),
        "evictable": 0.4,
    }
    # two texts of 1,024 tokens
    _numbers(recorder, "gate_dynamics", 0, 2048, **numbers, channels=float(channels))


def further_texts(recorder: DatabaseRecorder, length: int, loss: float, share: float) -> None:
    """Losses and digits on two texts, of which `code` is easier."""
    for text, shift in (("code", -0.5), ("books", 0.0)):
        _numbers(recorder, f"clean:{text}", length, 100, nats=loss + shift + 10 / length)
        _numbers(recorder, f"needle:{text}", length, 20, digit_accuracy=min(1.0, share * 64 / length + 0.1))
        position_nll(recorder, length, loss + shift, probe=f"position_nll:{text}")


def memory_recall(
    recorder: DatabaseRecorder,
    share: float,
    pairs: tuple[int, ...] = (2, 4, 8),
    *,
    heads: int = 2,
    layers: tuple[int, ...] = (2, 6),
    rows: int = 3,
) -> None:
    """Record memory recall, in context up to 4 pairs.

    Of n pairs, each head, layer and row holds `share` / n more than the one before.
    """
    examples, means = [], {}
    for metric, units, numbers in (
        ("share", [(layer, head) for layer in layers for head in range(heads)], pairs),
        ("context_share", [(row, 0) for row in range(rows)], pairs[:2]),
    ):
        each = heads if metric == "share" else 1
        results = [
            Example(
                probe="memory_recall", metric=metric, item=item, position=index * each + head,
                value=min(1.0, share * (1 + order) / n), detail={"pairs": n, "chance": 1 / n},
            )
            for index, n in enumerate(numbers)
            for order, (item, head) in enumerate(units)
        ]  # fmt: skip
        examples += results
        means[metric] = sum(result.value or 0 for result in results) / len(results)
    recorder.examples(examples)
    _numbers(recorder, "memory_recall", 0, len(examples), **means, pairs=2.0, context_pairs=1.5, context_chance=0.375)


def passkey(
    recorder: DatabaseRecorder, length: int, share: float, depths: tuple[float, ...] = (0.0, 0.5, 1.0), digits: int = 5
) -> None:
    """Four trials, of whose digits about `share` are right at depth 0 and more at each further depth."""
    hits = {
        (trial, depth_index, digit): float(trial * digits + digit < 4 * digits * share + 3 * depth_index)
        for trial in range(4) for depth_index in range(len(depths)) for digit in range(digits)
    }  # fmt: skip
    fields: dict[str, Any] = {"probe": "passkey", "metric": "digit_accuracy", "length": length}
    recorder.examples(
        [
            Example(
                **fields,
                item=trial,
                position=depth_index * digits + digit,
                value=value,
                detail={"depth": depths[depth_index]},
            )
            for (trial, depth_index, digit), value in hits.items()
        ]
    )
    mean = sum(hits.values()) / len(hits)
    _numbers(
        recorder,
        "passkey",
        length,
        len(hits),
        digit_accuracy=mean,
        exact_accuracy=mean,
        nats=1.0,
        constant_accuracy=0.2,
    )


def attention_map(
    recorder: DatabaseRecorder, loss: float, size: int = 8, layers: tuple[int, ...] = (2, 6), heads: int = 2
) -> None:
    """Weights that fall with the distance to the query, the faster the higher the head."""
    fields: dict[str, Any] = {"probe": "attention_map", "metric": "keys"}
    examples = []
    for item, (layer, head) in enumerate((layer, head) for layer in layers for head in range(heads)):
        for query in range(size):
            raw = [(0.3 + head) ** -(key / loss) for key in range(query + 1)]
            weights = [weight / sum(raw) for weight in raw]
            keys = 1 / sum(weight**2 for weight in weights)
            detail = {"layer": layer, "head": head, "weights": weights}
            examples.append(Example(**fields, item=item, position=query, value=keys, detail=detail))
    recorder.examples(examples)
    _numbers(recorder, "attention_map", 0, len(examples), keys=2.0, row_sum=1.0)


def position_nll(
    recorder: DatabaseRecorder, length: int, loss: float, run: int = 16, documents: int = 3, probe: str = "position_nll"
) -> None:
    """A loss that falls with the place, documents apart by 0.1; the last run is shorter where `run` does not divide `length`."""
    fields: dict[str, Any] = {"probe": probe, "metric": "nats", "length": length}
    bins = range(-(-length // run))
    recorder.examples(
        [
            Example(**fields, item=item, position=bin_index, value=loss + 1 / (bin_index + 1) + item / 10)
            for item in range(documents)
            for bin_index in bins
        ]
    )
    _numbers(recorder, probe, length, documents, nats=loss, end_nats=loss, bin=float(run))
