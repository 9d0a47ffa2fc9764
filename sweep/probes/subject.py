"""Subjects of probes: a model that reads text, above all a trained network of ours, with tokenizer, corpus and settings."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ...model.backbone import Backbone
from ...model.resolve import longest_text
from ...renamed import old_names
from ...results.console.text import counted
from ..config import CellConfig
from ..data.batches import stream_rows
from ..data.computed_rows import Rows
from ..data.corpora import Corpus
from ..data.tokenizer import Tokenizer
from . import bound
from .base import Prompt, Result


def no_pause() -> None:
    """Pauses nothing."""


@dataclass(frozen=True)
class TextExtent:
    """What the targets of rows are as text, for a subject that reads another alphabet than the corpus is written in."""

    counted_BT: Tensor
    """Whether the subject was asked for that target: not where it bears no text, or half a character."""
    bytes: int
    """UTF-8 bytes of the counted text."""
    gpt2_tokens: int | None
    """Tokens of GPT-2 that it takes; None where GPT-2's files are not at hand."""
    lacking: str = ""
    """Why there are none."""


class Subject(ABC):
    """Whoever can say how likely a text is, and what comes next: what probes measure that look into no network."""

    own_tokens: ClassVar[bool] = False
    """Whether it reads with a tokenizer of its own, not that of the corpus."""
    tokenizer: Tokenizer
    """The one that it reads with."""
    corpus: Corpus
    config: CellConfig
    device: torch.device

    @abstractmethod
    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True, last: int | None = None
    ) -> Tensor:
        """Cross-entropy of every target, or of the `last` ones of each row, nats, float32 or float64 [B, T] on the CPU; 0 for
        targets that `extent` does not count."""

    @abstractmethod
    def answers(self, prompts: Sequence[Prompt], *, full_context: bool = True) -> list[tuple[Tensor, Tensor]]:
        """For each prompt, teacher-forced: whether each scored token has the largest logit, and its loss in nats; both [digits]."""

    def extent(self, targets_BT: Tensor) -> TextExtent | None:
        """What the targets are as text; None for a subject whose tokens they are."""
        return None

    def haystack(self, document: int, tokens: int) -> np.ndarray:
        """The first `tokens` tokens of one of `documents`, in the subject's own tokens."""
        return self.documents[document][:tokens]

    def tokens_of(self, text: str) -> int:
        """How many tokens of the corpus a text takes."""
        return len(self.tokenizer.encode(text))

    def beyond(self, tokens: int) -> str | None:
        """Why the subject cannot read a text of `tokens` tokens, or None when it can."""
        return None

    @property
    def documents(self) -> list[np.ndarray]:
        """The first `eval.documents` held-out documents, each led by the end-of-text token, whatever the lengths are."""
        return self.corpus.heldout[: self.config.eval.documents]

    def lacking(self, tokens: int) -> str | None:
        """Why nothing is measured where each of `documents` must have `tokens` tokens, or None when each has."""
        n_documents = self.config.eval.documents
        n_long = sum(len(document) >= tokens for document in self.documents)
        if n_long == n_documents:
            return None
        return f"too-few-docs: {n_long} of {n_documents} held-out documents have {tokens} tokens"


@dataclass(frozen=True)
class CellSubject(Subject):
    """A network of ours; the model is in evaluation mode on `device`."""

    model: Backbone
    tokenizer: Tokenizer
    corpus: Corpus
    config: CellConfig
    device: torch.device
    pause: Callable[[], None] = no_pause
    """Called before each forward; may raise to end a probe that takes minutes."""

    def beyond(self, tokens: int) -> str | None:
        """Why the network cannot read a text of `tokens` tokens, or None when it can."""
        longest = longest_text(self.config.model)
        if longest is None or tokens <= longest:
            return None
        return f"n/a: positions {self.config.model.positions} has {longest} places, fewer than {tokens} tokens"

    def validation_rows(self, rows: int) -> Tensor | str:
        """The first rows of the validation split, int64 [rows, T] of the training length, or why there are not so many."""
        length = self.config.train.seq_len
        available = (len(self.corpus.validation) - 1) // length
        if available < rows:
            return f"too-short: the validation split holds {available} of {counted(rows, 'row')} of {length} tokens"
        return stream_rows(self.corpus.validation, length, rows)[0]

    def batches(self, rows: int, length: int) -> list[slice]:
        """Which of `rows` rows of `length` tokens go through the network together: `eval.chunk_tokens`, at least one."""
        rows_at_once = max(1, self.config.eval.chunk_tokens // length)
        return [slice(first, first + rows_at_once) for first in range(0, rows, rows_at_once)]

    def features(self, tokens_BT: Tensor, *, full_context: bool = True) -> Tensor:
        """Hidden states [B, T, D] on `device`, `eval.chunk_tokens` at a time."""
        self.pause()
        chunk = self.config.eval.chunk_tokens
        return self.model.features(tokens_BT.to(self.device), full_context=full_context, chunk=chunk).hidden_BTD

    @torch.no_grad()
    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True, last: int | None = None
    ) -> Tensor:
        """Cross-entropy of every target, or of the `last` ones of each row, nats, float32 [B, T] on the CPU (float64 for a
        float64 network)."""
        parts = []
        for rows in self.batches(*inputs_BT.shape):
            hidden_BTD = self.features(inputs_BT[rows], full_context=full_context)
            targets = targets_BT[rows].to(self.device)
            if last is not None:
                # only these go through the head, which is most of the memory
                hidden_BTD, targets = hidden_BTD[:, -last:], targets[:, -last:]
            parts.append(self.model.token_losses(hidden_BTD, targets, chunk=self.config.eval.chunk_tokens).cpu())
        return torch.cat(parts)

    def answers(self, prompts: Sequence[Prompt], *, full_context: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Prompts that are as long as each other go through the network together."""
        indices_by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            indices_by_length[len(prompt.tokens)].append(index)
        results: dict[int, tuple[Tensor, Tensor]] = {}
        for length, members in indices_by_length.items():
            for rows in self.batches(len(members), length):
                part = members[rows]
                tokens = torch.from_numpy(np.stack([prompts[i].tokens for i in part]).astype(np.int64)).to(self.device)
                hidden = self.features(tokens[:, :-1], full_context=full_context)
                for row, index in enumerate(part):
                    positions = torch.from_numpy(prompts[index].scored).to(self.device)
                    logits = self.model.logits(hidden[row, positions - 1])
                    target = tokens[row, positions]
                    loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
                    results[index] = ((logits.argmax(-1) == target).cpu(), loss.cpu())
        return [results[index] for index in range(len(prompts))]

    def right_answers(
        self, rows: Rows, mark_rows: Callable[[np.ndarray], np.ndarray], *, letters: np.ndarray | None = None,
        full_context: bool = True,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Count the marked tokens of each row, and those of them that have the largest logit at the token before.

        Args:
            rows: Rows that are worked out, none of which begins with a marked token.
            marks_of: Gives 1 for each token of whole rows that is asked for, else 0.
            letters: The network's token for each of those of `rows`; None where they are the same.
            full_context: Whether the window of training is left out.

        Returns:
            Marked tokens and right answers, each int64 [rows].
        """
        n_marked, n_right = np.zeros(rows.rows, np.int64), np.zeros(rows.rows, np.int64)
        for part in self.batches(rows.rows, rows.length):
            numbers = np.arange(rows.rows)[part]
            row_tokens = rows.made(numbers)
            marks = torch.from_numpy(mark_rows(row_tokens).astype(bool))
            tokens = torch.from_numpy((row_tokens if letters is None else letters[row_tokens]).astype(np.int64))
            # an answer is said at the token before it, and nothing is said after the last
            positions = marks[:, 1:].flatten().nonzero().squeeze(1)
            hidden = self.features(tokens[:, :-1], full_context=full_context).flatten(0, 1)
            predicted = self.model.logits(hidden[positions.to(hidden.device)]).argmax(-1).cpu()
            hit = (predicted == tokens[:, 1:].flatten()[positions]).numpy()
            n_marked[part] = marks.sum(1).numpy()
            n_right[part] = np.bincount(positions.numpy() // (rows.length - 1), weights=hit, minlength=len(numbers))
        return n_marked, n_right


@contextlib.contextmanager
def evaluating(model: Backbone) -> Iterator[None]:
    """Evaluation mode inside, and the mode that was before after it."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


@contextlib.contextmanager
def observe_evaluations(parts: Sequence[nn.Module], observe: Callable[..., None]) -> Iterator[None]:
    """Inside, `observe` is told of every call of a part's `evaluate`: its place in the list, then the arguments of the call.

    The part's own answer stays as it is.
    """

    def wrap(index: int, part: Any) -> None:
        plain = part.evaluate

        def evaluate(*args: Any, **options: Any) -> Any:
            observe(index, *args, **options)
            return plain(*args, **options)

        vars(part)["evaluate"] = evaluate

    try:
        for index, part in enumerate(parts):
            wrap(index, part)
        yield
    finally:
        for part in parts:
            vars(part).pop("evaluate", None)


@torch.no_grad()
def measure(name: str, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """What the probe of that name finds at each length, one result a length."""
    yield from bound(name, subject.config).run(subject, lengths)


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
