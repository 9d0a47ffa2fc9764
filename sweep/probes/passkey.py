"""Needle in a haystack by depth and length: a value stands once in a text and is asked for at its end (docs/mechanisms.md, "Passkey")."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import model_validator

from ...model.bounds import MAX_COUNT, MAX_DIGITS, MAX_INT64
from ...model.config import Float, Int, knob
from ...results import metrics
from .base import ProbeConfig, Prompt, Result
from .needle import DigitsRecalled, NeedleTrial, constant_share, draw_trial, value_tokens

if TYPE_CHECKING:
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
        depths = list(self.depths)
        if not depths or depths != sorted(set(depths)) or not 0 <= depths[0] <= depths[-1] <= 1:
            raise ValueError(f"depths must rise and lie between 0 and 1, got {depths}")
        return self


def make_hidden_values(config: PasskeyConfig) -> list[NeedleTrial]:
    """The trials; each is a draw of its own from seed, kind and its number."""
    values = []
    for index in range(config.trials):
        trial = draw_trial(random.Random(f"{config.seed}/{config.kind}/{index}"), config.digits)
        if config.kind == "niah":
            trial = replace(trial, cue=f" The special magic {WORDS[index % len(WORDS)]} number is")
        values.append(trial)
    return values


def build_prompt(trial: NeedleTrial, text: np.ndarray, length: int, depth: float, tokenizer: Tokenizer) -> Prompt | int:
    """[EOT] text[:d] cue value text[d:] cue value, of which a network reads `length` tokens, all but the last.

    d = floor(depth n), n the tokens of text that this leaves room for. Where there is no room: the tokens that are needed.
    """
    eot, cue = np.array([tokenizer.eot], dtype=text.dtype), tokenizer.encode(trial.cue)
    value, digits = value_tokens(trial.value, tokenizer)
    n_text = length - 2 * (len(cue) + len(value))
    if n_text < 0:
        return length - n_text
    before = int(depth * n_text)
    tokens = np.concatenate([eot, text[:before], cue, value, text[before:n_text], cue, value])
    return Prompt(tokens, len(tokens) - len(value) + digits)


class Passkey(DigitsRecalled):
    """Digits of a value teacher-forced, by the token with the largest logit, at every depth and length.

    An example is one digit of one trial (`item`) at one depth, which its detail says; `position` counts digits, depth after depth.
    """

    Config = PasskeyConfig
    metrics = metrics.metrics_of_probe("passkey")

    def tokens(self, length: int) -> int:
        """A row a trial and depth."""
        return int(self.settings.trials) * len(self.settings.depths) * length

    def longest(self, corpus: Corpus) -> int | None:  # type: ignore[override]
        """That of the shortest of the documents; none of the sentences."""
        return None if self.settings.filler == "grass" else super().longest(corpus)

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Held-out documents, where these are the text."""
        return None if self.settings.filler == "grass" else super().lack(corpus, length)

    def cast(self) -> list[NeedleTrial]:
        return make_hidden_values(self.settings)

    @property
    def questions(self) -> int:
        """One at each depth."""
        return len(self.settings.depths)

    def detail(self, question: int) -> dict[str, Any]:
        """Its depth."""
        return {"depth": float(self.settings.depths[question])}

    def run_at(self, subject: Subject, length: int) -> Result | str:
        """Return the numbers over all depths."""
        if (reason := subject.beyond(length)) is not None:
            return reason
        if self.settings.filler == "documents" and (reason := subject.lacking(length)) is not None:
            return reason
        prompts = []
        for index, trial in enumerate(self.cast()):
            text = self._text(subject, index, length)
            for depth in self.settings.depths:
                prompt_ = build_prompt(trial, text, length, depth, subject.tokenizer)
                if isinstance(prompt_, int):
                    return f"n/a: a value and its question take {prompt_} tokens, more than a context of {length}"
                prompts.append(prompt_)
        measured, examples = self.scored(length, subject.answers(prompts))
        share, n = constant_share(prompts)
        return [*measured, self.value("constant_accuracy", share, length, n=n)], examples

    def _text(self, subject: Subject, index: int, length: int) -> np.ndarray:
        """What stands around a trial's value: a document without the end-of-text token that leads it, or the sentences."""
        if self.settings.filler == "documents":
            return subject.documents[index % self.config.eval.documents][1 : length + 1]
        once = subject.tokenizer.encode(GRASS)
        return np.tile(once, -(-length // len(once)))[:length]
