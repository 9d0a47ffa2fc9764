"""Passkey probe: recall of a value by its depth in a text and the length of that (docs/reference/mechanisms.md, "Passkey")."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import model_validator

from ...model.bounds import MAX_COUNT, MAX_DIGITS, MAX_INT64, MAX_LENGTH
from ...model.config import Float, Int, knob
from ...results import metrics
from ...results.intervals import wilson_of_trials
from .base import ProbeConfig, Prompt, Result
from .needle import DigitsRecalled, NeedleTrial, constant_share, draw_trial, value_tokens

if TYPE_CHECKING:
    from ..data.corpora import Corpus
    from ..data.tokenizer import Tokenizer
    from .subject import CellSubject

MAGIC_NAMES = ("amber", "copper", "harbor", "meadow", "orchid", "winter")
"""Words of the cues for kind niah."""
GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Repeated sentences of the filler "grass"."""


class PasskeyConfig(ProbeConfig):
    """Settings of the probe passkey."""

    kind: Literal["passkey", "niah"] = knob(
        "passkey", "Value to recall: the access code of a record's number, or the magic number of one of six words."
    )
    filler: Literal["documents", "grass"] = knob(
        "documents", "Surrounding text: held-out documents, or five short sentences that repeat."
    )
    depths: tuple[Float, ...] = knob(
        (0.0, 0.25, 0.5, 0.75, 1.0), "Depths of the value, as shares of the text before it, rising within 0 to 1."
    )
    trials: Int = knob(8, "Trials at each depth and length.", ge=1, le=MAX_COUNT)
    digits: Int = knob(5, "Digits to be recalled.", ge=1, le=MAX_DIGITS)
    generate: Int = knob(
        0,
        "Tokens that the network writes after each question, the most likely one each time; an answer is right if the number occurs in them "
        "(match_accuracy). 0: none.",
        ge=0,
        le=MAX_LENGTH,
    )
    seed: Int = knob(
        1234, "Seed of the values; the same ones for every cell, depth and length.", ge=-MAX_INT64, le=MAX_INT64
    )

    @model_validator(mode="after")
    def _depths_rise(self) -> PasskeyConfig:
        """Return the settings; raise ValueError if the depths are empty, do not rise strictly, or leave 0 to 1."""
        depths = list(self.depths)
        if not depths or depths != sorted(set(depths)) or not 0 <= depths[0] <= depths[-1] <= 1:
            raise ValueError(f"depths must rise and lie between 0 and 1, got {depths}")
        return self


def make_hidden_values(config: PasskeyConfig) -> list[NeedleTrial]:
    """Return the trials of a config, in order, each drawn from seed, kind and its index alone.

    More trials thus keep the former ones. With the kind "niah" the cue names one of six words (MAGIC_NAMES), which take
    turns, instead of a record's number.
    """
    values = []
    for index in range(config.trials):
        trial = draw_trial(random.Random(f"{config.seed}/{config.kind}/{index}"), config.digits)
        if config.kind == "niah":
            trial = replace(trial, cue=f" The special magic {MAGIC_NAMES[index % len(MAGIC_NAMES)]} number is")
        values.append(trial)
    return values


def build_prompt(trial: NeedleTrial, text: np.ndarray, length: int, depth: float, tokenizer: Tokenizer) -> Prompt | int:
    """Return the prompt [EOT] text[:d] cue value text[d:n] cue value, of which the last value's digits are scored.

    The prompt has length + 1 tokens, of which the model reads `length`. n is the number of tokens left for the text,
    and d = floor(depth n).

    Args:
        trial: The trial.
        text: Tokens around the value, at least n.
        length: Context length in tokens.
        depth: Share of the text that precedes the value, 0 to 1.
        tokenizer: Tokenizer of the subject.

    Returns:
        The prompt, or the minimum context length (an int) if `length` is too short.
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
    """Accuracy of a value's digits at every depth and length, teacher-forced, by the token with the largest logit.

    An example is one digit of one trial (`item`) at one depth, which its detail names; `position` counts digits, depth
    by depth.
    """

    Config = PasskeyConfig
    metrics = metrics.metrics_of_probe("passkey")

    def tokens(self, length: int) -> int:
        """Return the tokens of one row per trial and depth, twice if the network also writes answers."""
        rows = int(self.settings.trials) * len(self.settings.depths)
        return rows * (2 * length + int(self.settings.generate) if self.settings.generate else length)

    def longest(self, corpus: Corpus) -> int | None:
        """Return the length that the shortest document allows; None for the filler of repeated sentences."""
        return None if self.settings.filler == "grass" else super().longest(corpus)

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return a message if the held-out documents are too few or too short, else None; sentences never are."""
        return None if self.settings.filler == "grass" else super().lack(corpus, length)

    def cast(self) -> list[NeedleTrial]:
        """Return the trials of the cell."""
        return make_hidden_values(self.settings)

    @property
    def questions(self) -> int:
        """Number of questions per trial at one length: one per depth."""
        return len(self.settings.depths)

    def detail(self, question: int) -> dict[str, Any]:
        """Return the depth of the question with that index."""
        return {"depth": float(self.settings.depths[question])}

    def run_at(self, subject: CellSubject, length: int) -> Result | str:
        """Return the measurements over all depths and the examples of `scored`, or a reason.

        The measurements are digit_accuracy, exact_accuracy, nats, constant_accuracy and, with `generate`,
        match_accuracy, each over all trials and depths. The reason is that the model cannot read the length, documents are missing or too short, or a prompt
        does not fit into the length.

        Args:
            subject: Model to be measured.
            length: Number of tokens that the model reads of a prompt.
        """
        if (reason := subject.beyond(length)) is not None:
            return reason
        if self.settings.filler == "documents" and (reason := subject.lacking(length)) is not None:
            return reason
        prompts = []
        for index, trial in enumerate(self.cast()):
            text = self._text(subject, index, length)
            for depth in self.settings.depths:
                prompt = build_prompt(trial, text, length, depth, subject.tokenizer)
                if isinstance(prompt, int):
                    return f"n/a: a value and its question take {prompt} tokens, more than the context of {length}"
                prompts.append(prompt)
        measured, examples = self.scored(length, subject.answers(prompts))
        share, n = constant_share(prompts)
        measured.append(self.value("constant_accuracy", share, length, n=n))
        if self.settings.generate:
            written = self._written(subject, prompts, length)
            measured, examples = [*measured, *written[0]], [*examples, *written[1]]
        return measured, examples

    def _written(self, subject: CellSubject, prompts: list[Prompt], length: int) -> Result:
        """Return match_accuracy, and whether each question's written answer holds its number as examples, or a reason.

        An example has the trial as `item` and the question as `position`. Spaces of the answer do not count.

        Args:
            subject: Network to be measured; it writes at full context, or as `eval.window` says.
            prompts: Questions with their answers, the questions of one trial after each other.
            length: Context length in tokens, for the record.
        """
        import torch

        from ...model.inference.decode import make_decoder
        from ...model.inference.generation import generate_tokens

        new, trials = int(self.settings.generate), self.cast()
        if (reason := subject.beyond(length + new)) is not None:
            return [self.missing(reason, length, "match_accuracy")], []
        decoder = make_decoder(subject.model, tokens=length + new, full_context=self.config.eval.window == "full")

        def is_right(index: int) -> bool:
            """Return True if the answer to the prompt with that index holds the digits of its trial in a row."""
            subject.pause()
            trial, tokenizer = trials[index // self.questions], subject.tokenizer
            value, _ = value_tokens(trial.value, tokenizer)
            question = torch.from_numpy(prompts[index].tokens[: -len(value)].astype(np.int64))
            tokens = generate_tokens(
                subject.model, question, tokens=new, temperature=0, vocabulary=tokenizer.vocabulary, decoder=decoder
            )
            answer = b"".join(map(tokenizer.token_bytes, tokens)).replace(b" ", b"")
            return trial.value.replace(" ", "").encode() in answer

        hits = subject.ranks.map(is_right, range(len(prompts)))
        share = sum(hits) / len(hits)
        low, high = wilson_of_trials(share, len(trials))
        examples = []
        for index, hit in enumerate(hits):
            item, question = divmod(index, self.questions)
            example = self.example("match_accuracy", float(hit), length, item=item, position=question)
            examples.append(replace(example, detail=self.detail(question)))
        return [self.value("match_accuracy", share, length, n=len(hits), low=low, high=high)], examples

    def _text(self, subject: CellSubject, index: int, length: int) -> np.ndarray:
        """Return the tokens around a trial's value: a document without its end-of-text token, or repeated sentences.

        Args:
            subject: Model to be measured.
            index: Index of the trial, which selects the document, modulo their number.
            length: Maximum number of tokens.
        """
        if self.settings.filler == "documents":
            return subject.documents[index % self.config.eval.documents][1 : length + 1]
        once = subject.tokenizer.encode(GRASS)
        return np.tile(once, -(-length // len(once)))[:length]
