"""Needle in a haystack by depth and length: a value stands once in a text and is asked for at its end (docs/mechanisms.md, "Passkey")."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import model_validator

from ...model.bounds import MAX_COUNT, MAX_DIGITS, MAX_INT64
from ...model.config import Float, Int, knob
from ...results import metrics
from ...results.intervals import of_trials
from ...results.metrics import Metric
from .base import OverDocuments, ProbeConfig, Prompt, Result
from .needle import constant_share, value_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from ...results.store.records import Example, Measurement
    from ..data.corpora import Corpus
    from ..data.tokenizer import Tokenizer
    from .subject import Subject

WORDS = ("amber", "copper", "harbor", "meadow", "orchid", "winter")
GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class PasskeyConfig(ProbeConfig):
    """Settings of the probe passkey."""

    kind: Literal["passkey", "niah"] = knob(
        "passkey", "What is asked for: the access code of a record's number, or the magic number of one of six words."
    )
    filler: Literal["documents", "grass"] = knob(
        "documents", "The text around it: held-out documents, or five short sentences again and again."
    )
    depths: tuple[Float, ...] = knob(
        (0.0, 0.25, 0.5, 0.75, 1.0), "Shares of the text that stand before the value, rising from 0 to 1."
    )
    trials: Int = knob(8, "Trials at each depth and length.", ge=1, le=MAX_COUNT)
    digits: Int = knob(5, "Digits to be recalled.", ge=1, le=MAX_DIGITS)
    seed: Int = knob(
        1234, "Seed of the values; the same ones for every cell, depth and length.", ge=-MAX_INT64, le=MAX_INT64
    )

    @model_validator(mode="after")
    def _depths_rise(self) -> PasskeyConfig:
        found = list(self.depths)
        if not found or found != sorted(set(found)) or not 0 <= found[0] <= found[-1] <= 1:
            raise ValueError(f"depths must rise and lie between 0 and 1, got {found}")
        return self


@dataclass(frozen=True)
class Hidden:
    """A value and the words before it, in the text and in the question."""

    cue: str
    digits: tuple[int, ...]

    @property
    def value(self) -> str:
        """The digits, each led by a space."""
        return "".join(f" {digit}" for digit in self.digits)


def hidden(config: PasskeyConfig) -> list[Hidden]:
    """The trials; each is a draw of its own from seed, kind and its number."""
    found = []
    for index in range(config.trials):
        draw = random.Random(f"{config.seed}/{config.kind}/{index}")
        key, digits = draw.randint(10**6, 10**7 - 1), tuple(draw.randint(0, 9) for _ in range(config.digits))
        cue = f"The access code for record {key} is"
        if config.kind == "niah":
            cue = f"The special magic {WORDS[index % len(WORDS)]} number is"
        found.append(Hidden(f" {cue}", digits))
    return found


def prompt(one: Hidden, text: np.ndarray, length: int, depth: float, tokenizer: Tokenizer) -> Prompt | int:
    """[EOT] text[:d] cue value text[d:] cue value, of which a network reads `length` tokens, all but the last.

    d = floor(depth n), n the tokens of text that this leaves room for. Where there is no room: the tokens that are needed.
    """
    eot, cue = np.array([tokenizer.eot], dtype=text.dtype), tokenizer.encode(one.cue)
    value, digits = value_tokens(one.value, tokenizer)
    n = length - 2 * (len(cue) + len(value))
    if n < 0:
        return length - n
    before = int(depth * n)
    tokens = np.concatenate([eot, text[:before], cue, value, text[before:n], cue, value])
    return Prompt(tokens, len(tokens) - len(value) + digits)


class Passkey(OverDocuments):
    """Digits of a value teacher-forced, by the token with the largest logit, at every depth and length.

    An example is one digit of one trial (`item`) at one depth, which its detail says; `position` counts digits, depth after depth.
    """

    Config = PasskeyConfig
    metrics = metrics.of_probe("passkey")

    def tokens(self, length: int) -> int:
        """A row a trial and depth."""
        return int(self.settings.trials) * len(self.settings.depths) * length

    def longest(self, corpus: Corpus) -> int | None:  # type: ignore[override]
        """That of the shortest of the documents; none of the sentences."""
        return None if self.settings.filler == "grass" else super().longest(corpus)

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Held-out documents, where these are the text."""
        return None if self.settings.filler == "grass" else super().lack(corpus, length)

    def chance(self, metric: Metric) -> float | None:
        """Of an answer that is the same digit everywhere, at best: the share of the digit that is asked for most often."""
        if metric.name != "digit_accuracy":
            return metric.chance
        asked = Counter(digit for trial in hidden(self.settings) for digit in trial.digits)
        return max(asked.values()) / asked.total()

    def description(self, metric: str) -> dict[str, Any] | None:
        """How many answers a trial has, where they are not as results/metrics.py says."""
        told = super().description(metric) or {}
        each = len(self.settings.depths)
        answers = {"digit_accuracy": each * int(self.settings.digits), "exact_accuracy": each}.get(metric)
        if answers is not None and answers != self.metric(metric).trials:
            told["trials"] = answers
        return told or None

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """The main number is over all depths."""
        cast = hidden(self.settings)
        for length in lengths:
            reason = subject.beyond(length) or (
                subject.lacking(length) if self.settings.filler == "documents" else None
            )
            prompts = [] if reason else self._prompts(subject, cast, length)
            if isinstance(prompts, int):
                reason = f"n/a: a value and its question take {prompts} tokens, more than a context of {length}"
            if reason is not None or isinstance(prompts, int):
                yield [self.missing(str(reason), length)], []
                continue
            measured, examples = self._scored(length, subject.answers(prompts))
            share, n = constant_share(prompts)
            yield [*measured, self.value("constant_accuracy", share, length, n=n)], examples

    def _prompts(self, subject: Subject, cast: list[Hidden], length: int) -> list[Prompt] | int:
        """Trial by trial, depth by depth; or the tokens that one needs which has no room."""
        found = []
        for index, one in enumerate(cast):
            text = self._text(subject, index, length)
            for depth in self.settings.depths:
                made = prompt(one, text, length, depth, subject.tokenizer)
                if isinstance(made, int):
                    return made
                found.append(made)
        return found

    def _text(self, subject: Subject, index: int, length: int) -> np.ndarray:
        """What stands around a trial's value: a document without the end-of-text token that leads it, or the sentences."""
        if self.settings.filler == "documents":
            return subject.documents[index % self.config.eval.documents][1 : length + 1]
        once = subject.tokenizer.encode(GRASS)
        return np.tile(once, -(-length // len(once)))[:length]

    def _scored(self, length: int, results: list[tuple[Tensor, Tensor]]) -> Result:
        """`results` are those of `_prompts`, in its order."""
        import torch

        depths, trials = self.settings.depths, int(self.settings.trials)
        losses = torch.cat([loss for _, loss in results]).double()
        right = torch.cat([hit for hit, _ in results])
        exact = torch.stack([hit.all() for hit, _ in results])

        def accuracy(metric: str, hits: Tensor) -> Measurement:
            share = float(hits.double().mean())
            # a trial's value is the same at every depth, so its answers are no trials of their own
            low, high = of_trials(share, trials)
            return self.value(metric, share, length, n=len(hits), low=low, high=high)

        examples: list[Example] = []
        for row, (hits, loss) in enumerate(results):
            item, place = divmod(row, len(depths))
            detail = {"depth": float(depths[place])}
            for metric, values in (("digit_accuracy", hits), ("nats", loss)):
                for digit, value in enumerate(values):
                    position = place * len(values) + digit
                    one = self.example(metric, float(value), length, item=item, position=position)
                    examples.append(replace(one, detail=detail))
        nats = self.value("nats", float(losses.mean()), length, n=len(losses))
        return [accuracy("digit_accuracy", right), accuracy("exact_accuracy", exact), nats], examples
