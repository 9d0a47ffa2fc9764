"""Induction needle: a key-value pair, a long gap, the key again; are the digits recalled? (docs/mechanisms.md, "Induction needle")"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...model.bounds import MAX_COUNT, MAX_DIGITS, MAX_INT64
from ...model.config import Int, knob
from ...results import metrics
from ...results.intervals import of_trials
from ...results.metrics import Metric
from ...results.store.records import Measurement
from .base import DocumentProbe, ProbeConfig, Prompt, Result

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.tokenizer import Tokenizer
    from .subject import Subject


class NeedleConfig(ProbeConfig):
    """Settings of the needle probe."""

    trials: Int = knob(16, "Trials of the needle probe at each length.", ge=1, le=MAX_COUNT)
    digits: Int = knob(5, "Digits to be recalled.", ge=1, le=MAX_DIGITS)
    seed: Int = knob(
        1234, "Seed of the needle keys and digits; the same needles for every cell.", ge=-MAX_INT64, le=MAX_INT64
    )


@dataclass(frozen=True)
class NeedleTrial:
    """Digits to be recalled, and the words that they follow."""

    cue: str
    digits: tuple[int, ...]

    @property
    def value(self) -> str:
        """The digits, each led by a space."""
        return "".join(f" {digit}" for digit in self.digits)


def draw_trial(draw: random.Random, digits: int) -> NeedleTrial:
    """Draw the number of a record, and its access code."""
    key = draw.randint(10**6, 10**7 - 1)
    return NeedleTrial(f" The access code for record {key} is", tuple(draw.randint(0, 9) for _ in range(digits)))


def trials(config: NeedleConfig) -> list[NeedleTrial]:
    """The same keys and digits for every cell and every length."""
    draw = random.Random(config.seed)
    return [draw_trial(draw, config.digits) for _ in range(config.trials)]


def value_tokens(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a value, and the places among them of those that bear a digit."""
    value = tokenizer.encode(text)
    digit = np.array([any(48 <= byte <= 57 for byte in tokenizer.token_bytes(int(token))) for token in value])
    return value, np.flatnonzero(digit)


def build_prompt(
    trial: NeedleTrial, haystack: np.ndarray, gap: int, tokenizer: Tokenizer, *, absent: bool = False
) -> Prompt:
    """[EOT] cue value haystack[:gap] cue value; without the first pair, but as long, when `absent`."""
    eot, cue = np.array([tokenizer.eot], dtype=haystack.dtype), tokenizer.encode(trial.cue)
    value, digits = value_tokens(trial.value, tokenizer)
    needle = np.concatenate([cue, value])
    front = [haystack[: gap + len(needle)]] if absent else [needle, haystack[:gap]]
    tokens = np.concatenate([eot, *front, cue, value])
    return Prompt(tokens, len(tokens) - len(value) + digits)


def constant_share(prompts: list[Prompt]) -> tuple[float, int]:
    """What the one token that is right most often gets, answered everywhere, and of how many tokens."""
    scored_tokens = np.concatenate([prompt_.tokens[prompt_.scored] for prompt_ in prompts])
    return float(np.unique(scored_tokens, return_counts=True)[1].max() / len(scored_tokens)), len(scored_tokens)


def steps_per_digit(make_trials: Sequence[NeedleTrial], tokenizer: Tokenizer) -> float:
    """Tokens that a digit with its space takes, on average; the one that bears the digit is scored."""
    return sum(len(tokenizer.encode(t.value)) for t in make_trials) / sum(len(t.digits) for t in make_trials)


class DigitsRecalled(DocumentProbe):
    """A probe that asks for the digits of trials, which a text holds; digits are teacher-forced.

    An example is one digit of one trial.
    """

    @abstractmethod
    def cast(self) -> list[NeedleTrial]:
        """Return the trials of the cell."""

    @property
    def questions(self) -> int:
        """How often a trial is asked at one length."""
        return 1

    def detail(self, question: int) -> dict[str, Any] | None:
        """Return what is stored beside each digit of a trial's question of that number."""
        return None

    def chance(self, metric: Metric) -> float | None:
        """Of an answer that is the same digit everywhere, at best: the share of the digit that is asked for most often."""
        if metric.name != "digit_accuracy":
            return metric.chance
        digit_counts = Counter(digit for trial in self.cast() for digit in trial.digits)
        return max(digit_counts.values()) / digit_counts.total()

    def description(self, metric: str) -> dict[str, Any] | None:
        """How many answers a trial has, where they are not as results/metrics.py says."""
        facts = super().description(metric) or {}
        answers = {"digit_accuracy": self.questions * int(self.settings.digits), "exact_accuracy": self.questions}
        if metric in answers and answers[metric] != self.metric(metric).trials:
            facts["trials"] = answers[metric]
        return facts or None

    def scored(self, length: int, results: list[tuple[Tensor, Tensor]]) -> Result:
        """Return both accuracies with Wilson intervals over trials, the cross-entropy, and the digits one by one.

        Args:
            length: The context length.
            results: Of every question of every trial, whether each digit was right and its nats.
        """
        import torch

        right = torch.cat([hit for hit, _ in results])
        exact = torch.stack([hit.all() for hit, _ in results])
        losses = torch.cat([loss for _, loss in results]).double()

        def accuracy(metric: str, hits: Tensor) -> Measurement:
            share = float(hits.double().mean())
            # the digits of a trial are the same in each of its questions, so these are no trials of their own
            low, high = of_trials(share, len(results) // self.questions)
            return self.value(metric, share, length, n=len(hits), low=low, high=high)

        examples = []
        for row, (hits, loss) in enumerate(results):
            item, question = divmod(row, self.questions)
            for metric, values in (("digit_accuracy", hits), ("nats", loss)):
                for digit, value in enumerate(values):
                    position = question * len(values) + digit
                    example = self.example(metric, float(value), length, item=item, position=position)
                    examples.append(replace(example, detail=self.detail(question)))
        nats = self.value("nats", float(losses.mean()), length, n=len(losses))
        return [accuracy("digit_accuracy", right), accuracy("exact_accuracy", exact), nats], examples


class Needle(DigitsRecalled):
    """Per-digit and exact accuracy with Wilson intervals, both over trials, and cross-entropy, at each gap.

    At the shortest of `eval.lengths` also `absent_nats`, the cross-entropy without a needle: a reference value, measured
    once, and so the one number that stands at another length when a shorter one is asked for later.

    `constant_accuracy` is a fact of the trials and the tokenizer, not of the network: no accuracy at or below it shows that
    anything was retrieved.
    """

    Config = NeedleConfig
    metrics, more_of_others = metrics.by_subject("needle")
    of_any = True

    def cast(self) -> list[NeedleTrial]:
        return trials(self.settings)

    def tokens(self, length: int) -> int:
        """A row a trial; the few tokens of the needle are not counted."""
        return int(self.settings.trials) * length

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the numbers at one gap; an example is one digit of one trial."""
        needle_trials = self.cast()
        if (reason := subject.lacking(length)) is not None:
            return reason
        prompts = self._prompts(subject, needle_trials, length)
        if (reason := subject.beyond(max(len(prompt_.tokens) for prompt_ in prompts) - 1)) is not None:
            return reason
        measured, examples = self.scored(length, subject.answers(prompts))
        if length == min(self.config.eval.lengths):
            measured.append(self._absent_nats(subject, needle_trials, length))
        share, n = constant_share(prompts)
        measured.append(self.value("constant_accuracy", share, length, n=n))
        if subject.own_tokens:
            measured.append(
                self.value("steps_per_digit", steps_per_digit(needle_trials, subject.tokenizer), length, n=n)
            )
        return measured, examples

    def _prompts(
        self, subject: Subject, needle_trials: list[NeedleTrial], length: int, *, absent: bool = False
    ) -> list[Prompt]:
        """Trial by trial; without a needle the haystack takes its place, so it is longer."""
        prompts = []
        for index, trial in enumerate(needle_trials):
            needle_tokens = subject.tokens_of(trial.cue) + subject.tokens_of(trial.value) if absent else 0
            hay = subject.haystack(index % self.config.eval.documents, length + needle_tokens)
            prompts.append(build_prompt(trial, hay, len(hay), subject.tokenizer, absent=absent))
        return prompts

    def _absent_nats(self, subject: Subject, needle_trials: list[NeedleTrial], length: int) -> Measurement:
        """Cross-entropy of digits that stand nowhere else; the haystack takes the needle's place, so it must be longer."""
        import torch

        longest = max(subject.tokens_of(t.cue) + subject.tokens_of(t.value) for t in needle_trials)
        reason = subject.lacking(length + longest)
        if reason is not None:
            return self.missing(reason, length, "absent_nats")
        prompts = self._prompts(subject, needle_trials, length, absent=True)
        losses = torch.cat([loss for _, loss in subject.answers(prompts)])
        return self.value("absent_nats", float(losses.double().mean()), length, n=len(losses))
