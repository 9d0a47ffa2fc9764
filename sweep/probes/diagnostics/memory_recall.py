"""Capacity of a memory: random pairs written and read back (docs/reference/mechanisms.md, "Memory recall")."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from ....model.bounds import MAX_COUNT, MAX_INT64, MAX_WIDTH
from ....model.config import Int, knob
from ....results import metrics
from ....results.metrics import Metric
from ...data.builtin.mqar import NAME as MQAR
from ...data.builtin.mqar import MqarConfig, MqarRows, settings_of
from ...data.builtin.mqar import mark_answers as mark_answers
from ..base import LengthwiseProbe, ProbeConfig, Prompt, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..subject import CellSubject

CAPACITY_THRESHOLD = 0.9
"""Share of a number of pairs that must be recalled for these pairs to count as stored."""
MAX_HEAD_SIZES = 4
"""Maximum number of pairs by default, in multiples of the head size."""
VOCABULARY_SAMPLE = 1 << 18
"""Tokens at the start of the validation split from which the vocabulary of the rows is taken."""


class MemoryRecallConfig(ProbeConfig):
    """Settings of the probe memory_recall."""

    pairs: tuple[Annotated[Int, Field(le=MAX_WIDTH)], ...] = knob(
        (), "Numbers of pairs, rising; empty: the powers of two from 2 to four times the head size."
    )
    draws: Int = knob(16, "Draws of keys and values for the memory alone, at each number of pairs.", ge=1, le=MAX_COUNT)
    rows: Int = knob(
        32, "Rows of pairs and questions for the whole network, at each number of pairs.", ge=1, le=MAX_COUNT
    )
    text: Int = knob(
        8,
        "Rows of the validation split, of the training length, over which a memory's write strengths and decays are averaged.",
        ge=1,
        le=MAX_COUNT,
    )
    seed: Int = knob(1234, "Seed of all pairs; the same ones for every cell.", ge=0, le=MAX_INT64)

    @model_validator(mode="after")
    def _pairs_rise(self) -> MemoryRecallConfig:
        """Return the settings; raise ValueError if the numbers of pairs do not rise strictly or begin below 2."""
        if list(self.pairs) != sorted(set(self.pairs)) or (self.pairs and self.pairs[0] < 2):
            raise ValueError(f"pairs must rise from 2 or more, got {list(self.pairs)}")
        return self


class _QuestionRows(NamedTuple):
    """Prompts of rows with one number of pairs, and the score of a random value of the row."""

    prompts: list[Prompt]
    """A prompt per row."""
    chance: float
    """Probability that a random value of the row is right."""


def recall_capacity(pairs: Sequence[int], shares: Sequence[float]) -> float:
    """Return the number of pairs at which the recalled share first falls below 0.9, not rounded.

    It is interpolated linearly over log2 of the pairs between the last number at or above the threshold and the first
    below it. 1 pair always counts as recalled. If the share never falls so far, it is the largest number; without
    numbers it is 1.

    Args:
        pairs: Numbers of pairs, rising.
        shares: Recalled share at each, 0 to 1.
    """
    pairs_before, share_before = 1.0, 1.0
    for number, next_share in zip(pairs, shares, strict=True):
        if next_share < CAPACITY_THRESHOLD:
            return pairs_before * (number / pairs_before) ** (
                (share_before - CAPACITY_THRESHOLD) / (share_before - next_share)
            )
        pairs_before, share_before = float(number), next_share
    return pairs_before


class MemoryRecall(LengthwiseProbe):
    """Recalled shares as means over the numbers of pairs, and the capacity that follows from the share at each.

    Examples of `share` are a head (`position`) of a layer (`item`) at one number of pairs, which their detail names, in
    the order of the numbers. Those of `pairs` are a head of a layer, those of `context_share` one row (`item`) at one
    number of pairs (`position`).
    """

    Config = MemoryRecallConfig
    metrics = metrics.metrics_of_probe("memory_recall")

    @property
    def pair_counts(self) -> tuple[int, ...]:
        """Numbers of pairs, rising: those of the settings, or the powers of 2 from 2 to at most four times the head size."""
        max_pairs = MAX_HEAD_SIZES * self.config.model.head_dim
        return tuple(self.settings.pairs) or tuple(2**power for power in range(1, int(math.log2(max_pairs)) + 1))

    def tokens(self, length: int) -> int:
        """Return the tokens of the text and of the rows with questions.

        The pairs for the memory alone do not go through the network and are not counted.
        """
        rows = sum(self._row_tokens(pairs) for pairs in self.pair_counts)
        return int(self.settings.text) * self.config.train.seq_len + int(self.settings.rows) * rows

    def chance(self, metric: Metric) -> float | None:
        """Return the score of a random value in this cell, or None.

        For `share` it is the mean of 1 / pairs over the numbers of pairs. Other metrics have their own chance.
        """
        return float(np.mean([1 / pairs for pairs in self.pair_counts])) if metric.name == "share" else metric.chance

    def run_at(self, subject: CellSubject, length: int) -> Result:
        """Return the measurements of the memory alone, then those of the network, and the examples of both.

        They are share and pairs, then context_share, context_pairs and context_chance. Each of the two groups can have
        a reason instead of values.

        Args:
            subject: Network to be measured.
            length: Ignored; numbers are recorded with length 0.
        """
        memory_measurements, head_examples = self._measure_memory(subject)
        network_measurements, row_examples = self._measure_network(subject)
        return [*memory_measurements, *network_measurements], [*head_examples, *row_examples]

    # --- the memory alone -----------------------------------------------------------------------------------------

    def _measure_memory(self, subject: CellSubject) -> Result:
        """Return `share` and `pairs` of the memory alone with examples, or both with a reason and none.

        The reason is that there is no memory, that it lacks a method, that the validation split is too short, or that
        the network cannot read the training length.
        """
        from .memory_state import average_rates, missing_methods_reason, recall_by_head

        rows = subject.validation_rows(int(self.settings.text))
        reason = missing_methods_reason(subject.model, "read_rates", "write", "answer")
        reason = reason or (rows if isinstance(rows, str) else subject.beyond(rows.size(1)))
        if reason is not None or isinstance(rows, str):
            return [self.missing(str(reason), metric=metric.name) for metric in self.metrics[:2]], []
        rates, draw_options = average_rates(subject, rows), (int(self.settings.draws), int(self.settings.seed))
        shares = {pairs: recall_by_head(subject, rates, pairs, *draw_options) for pairs in self.pair_counts}
        return self._head_result(shares)

    def _head_result(self, shares: Mapping[int, dict[int, Tensor]]) -> Result:
        """Return `share` and `pairs` (capacity) of the memory, and both of every head as examples.

        `share` is the mean over numbers of pairs of the mean over layers and heads. `pairs` follows from these means
        per number. The examples of `share` have "pairs", "head" and "chance" as detail.

        Args:
            shares: Recalled share of each head [H], by number of pairs (rising) and layer.
        """
        examples = []
        for index, (pairs, layers) in enumerate(shares.items()):
            for layer, share_H in layers.items():
                for head, share in enumerate(share_H.tolist()):
                    position = index * len(share_H) + head
                    detail = {"pairs": pairs, "head": head, "chance": 1 / pairs}
                    example = self.example("share", share, item=layer, position=position)
                    examples.append(replace(example, detail=detail))
        means = [float(np.mean([share_H.mean() for share_H in layers.values()])) for layers in shares.values()]
        numbers = list(shares)
        for layer, first in shares[numbers[0]].items():
            for head in range(len(first)):
                capacity = recall_capacity(numbers, [float(layers[layer][head]) for layers in shares.values()])
                examples.append(self.example("pairs", capacity, item=layer, position=head))
        n = int(self.settings.draws) * sum(numbers)
        return [
            self.value("share", float(np.mean(means)), n=n),
            self.value("pairs", recall_capacity(numbers, means), n=n),
        ], examples

    # --- the complete network -------------------------------------------------------------------------------------

    def _measure_network(self, subject: CellSubject) -> Result:
        """Return the recall of the complete network in context, or measurements with a reason.

        The metrics are `context_share`, `context_pairs` and `context_chance`, each a mean over the numbers of pairs but
        `context_pairs`, the capacity. The numbers of pairs end at the first for which the text or corpus has too few
        tokens or keys. The reason is that already the first is too large, or that the network cannot read the longest
        row. The attention window of training applies.
        """
        questions: dict[int, _QuestionRows] = {}
        reason = None
        for pairs in self.pair_counts:
            rows_or_reason = self._question_rows(subject, pairs)
            if isinstance(rows_or_reason, str):
                # the corpus, which all cells share, allows no larger number
                reason = None if questions else rows_or_reason
                break
            questions[pairs] = rows_or_reason
        # a mean over fewer numbers would not be comparable with other networks
        reason = reason or subject.beyond(self._row_tokens(max(questions)))
        if reason is not None:
            return [self.missing(reason, metric=metric.name) for metric in self.metrics[2:]], []
        shares, examples = [], []
        for index, (pairs, question_rows) in enumerate(questions.items()):
            # the attention window of training applies, so that answers beyond it need the memory
            answers = subject.answers(question_rows.prompts, full_context=False)
            rows = [float(hits.double().mean()) for hits, _ in answers]
            shares.append(float(np.mean(rows)))
            detail = {"pairs": pairs, "chance": question_rows.chance}
            for item, share in enumerate(rows):
                example = self.example("context_share", share, item=item, position=index)
                examples.append(replace(example, detail=detail))
        n = sum(len(prompt.scored) for question_rows in questions.values() for prompt in question_rows.prompts)
        return [
            self.value("context_share", float(np.mean(shares)), n=n),
            self.value("context_pairs", recall_capacity(list(questions), shares), n=n),
            self.value(
                "context_chance", float(np.mean([question_rows.chance for question_rows in questions.values()])), n=n
            ),
        ], examples

    @property
    def _corpus(self) -> MqarConfig | None:
        """Settings of the corpus mqar, if that is the cell's corpus, whose rows then give the questions; else None."""
        return settings_of(self.config.data) if self.config.data.corpus == MQAR else None

    def _row_tokens(self, pairs: int) -> int:
        """Return the tokens that the network reads of a row with that many pairs."""
        corpus = self._corpus
        return 4 * pairs if corpus is None else max(corpus.length, 4 * pairs + 2)

    def _question_rows(self, subject: CellSubject, pairs: int) -> _QuestionRows | str:
        """Return the rows with that many pairs, or the reason why there are none.

        They are rows of the corpus mqar if that is the cell's corpus, else rows of random tokens of its text.
        """
        return self._text_rows(subject, pairs) if self._corpus is None else self._corpus_rows(self._corpus, pairs)

    def _corpus_rows(self, corpus: MqarConfig, pairs: int) -> _QuestionRows | str:
        """Return rows of the corpus mqar with that many pairs, lengthened where necessary, or a reason as text.

        The rows are drawn for the split "recall" with the seed of the probe, so they are none of the corpus. The
        chance, 1 / pairs + (1 - 1 / pairs) / values, also counts other pairs with the same value. The reason is that
        the corpus has fewer keys.
        """
        if pairs > corpus.keys:
            return f"n/a: the corpus has {corpus.keys} keys, fewer than {pairs} pairs need"
        changes = {"pairs": pairs, "length": self._row_tokens(pairs), "seed": int(self.settings.seed)}
        stream = MqarRows(int(self.settings.rows), corpus.model_copy(update=changes), split="recall")
        rows = stream.made(np.arange(stream.rows))
        prompts = [Prompt(row, np.flatnonzero(mark)) for row, mark in zip(rows, mark_answers(rows, pairs), strict=True)]
        # another pair may have the same value
        return _QuestionRows(prompts, 1 / pairs + (1 - 1 / pairs) / corpus.values)

    def _text_rows(self, subject: CellSubject, pairs: int) -> _QuestionRows | str:
        """Return rows [EOT] k v k v ..., then every key in another order with its value, or a reason as text.

        Keys and values are distinct tokens of the first 262,144 tokens (VOCABULARY_SAMPLE) of the validation split,
        because a network is not trained on others. The values of the questions are scored. The reason is that there are
        too few different tokens.
        """
        vocabulary = np.unique(np.asarray(subject.corpus.validation[:VOCABULARY_SAMPLE]))
        tokens = vocabulary[vocabulary != subject.tokenizer.eot]
        if len(tokens) < 2 * pairs:
            return f"n/a: the text has {len(tokens)} different tokens, fewer than {pairs} pairs need"
        prompts = []
        for row in range(int(self.settings.rows)):
            draw = random.Random(f"{self.settings.seed}/{pairs}/{row}")
            key_values = tokens[draw.sample(range(len(tokens)), 2 * pairs)].reshape(pairs, 2)
            questions = key_values[draw.sample(range(pairs), pairs)]
            prompt_tokens = np.concatenate([[subject.tokenizer.eot], key_values.ravel(), questions.ravel()])
            prompts.append(Prompt(prompt_tokens, np.arange(2 * pairs + 2, 4 * pairs + 1, 2)))
        return _QuestionRows(prompts, 1 / pairs)
