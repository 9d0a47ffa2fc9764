"""Induction needle: a key-value pair, a long gap, the key again; are the digits recalled? (docs/mechanisms.md, "Induction needle")"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...results.intervals import wilson
from ...results.store.records import Example, Measurement
from ..config import EvalConfig
from ..data.tokenizer import Tokenizer
from . import Result
from .subject import Subject, unmeasured

ACCURACY = "fraction"


@dataclass(frozen=True)
class Trial:
    """One key and its digits."""

    key: int
    digits: tuple[int, ...]

    @property
    def cue(self) -> str:
        """The sentence that the value follows."""
        return f" The access code for record {self.key} is"

    @property
    def value(self) -> str:
        """The digits, each led by a space."""
        return "".join(f" {digit}" for digit in self.digits)


@dataclass(frozen=True)
class Prompt:
    """Token ids of one trial and where its answer stands."""

    tokens: np.ndarray
    """Whole sequence; the model reads all but the last token."""
    scored: np.ndarray
    """Positions in `tokens` of the digit-bearing tokens of the answer."""


def trials(config: EvalConfig) -> list[Trial]:
    """The same keys and digits for every cell and every length."""
    draw = random.Random(config.needle_seed)
    return [
        Trial(draw.randint(10**6, 10**7 - 1), tuple(draw.randint(0, 9) for _ in range(config.needle_digits)))
        for _ in range(config.needle_trials)
    ]


def _value_tokens(trial: Trial, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    value = tokenizer.encode(trial.value)
    digit = np.array([any(48 <= byte <= 57 for byte in tokenizer.token_bytes(int(token))) for token in value])
    return value, np.flatnonzero(digit)


def prompt(trial: Trial, haystack: np.ndarray, gap: int, tokenizer: Tokenizer, *, absent: bool = False) -> Prompt:
    """[EOT] cue value haystack[:gap] cue value; without the first pair, but as long, when `absent`."""
    eot, cue = np.array([tokenizer.eot], dtype=haystack.dtype), tokenizer.encode(trial.cue)
    value, digits = _value_tokens(trial, tokenizer)
    needle = np.concatenate([cue, value])
    front = [haystack[: gap + len(needle)]] if absent else [needle, haystack[:gap]]
    tokens = np.concatenate([eot, *front, cue, value])
    return Prompt(tokens, len(tokens) - len(value) + digits)


@torch.no_grad()
def answers(subject: Subject, prompts: list[Prompt]) -> list[tuple[Tensor, Tensor]]:
    """For each prompt, teacher-forced: whether each scored token has the largest logit, and its loss in nats; both [digits]."""
    alike: dict[int, list[int]] = defaultdict(list)
    for index, one in enumerate(prompts):
        alike[len(one.tokens)].append(index)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for length, members in alike.items():
        for rows in subject.batches(len(members), length):
            part = members[rows]
            tokens = torch.from_numpy(np.stack([prompts[i].tokens for i in part]).astype(np.int64)).to(subject.device)
            hidden = subject.features(tokens[:, :-1])
            for row, index in enumerate(part):
                at = torch.from_numpy(prompts[index].scored).to(subject.device)
                logits = subject.model.logits(hidden[row, at - 1])
                target = tokens[row, at]
                loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
                found[index] = ((logits.argmax(-1) == target).cpu(), loss.cpu())
    return [found[index] for index in range(len(prompts))]


def needle(subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """Per-digit and exact accuracy with Wilson intervals, and cross-entropy, at each gap.

    At the shortest of `eval.lengths` also `absent_nats`, the cross-entropy without a needle: a reference value, measured
    once, and so the one number that stands at another length when a shorter one is asked for later.
    """
    config = subject.config.eval
    cast = trials(config)
    for length in lengths:
        reason = subject.lacking(length)
        if reason is not None:
            yield [unmeasured("needle", "digit_accuracy", length, ACCURACY, reason)], []
            continue
        hay = [subject.documents[index % config.documents] for index in range(len(cast))]
        prompts = [prompt(t, h, length, subject.tokenizer) for t, h in zip(cast, hay, strict=True)]
        reason = subject.beyond(max(len(one.tokens) for one in prompts) - 1)
        if reason is not None:
            yield [unmeasured("needle", "digit_accuracy", length, ACCURACY, reason)], []
            continue
        measured, examples = _score(length, answers(subject, prompts))
        if length == min(config.lengths):
            measured.append(_absent(subject, cast, hay, length))
        yield measured, examples


def _absent(subject: Subject, cast: list[Trial], hay: list[np.ndarray], length: int) -> Measurement:
    """Cross-entropy of digits that stand nowhere else; the haystack takes the needle's place, so it must be longer."""
    longest = max(len(subject.tokenizer.encode(t.cue)) + len(subject.tokenizer.encode(t.value)) for t in cast)
    reason = subject.lacking(length + longest)
    if reason is not None:
        return unmeasured("needle", "absent_nats", length, "nats/digit", reason)
    prompts = [prompt(t, h, length, subject.tokenizer, absent=True) for t, h in zip(cast, hay, strict=True)]
    losses = torch.cat([loss for _, loss in answers(subject, prompts)])
    value = float(losses.double().mean())
    return Measurement(
        probe="needle", metric="absent_nats", length=length, value=value, unit="nats/digit", n=len(losses)
    )


def _score(length: int, results: list[tuple[Tensor, Tensor]]) -> Result:
    right = torch.cat([hit for hit, _ in results])
    exact = torch.stack([hit.all() for hit, _ in results])
    losses = torch.cat([loss for _, loss in results]).double()

    def accuracy(metric: str, hits: Tensor) -> Measurement:
        low, high = wilson(float(hits.sum()), len(hits))
        share = float(hits.double().mean())
        return Measurement(
            probe="needle", metric=metric, length=length, value=share, unit=ACCURACY, n=len(hits), low=low, high=high
        )

    nats = Measurement(
        probe="needle", metric="nats", length=length, value=float(losses.mean()), unit="nats/digit", n=len(losses)
    )
    examples = [
        Example(probe="needle", metric=metric, length=length, item=item, position=position, value=float(value))
        for item, (hits, loss) in enumerate(results)
        for metric, values in (("digit_accuracy", hits), ("nats", loss))
        for position, value in enumerate(values)
    ]
    return [accuracy("digit_accuracy", right), accuracy("exact_accuracy", exact), nats], examples
