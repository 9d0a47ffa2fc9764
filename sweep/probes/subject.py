"""Subjects that probes can measure: trained networks of the project, and the interface for external models."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from ...model.backbone import Backbone
from ...model.inference.generation import generate_tokens
from ...model.resolve import longest_text
from ...renamed import old_names
from ...results.console.text import counted
from ..config import CellConfig
from ..data.batches import stream_rows
from ..data.computed_rows import TARGET, Rows, replace_targets
from ..data.corpora import Corpus
from ..data.long_texts import LongText, read_long_text
from ..data.tokenizer import Tokenizer
from ..ranks.group import SINGLE, Ranks
from . import bound
from .base import GREEDY, Prompt, Result, Sampling

DEFAULT_WINDOW_TOKENS = 2048
"""Window of lm-evaluation-harness for a model without a maximum length."""

NEEDLE_TOKENS = 1024
"""Tokens of a document of `eval.texts` beyond the longest context length, for the text of needles."""


def no_pause() -> None:
    """Do nothing; the default of `pause` callbacks."""


@dataclass(frozen=True)
class TextExtent:
    """Extent of the targets of rows as text, for a subject with another tokenizer than the corpus."""

    counted_BT: Tensor
    """Mask of the targets that the subject scores, bool; False for targets without text or with part of a character."""
    bytes: int
    """Bytes of the counted text as UTF-8."""
    gpt2_tokens: int | None
    """Length of that text in GPT-2 tokens; None if GPT-2's tokenizer cannot be loaded."""
    lacking: str = ""
    """Reason why `gpt2_tokens` is None."""


class Subject(ABC):
    """A language model that scores text and prompts, without access to its internals."""

    own_tokens: ClassVar[bool] = False
    """True if the model reads with a tokenizer of its own instead of the corpus's."""
    tokenizer: Tokenizer
    """Tokenizer of the model."""
    corpus: Corpus
    """Corpus that is read."""
    config: CellConfig
    """Config of the cell."""
    device: torch.device
    """Device of the model."""
    ranks: Ranks = SINGLE
    """Ranks that measure the model together; each has the model and the corpus."""
    folder: Path | None = None
    """Folder of the attempt, for files that a probe keeps; None: it keeps none."""

    @abstractmethod
    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool | None = None, last: int | None = None
    ) -> Tensor:
        """Return the cross-entropy of each target in nats, float32 or float64 [B, T] on the CPU; [B, last] with `last`.

        It is 0 for targets that `extent` does not count.

        Args:
            inputs_BT: Input tokens, int64 on the CPU.
            targets_BT: Target tokens, int64: the inputs shifted by one token.
            full_context: Read without the attention window of training; None: as `eval.window` says.
            last: Return the last targets of each row alone; the whole row is read.
        """

    @abstractmethod
    def answers(self, prompts: Sequence[Prompt], *, full_context: bool | None = None) -> list[tuple[Tensor, Tensor]]:
        """Score each prompt, teacher-forced: every token is predicted from the true tokens before it.

        Args:
            prompts: The prompts.
            full_context: Read without the attention window of training; None: as `eval.window` says.

        Returns:
            For each prompt, in order, (is_argmax, loss in nats) of its scored tokens, each [scored] on the CPU.
            `is_argmax` is bool: the token has the largest logit of the vocabulary.
        """

    def extent(self, targets_BT: Tensor) -> TextExtent | None:
        """Return the extent of the targets as text; None for a subject with the corpus's tokenizer."""
        return None

    def haystack(self, document: int, tokens: int) -> np.ndarray:
        """Return the first `tokens` tokens of the document with that index, in the model's tokens."""
        return self.documents[document][:tokens]

    def tokens_of(self, text: str) -> int:
        """Return the length of a text in tokens of the corpus."""
        return len(self.tokenizer.encode(text))

    def on_text(self, name: str) -> Self:
        """Return this subject with the documents of a text of `eval.texts` in place of the held-out ones.

        They are `eval.documents` documents with tokens enough for the longest of `eval.lengths` and a needle.

        Raises:
            CorpusError: The text cannot be read.
        """
        text = self.long_text(name)
        return self._with("corpus", replace(self.corpus, heldout=list(text.documents), heldout_names=list(text.names)))

    def in_folder(self, folder: Path) -> Self:
        """Return this subject with a folder for files that probes keep; nothing is created."""
        return self._with("folder", folder)

    def _with(self, name: str, value: object) -> Self:
        """Return a copy of this subject in which one attribute differs."""
        subject = copy.copy(self)
        # a frozen dataclass is copied as it is, so that subclasses need no method of their own
        object.__setattr__(subject, name, value)
        return subject

    def long_text(self, name: str) -> LongText:
        """Return the documents of a text of `eval.texts`. Raises CorpusError if it cannot be read."""
        tokens = max(self.config.eval.lengths) + NEEDLE_TOKENS
        return read_long_text(self.config.eval.text_paths[name], self.tokenizer, self.config.eval.documents, tokens)

    def beyond(self, tokens: int) -> str | None:
        """Return why the model cannot read a text of `tokens` tokens, or None if it can."""
        return None

    @property
    @abstractmethod
    def window_tokens(self) -> int:
        """Tokens of the windows in which a text that is longer than these is read, as lm-evaluation-harness does."""

    @abstractmethod
    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a text at the start of a document, with what the model reads before it, int64 [n]."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; parts of characters become U+FFFD."""

    @abstractmethod
    def continue_prompt(self, prompt: np.ndarray, tokens: int, sampling: Sampling = GREEDY) -> Iterator[int]:
        """Yield tokens after a prompt, one by one; the window of training is kept.

        Args:
            prompt: Tokens of the prompt, one or more.
            tokens: Maximum number of tokens; fewer if the text ends, whose last token is not yielded.
            sampling: Choice of the tokens; the same settings give the same tokens.
        """

    @property
    def documents(self) -> list[np.ndarray]:
        """First `eval.documents` held-out documents, each preceded by the end-of-text token.

        The same for all lengths.
        """
        return self.corpus.heldout[: self.config.eval.documents]

    def lacking(self, tokens: int) -> str | None:
        """Return why documents are missing, or None if there are `eval.documents` ones of at least `tokens` tokens.

        Only the first `eval.documents` held-out documents count.
        """
        n_documents = self.config.eval.documents
        n_long = sum(len(document) >= tokens for document in self.documents)
        if n_long == n_documents:
            return None
        return f"too-few-docs: {n_long} of {n_documents} held-out documents have {tokens} tokens"


@dataclass(frozen=True)
class CellSubject(Subject):
    """A trained network of the project; the model is in evaluation mode on `device`."""

    model: Backbone
    tokenizer: Tokenizer
    corpus: Corpus
    config: CellConfig
    device: torch.device
    pause: Callable[[], None] = no_pause
    """Callback before each forward pass, which may raise to end a probe that takes minutes."""
    ranks: Ranks = SINGLE
    """Ranks that divide the batches of `losses`, `answers` and `right_answers`, whose results every rank gets."""
    folder: Path | None = None

    def beyond(self, tokens: int) -> str | None:
        """Return why the network's positions do not suffice for `tokens` tokens, or None if they do.

        Only positions with a fixed number of places have a limit; the training length is none.
        """
        longest = longest_text(self.config.model)
        if longest is None or tokens <= longest:
            return None
        return (
            f"n/a: position scheme {self.config.model.positions} supports at most {longest} tokens, fewer than {tokens}"
        )

    @property
    def window_tokens(self) -> int:
        """Maximum length of the network, or lm-evaluation-harness's own default if it reads any length."""
        return longest_text(self.config.model) or DEFAULT_WINDOW_TOKENS

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a text after an end-of-text token, as a document in training, int64 [n]."""
        return np.concatenate([[self.tokenizer.eot], self.tokenizer.encode(text)]).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without end-of-text tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.tokenizer.token_bytes, tokens)).decode(errors="replace")

    def continue_prompt(self, prompt: np.ndarray, tokens: int, sampling: Sampling = GREEDY) -> Iterator[int]:
        """Yield at most `tokens` generated tokens after a prompt, int64 [n]; an end-of-text token ends them, unyielded."""
        for token in generate_tokens(
            self.model, torch.from_numpy(prompt), tokens=tokens, **asdict(sampling), vocabulary=self.tokenizer.vocabulary, stop=self.tokenizer.eot,
        ):  # fmt: skip
            self.pause()
            if token == self.tokenizer.eot:
                return
            yield token

    def validation_rows(self, rows: int) -> Tensor | str:
        """Return the first rows of the validation split, int64 [rows, seq_len], or the reason why there are fewer.

        A row has the training length; its targets are not included, but the split must hold the last one.

        Args:
            rows: Number of rows.
        """
        length = self.config.train.seq_len
        available = (len(self.corpus.validation) - 1) // length
        if available < rows:
            return f"too-short: the validation split holds {available} of {counted(rows, 'row')} of {length} tokens"
        return stream_rows(self.corpus.validation, length, rows)[0]

    def batches(self, rows: int, length: int) -> list[slice]:
        """Return slices of `rows` rows of `length` tokens that go through the network together, in order.

        Each has at most `eval.chunk_tokens` tokens, but at least one row. The last slice can end after the last row.
        """
        rows_at_once = max(1, self.config.eval.chunk_tokens // length)
        return [slice(first, first + rows_at_once) for first in range(0, rows, rows_at_once)]

    def features(self, tokens_BT: Tensor, *, full_context: bool | None = None) -> Tensor:
        """Return hidden states [B, T, D] on `device`, computed in chunks of `eval.chunk_tokens` tokens.

        Memory grows with the length as one layer's inputs and outputs do, by [T, D] and [T, H, X]: no tensor has a size
        of T x T or T x vocabulary.
        """
        self.pause()
        if full_context is None:
            full_context = self.config.eval.window == "full"
        chunk = self.config.eval.chunk_tokens
        return self.model.features(tokens_BT.to(self.device), full_context=full_context, chunk=chunk).hidden_BTD

    @torch.no_grad()
    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool | None = None, last: int | None = None
    ) -> Tensor:
        """Return the cross-entropy of each target in nats, [B, T] on the CPU; [B, last] with `last`.

        The type is float32, or float64 for a float64 network. Rows go through the network in batches of
        `eval.chunk_tokens` tokens, which are divided over the ranks.

        Args:
            inputs_BT: Input tokens, int64.
            targets_BT: Target tokens, int64: the inputs shifted by one token.
            full_context: Read without the attention window of training; None: as `eval.window` says.
            last: Return the last targets of each row alone; the whole row is read.
        """

        def batch_losses(rows: slice) -> Tensor:
            """Return the losses of the targets of one batch, on the CPU."""
            hidden_BTD = self.features(inputs_BT[rows], full_context=full_context)
            targets = targets_BT[rows].to(self.device)
            if last is not None:
                # only these go through the head, which needs most of the memory
                hidden_BTD, targets = hidden_BTD[:, -last:], targets[:, -last:]
            return self.model.token_losses(hidden_BTD, targets, chunk=self.config.eval.chunk_tokens).cpu()

        return torch.cat(self.ranks.map(batch_losses, self.batches(*inputs_BT.shape)))

    def answers(self, prompts: Sequence[Prompt], *, full_context: bool | None = None) -> list[tuple[Tensor, Tensor]]:
        """Score each prompt, teacher-forced; prompts of the same length go through the network in batches together.

        The batches are divided over the ranks.

        Args:
            prompts: The prompts.
            full_context: Read without the attention window of training; None: as `eval.window` says.

        Returns:
            For each prompt, in order, (is_argmax, loss in nats) of its scored tokens, each [scored] on the CPU.
            `is_argmax` is bool: the token has the largest logit of the vocabulary.
        """
        indices_by_length: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            indices_by_length[len(prompt.tokens)].append(index)
        parts = [
            members[rows]
            for length, members in indices_by_length.items()
            for rows in self.batches(len(members), length)
        ]

        def score(part: list[int]) -> list[tuple[Tensor, Tensor]]:
            """Return the results of the prompts with these indices, which have the same length."""
            tokens = torch.from_numpy(np.stack([prompts[i].tokens for i in part]).astype(np.int64)).to(self.device)
            hidden = self.features(tokens[:, :-1], full_context=full_context)
            scores = []
            for row, index in enumerate(part):
                positions = torch.from_numpy(prompts[index].scored).to(self.device)
                logits = self.model.logits(hidden[row, positions - 1])
                target = tokens[row, positions]
                loss = torch.nn.functional.cross_entropy(logits, target, reduction="none")
                scores.append(((logits.argmax(-1) == target).cpu(), loss.cpu()))
            return scores

        scores_by_part = self.ranks.map(score, parts)
        results = {
            index: result
            for part, scores in zip(parts, scores_by_part, strict=True)
            for index, result in zip(part, scores, strict=True)
        }
        return [results[index] for index in range(len(prompts))]

    def right_answers(
        self, rows: Rows, mark_rows: Callable[[np.ndarray], np.ndarray], *, letters: np.ndarray | None = None,
        full_context: bool | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Count the marked tokens of each row, and those of them that have the largest logit of the vocabulary.

        Every token is predicted from the true tokens of its row before it. Batches of rows are divided over the ranks.

        Args:
            rows: Computed rows, none of which begins with a marked token.
            mark_rows: Function from complete rows to marks of the same shape, 1 for each scored token, else 0; a mark
                from TARGET on replaces that token as the answer, and the network then reads complete rows.
            letters: The network's token for each token of `rows`, as an array indexed by those; None if they are the
                same.
            full_context: Read without the attention window of training; None: as `eval.window` says.

        Returns:
            (marked tokens, right answers), each int64 [rows].
        """

        def count(row_slice: slice) -> tuple[np.ndarray, np.ndarray]:
            """Return (marked tokens, right answers) of the rows of one batch."""
            numbers = np.arange(rows.rows)[row_slice]
            row_tokens = rows.made(numbers)
            row_marks = mark_rows(row_tokens)
            marks = torch.from_numpy(row_marks.astype(bool))
            tokens = torch.from_numpy((row_tokens if letters is None else letters[row_tokens]).astype(np.int64))
            reads_all = bool((row_marks >= TARGET).any())
            answers = torch.from_numpy(replace_targets(tokens.numpy(), row_marks)) if reads_all else tokens
            # the logits at a token predict the next one
            positions = marks[:, 1:].flatten().nonzero().squeeze(1)
            hidden = self.features(tokens if reads_all else tokens[:, :-1], full_context=full_context)
            hidden = hidden[:, : tokens.shape[1] - 1].flatten(0, 1)
            predicted = self.model.logits(hidden[positions.to(hidden.device)]).argmax(-1).cpu()
            hit = (predicted == answers[:, 1:].flatten()[positions]).numpy()
            n_right = np.bincount(positions.numpy() // (rows.length - 1), weights=hit, minlength=len(numbers))
            return marks.sum(1).numpy(), n_right.astype(np.int64)

        n_marked, n_right = zip(*self.ranks.map(count, self.batches(rows.rows, rows.length)), strict=True)
        return np.concatenate(n_marked), np.concatenate(n_right)


@contextlib.contextmanager
def evaluating(model: Backbone) -> Iterator[None]:
    """Context manager that sets evaluation mode and restores the previous mode afterwards."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


@contextlib.contextmanager
def observe_evaluations(parts: Sequence[nn.Module], observe: Callable[..., None]) -> Iterator[None]:
    """Context manager that calls `observe` before every `evaluate` of the given modules.

    Their results stay unchanged. The method is shadowed on each instance and restored at the end, also after an
    exception.

    Args:
        parts: Modules with a method `evaluate`.
        observe: Called with the index of the module in `parts`, then the arguments of the call; its result is ignored.
    """

    def wrap(index: int, part: Any) -> None:
        """Shadow `evaluate` of a module so that it reports its calls."""
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
def run_probe(name: str, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
    """Yield the result of the probe of that name for each length, without gradients.

    With several ranks a probe that does not divide its work (`Probe.divided`) runs on rank 0 alone, while the others
    wait for its results. Every rank gets all results.
    """
    probe, ranks = bound(name, subject.config), subject.ranks
    if probe.text:
        subject = subject.on_text(probe.text)
    if probe.divided or ranks.size == 1:
        yield from probe.run(subject, lengths)
    else:
        assert isinstance(subject, CellSubject)
        alone = replace(subject, ranks=SINGLE)
        yield from ranks.first(lambda: list(probe.run(alone, lengths)))


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
