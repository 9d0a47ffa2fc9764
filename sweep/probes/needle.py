"""Induction needle: recall of digits by their key across a long gap (docs/reference/mechanisms.md, "Induction needle")."""

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
from ...results.intervals import wilson_of_trials
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
        1234, "Seed of the needles' keys and digits, which are the same for every cell.", ge=-MAX_INT64, le=MAX_INT64
    )


@dataclass(frozen=True)
class NeedleTrial:
    """Digits to be recalled, with the cue that precedes them."""

    cue: str
    """Text that precedes the digits, in the needle and in the question."""
    digits: tuple[int, ...]

    @property
    def value(self) -> str:
        """Text of the digits, each preceded by a space."""
        return "".join(f" {digit}" for digit in self.digits)


def draw_trial(draw: random.Random, digits: int) -> NeedleTrial:
    """Draw the seven-digit number of a record and its access code of `digits` digits."""
    key = draw.randint(10**6, 10**7 - 1)
    return NeedleTrial(f" The access code for record {key} is", tuple(draw.randint(0, 9) for _ in range(digits)))


def make_trials(config: NeedleConfig) -> list[NeedleTrial]:
    """Return the trials of a config: the same keys and digits for every cell and length."""
    draw = random.Random(config.seed)
    return [draw_trial(draw, config.digits) for _ in range(config.trials)]


def value_tokens(text: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens of a value, indices in it of the tokens that contain a decimal digit), the indices int64.

    The start token is not included.
    """
    value = tokenizer.encode(text)
    digit = np.array([any(48 <= byte <= 57 for byte in tokenizer.token_bytes(int(token))) for token in value])
    return value, np.flatnonzero(digit)


def build_prompt(
    trial: NeedleTrial, haystack: np.ndarray, gap: int, tokenizer: Tokenizer, *, absent: bool = False
) -> Prompt:
    """Return the prompt [EOT] cue value haystack[:gap] cue value, of which the digits of the last value are scored.

    Args:
        trial: The trial.
        haystack: Tokens between needle and question, in tokens of the subject. A shorter one shortens the prompt.
        gap: Number of tokens of the haystack to use.
        tokenizer: Tokenizer of the subject.
        absent: Replace the first cue and value by as many further tokens of the haystack, so that the length stays.
    """
    eot, cue = np.array([tokenizer.eot], dtype=haystack.dtype), tokenizer.encode(trial.cue)
    value, digits = value_tokens(trial.value, tokenizer)
    needle = np.concatenate([cue, value])
    front = [haystack[: gap + len(needle)]] if absent else [needle, haystack[:gap]]
    tokens = np.concatenate([eot, *front, cue, value])
    return Prompt(tokens, len(tokens) - len(value) + digits)


def constant_share(prompts: list[Prompt]) -> tuple[float, int]:
    """Return (score of the best constant token, number of scored tokens) over all prompts.

    The score is the share of the most frequent token among the scored ones.

    Args:
        prompts: Prompts with at least one scored token.
    """
    scored_tokens = np.concatenate([prompt.tokens[prompt.scored] for prompt in prompts])
    return float(np.unique(scored_tokens, return_counts=True)[1].max() / len(scored_tokens)), len(scored_tokens)


def steps_per_digit(needle_trials: Sequence[NeedleTrial], tokenizer: Tokenizer) -> float:
    """Return the mean number of tokens per digit with its space, of which one is scored."""
    return sum(len(tokenizer.encode(t.value)) for t in needle_trials) / sum(len(t.digits) for t in needle_trials)


class DigitsRecalled(DocumentProbe):
    """Base class of probes that ask for the digits of trials which a text contains; answers are teacher-forced.

    An example is one digit of one trial.
    """

    divided = True

    @abstractmethod
    def cast(self) -> list[NeedleTrial]:
        """Return the trials of the cell."""

    @property
    def questions(self) -> int:
        """Number of questions per trial at one length."""
        return 1

    def detail(self, question: int) -> dict[str, Any] | None:
        """Return what is stored next to each digit of the question with that index; None for nothing."""
        return None

    def chance(self, metric: Metric) -> float | None:
        """Return the best score of a constant digit: the share of the most frequent digit over all trials of the cell.

        That is for `digit_accuracy`; other metrics have their own chance.
        """
        if metric.name != "digit_accuracy":
            return metric.chance
        digit_counts = Counter(digit for trial in self.cast() for digit in trial.digits)
        return max(digit_counts.values()) / digit_counts.total()

    def description(self, metric: str) -> dict[str, Any] | None:
        """Return the facts of `Probe.description`, with "trials" where that differs from results/metrics.py.

        "trials" is the number of answers per trial: questions times digits for `digit_accuracy`, questions for
        `exact_accuracy`. The result is None if there is nothing to store.
        """
        facts = super().description(metric) or {}
        answers = {
            "digit_accuracy": self.questions * int(self.settings.digits),
            "exact_accuracy": self.questions,
            "match_accuracy": self.questions,
        }
        if metric in answers and answers[metric] != self.metric(metric).trials:
            facts["trials"] = answers[metric]
        return facts or None

    def scored(self, length: int, results: list[tuple[Tensor, Tensor]]) -> Result:
        """Return `digit_accuracy`, `exact_accuracy` and `nats`, in this order, and examples.

        The accuracies are the shares of right digits and of questions with all digits right. Their Wilson intervals
        count trials, not digits. `nats` is the mean cross-entropy over all digits.

        An example is one digit: the metric `digit_accuracy` (1 or 0) or `nats`, `item` the trial, `position` the digit,
        counted through all questions of the trial.

        Args:
            length: The context length in tokens, for the record.
            results: For every question of every trial, (is_argmax, loss in nats) of each digit, both [digits]. The
                questions of one trial follow each other.
        """
        import torch

        right = torch.cat([hit for hit, _ in results])
        exact = torch.stack([hit.all() for hit, _ in results])
        losses = torch.cat([loss for _, loss in results]).double()

        def accuracy(metric: str, hits: Tensor) -> Measurement:
            share = float(hits.double().mean())
            # questions of one trial share its digits, so they are no independent trials
            low, high = wilson_of_trials(share, len(results) // self.questions)
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
    """Recall of digits at each gap: accuracy per digit and of complete answers, and cross-entropy.

    The gap is the number of tokens of the corpus between needle and question, and is the context length of the numbers.
    Accuracies have Wilson intervals over trials.

    At the shortest of `eval.lengths` it adds `absent_nats`, the cross-entropy without a needle. That reference value is
    measured once, so it can stand at another length than the shortest of a later evaluation.

    `constant_accuracy` depends on trials and tokenizer, not on the network: an accuracy at or below it is no evidence
    of retrieval.
    """

    Config = NeedleConfig
    reads_texts = True
    metrics, more_of_others = metrics.by_subject("needle")
    of_any = True

    def cast(self) -> list[NeedleTrial]:
        return make_trials(self.settings)

    def tokens(self, length: int) -> int:
        """Return the tokens of one row per trial; the few tokens of the needle are not counted."""
        return int(self.settings.trials) * length

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the measurements at one gap and the examples of `scored`, or a reason.

        The measurements are digit_accuracy, exact_accuracy, nats, absent_nats (at the shortest length alone),
        constant_accuracy and, for an external model, steps_per_digit. The reason is that documents are missing or too
        short, or that the model cannot read the prompt.

        Args:
            subject: Model to be measured.
            length: Gap in tokens of the corpus.
        """
        needle_trials = self.cast()
        if (reason := subject.lacking(length)) is not None:
            return reason
        prompts = self._prompts(subject, needle_trials, length)
        if (reason := subject.beyond(max(len(prompt.tokens) for prompt in prompts) - 1)) is not None:
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
        """Return a prompt per trial, in order; trial i takes its haystack from document i modulo `eval.documents`.

        Args:
            subject: Model to be measured.
            needle_trials: The trials.
            length: Gap in tokens of the corpus.
            absent: Leave the needle out; the haystack is longer by as many tokens.
        """
        prompts = []
        for index, trial in enumerate(needle_trials):
            needle_tokens = subject.tokens_of(trial.cue) + subject.tokens_of(trial.value) if absent else 0
            hay = subject.haystack(index % self.config.eval.documents, length + needle_tokens)
            prompts.append(build_prompt(trial, hay, len(hay), subject.tokenizer, absent=absent))
        return prompts

    def _absent_nats(self, subject: Subject, needle_trials: list[NeedleTrial], length: int) -> Measurement:
        """Return the mean cross-entropy of the digits without a needle, in nats, as the measurement `absent_nats`.

        The haystack is longer by the needle's tokens. Without documents of that length the measurement has a reason
        instead of a value.
        """
        import torch

        longest = max(subject.tokens_of(t.cue) + subject.tokens_of(t.value) for t in needle_trials)
        reason = subject.lacking(length + longest)
        if reason is not None:
            return self.missing(reason, length, "absent_nats")
        prompts = self._prompts(subject, needle_trials, length, absent=True)
        losses = torch.cat([loss for _, loss in subject.answers(prompts)])
        return self.value("absent_nats", float(losses.double().mean()), length, n=len(losses))
