"""External models as subjects of probes: classes of transformers, run in chunks through the model's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.inference.generation import sample_token
from ..config import CellConfig
from ..data.corpora import Corpus
from ..data.tokenizer import Tokenizer, dtype_of, load_tokenizer
from ..errors import MachineError, SweepError
from ..probes.base import GREEDY, Prompt, Sampling
from ..probes.subject import DEFAULT_WINDOW_TOKENS, Subject, TextExtent, no_pause
from .config import OpenWeightConfig
from .hub_checkpoint import check_loaded_tensors, read_config
from .hub_tokenizer import check_lossless, passages, spread_over_tokens

CHUNK_TOKENS = 2048
"""Default number of tokens per forward pass; earlier tokens are in the model's cache."""
LOSS_ROWS = 256
"""Rows of logits that are turned into losses at a time, because vocabularies are large."""


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the causal language model of a checkpoint (a transformers class), in evaluation mode on `device`.

    Only local safetensors are read and no foreign code is run. Turns off progress bars and advice of transformers in
    this process.

    Raises:
        SweepError: The checkpoint cannot be loaded, or its tensors are not those of the model in config.json. Missing
            ones would be random.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    read_config(folder)
    auto: Any = AutoModelForCausalLM
    transformers_logging.set_verbosity_error()  # its advice does not concern evaluations
    transformers_logging.disable_progress_bar()
    try:
        model, loading_info = auto.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise SweepError(f"{folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    check_loaded_tensors(folder, loading_info, "download it again, with the config.json that belongs to the weights")
    return model.to(device).eval()


class ChunkedScorer:
    """Scorer that runs a model over one text, `chunk_tokens` tokens at a time.

    So only the model's own cache grows with the text. No state is carried from one call to the next.
    """

    def __init__(
        self, model: Any, device: torch.device, pause: Callable[[], None] = no_pause, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        """Create a scorer.

        Args:
            model: Called as `model(input_ids=, past_key_values=, use_cache=True, logits_to_keep=)`; returns `logits`
                and `past_key_values`.
            device: Device of the model.
            pause: Callback before each forward pass, which may raise to stop.
            chunk_tokens: Tokens per forward pass.
        """
        self.model, self.device, self.pause, self.chunk_tokens = model, device, pause, chunk_tokens

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield (position, logits [n, V]) for consecutive tokens from `first` on, on the device, in the model's type.

        Row i of the logits predicts the token at `position` + i + 1, so the last row predicts a token after the text.
        Each piece has at most `chunk_tokens` rows, and only one piece exists at a time. Nothing is yielded if `first`
        is not below the number of tokens.

        Args:
            tokens: Token ids, one-dimensional; all are read.
            first: Index of the first token whose logits are needed.
        """
        row = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        cache = None
        for start in range(0, len(row), self.chunk_tokens):
            self.pause()
            part = row[None, start : start + self.chunk_tokens]
            stop = start + part.shape[1]
            # logits_to_keep=0 would return all of them
            keep = max(1, stop - max(start, first))
            output = self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=keep)
            cache = output.past_key_values
            if stop > first:
                yield stop - keep, output.logits[0, -keep:]

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """Return the loss in nats of every token but the first, given all earlier ones, float32 [n - 1]."""
        losses = []
        targets = torch.from_numpy(tokens.astype(np.int64)).to(self.device)[1:]
        for start, logits in self.logits(tokens[:-1]):
            for chunk_logits, chunk_targets in zip(
                logits.split(LOSS_ROWS), targets[start : start + len(logits)].split(LOSS_ROWS), strict=True
            ):
                losses.append(
                    torch.nn.functional.cross_entropy(chunk_logits.float(), chunk_targets, reduction="none").cpu()
                )
        return torch.cat(losses).numpy() if losses else np.zeros(0, np.float32)

    @torch.no_grad()
    def continue_prompt(self, prompt: np.ndarray, tokens: int, end: int, sampling: Sampling) -> Iterator[int]:
        """Yield tokens after a prompt, at most `tokens`, up to the token `end`, which is not yielded."""
        row, cache = torch.from_numpy(prompt.astype(np.int64))[None].to(self.device), None
        generator = torch.Generator(self.device).manual_seed(sampling.seed)
        for _ in range(tokens):
            self.pause()
            output = self.model(input_ids=row, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = sample_token(output.logits[0, -1], sampling.temperature, sampling.top_k, sampling.top_p, generator)
            if token == end:
                return
            yield token
            cache, row = output.past_key_values, torch.tensor([[token]], device=self.device)

    def score_prompt(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Return (is_argmax, loss in nats) of the scored tokens of a prompt, each [scored] on the CPU, in their order.

        `is_argmax` is bool: the token has the largest logit of the whole vocabulary, given the tokens before it. The
        loss is float32. The prompt needs at least one scored token, and none at position 0.
        """
        positions = prompt.scored - 1
        rows: list[Tensor] = []
        for start, logits in self.logits(prompt.tokens[:-1], int(positions.min())):
            rows += [
                logits[position - start].float() for position in positions if start <= position < start + len(logits)
            ]
        logits_DV = torch.stack(rows)
        target = torch.from_numpy(prompt.tokens[prompt.scored].astype(np.int64)).to(self.device)
        loss = torch.nn.functional.cross_entropy(logits_DV, target, reduction="none")
        return (logits_DV.argmax(-1) == target).cpu(), loss.cpu()


class OpenWeightSubject(Subject):
    """Base class of both pairings: it holds the scorer and builds prompts from the model's own tokens."""

    own_tokens = True

    def __init__(
        self, scorer: ChunkedScorer, tokenizer: Tokenizer, corpus: Corpus, config: CellConfig, max_positions: int | None
    ) -> None:
        """Create a subject.

        Args:
            scorer: Scorer of the model.
            tokenizer: Tokenizer of the model.
            corpus: Corpus of the sweep.
            config: Config of the cell.
            max_positions: Length in tokens of a learned position table; None for any length.

        Raises:
            SweepError: The tokens of the corpus cannot be decoded to text.
        """
        self.scorer, self.tokenizer, self.corpus, self.config, self._max_positions = (
            scorer,
            tokenizer,
            corpus,
            config,
            max_positions,
        )
        self.device = scorer.device
        self.corpus_tokenizer = corpus.load_tokenizer()
        check_lossless(self.corpus_tokenizer)

    def answers(self, prompts: Sequence[Prompt], *, full_context: bool | None = None) -> list[tuple[Tensor, Tensor]]:
        """Score the prompts one by one, because prompts differ in length under a model's own tokenizer.

        Args:
            prompts: Prompts in the model's tokens.
            full_context: Ignored; the model always reads with its own context.

        Returns:
            For each prompt (is_argmax, loss in nats) of its scored tokens, each [scored] on the CPU.
        """
        return [self.scorer.score_prompt(prompt) for prompt in prompts]

    def beyond(self, tokens: int) -> str | None:
        """Return why a text of `tokens` tokens of the model exceeds its learned position table, or None if it does not.

        A model without such a table never gives a reason, even beyond its trained context.
        """
        if self._max_positions is None or tokens <= self._max_positions:
            return None
        return f"n/a: the model has {self._max_positions} positions, fewer than {tokens} tokens"

    @property
    def window_tokens(self) -> int:
        """Trained context length of the model, or lm-evaluation-harness's own default where its config gives none."""
        assert isinstance(self.config, OpenWeightConfig)
        return self.config.open_weight.context or DEFAULT_WINDOW_TOKENS

    def encode_prompt(self, text: str) -> np.ndarray:
        """Return the tokens of a text with the special tokens that the model's tokenizer adds, int64 [n]."""
        return self.tokenizer.encode_prompt(text)  # type: ignore[attr-defined]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return self.tokenizer.text(np.asarray(tokens, dtype=np.int64))  # type: ignore[attr-defined]

    def continue_prompt(self, prompt: np.ndarray, tokens: int, sampling: Sampling = GREEDY) -> Iterator[int]:
        """Yield tokens after a prompt, at most `tokens`, up to the token that ends a text."""
        return self.scorer.continue_prompt(prompt, tokens, self.tokenizer.end, sampling)  # type: ignore[attr-defined]

    @cached_property
    def gpt2_tokenizer(self) -> Tokenizer | MachineError:
        """GPT-2's tokenizer, or the MachineError if it cannot be loaded; the first use may download it.

        The bits of every model are also given per GPT-2 token.
        """
        if self.corpus_tokenizer.name == "gpt2":
            return self.corpus_tokenizer
        try:
            return load_tokenizer("gpt2")
        except MachineError as error:
            return error

    def _extent(self, counted_BT: Tensor, texts: Sequence[str]) -> TextExtent:
        """Return the extent of counted targets with these texts: their UTF-8 bytes and their GPT-2 tokens.

        Each text is tokenised on its own. Without GPT-2's tokenizer `gpt2_tokens` is None and `lacking` has the reason.

        Args:
            counted_BT: Mask of the counted targets, bool.
            texts: Texts of these targets.
        """
        gpt2, size = self.gpt2_tokenizer, sum(len(text.encode()) for text in texts)
        if isinstance(gpt2, MachineError):
            return TextExtent(counted_BT, size, None, f"n/a: {gpt2}")
        return TextExtent(counted_BT, size, sum(len(gpt2.encode(text)) for text in texts))


class TextPairedSubject(OpenWeightSubject):
    """Subject that scores the same characters for every model, with losses mapped back to the corpus's tokens.

    The loss of a token of the model is spread evenly over its bytes. The loss of a target is the sum over its own
    bytes. At the end of a text the model reads its token for the start of a text, which is not scored.
    """

    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool | None = None, last: int | None = None
    ) -> Tensor:
        """Return the loss of each target in nats, row by row, float64 [B, T] on the CPU; [B, last] with `last`.

        The loss of a target of the corpus is the sum of the shares of the model's tokens on its bytes. It is 0 for an
        end-of-text token and for a part of a character at either end of a text.

        Args:
            inputs_BT: Tokens of the corpus on the CPU, int64; only the first of each row is read, as context.
            targets_BT: The inputs shifted by one token.
            full_context: Ignored; the model always reads with its own context.
            last: Return the last targets of each row alone.
        """
        rows = zip(inputs_BT.numpy(), targets_BT.numpy(), strict=True)
        losses = torch.from_numpy(np.stack([self._row_losses(int(inputs[0]), targets) for inputs, targets in rows]))
        return losses if last is None else losses[:, -last:]

    def _row_losses(self, before: int, targets: np.ndarray) -> np.ndarray:
        """Return the loss in nats of the targets of one row, float64 [T]; 0 for targets that belong to no passage.

        A passage is a text between end-of-text tokens, without parts of characters at its ends. The model reads its
        start token, the text of `before`, then the passages, with its start token again after each end-of-text token.

        Args:
            before: First input of the row, a token of the corpus.
            targets: Targets of the row, tokens of the corpus.
        """
        parts: list[np.ndarray] = [np.array([self.tokenizer.eot])]
        prefix = next(passages(np.array([before]), self.corpus_tokenizer), None)
        if prefix is not None:
            parts.append(self.tokenizer.encode(prefix.text))
        encoded = []
        stop = sum(map(len, parts))
        for passage in passages(targets, self.corpus_tokenizer):
            if passage.first_token and targets[passage.first_token - 1] == self.corpus_tokenizer.eot:
                parts.append(np.array([self.tokenizer.eot]))
                stop += 1
            tokens, byte_spans = self.tokenizer.encode_with_offsets(passage.text)  # type: ignore[attr-defined]
            parts.append(tokens)
            encoded.append((passage, byte_spans, stop))
            stop += len(tokens)
        nats = self.scorer.losses(np.concatenate(parts))
        losses = np.zeros(len(targets))
        for passage, byte_spans, begin in encoded:
            if len(byte_spans):
                covered = slice(passage.first_token, passage.first_token + len(passage.ends))
                losses[covered] = spread_over_tokens(nats[begin - 1 : begin - 1 + len(byte_spans)], byte_spans, passage)
        return losses

    def extent(self, targets_BT: Tensor) -> TextExtent:
        """Return the extent of the targets, of which all count but end-of-text tokens and parts of characters.

        Parts of characters do not count at the beginning and the end of a text alone. For a corpus of GPT-2 tokens
        `gpt2_tokens` is the number of counted targets; otherwise the texts are tokenised again.
        """
        counted_BT = torch.zeros(targets_BT.shape, dtype=torch.bool)
        texts = []
        for row, targets in enumerate(targets_BT.numpy()):
            for passage in passages(targets, self.corpus_tokenizer):
                counted_BT[row, passage.first_token : passage.first_token + len(passage.ends)] = True
                texts.append(passage.text)
        if self.corpus_tokenizer.name == "gpt2":
            # the corpus's tokens are GPT-2's
            return TextExtent(counted_BT, sum(len(text.encode()) for text in texts), int(counted_BT.sum()))
        return self._extent(counted_BT, texts)

    def haystack(self, document: int, tokens: int) -> np.ndarray:
        """Return the text of the first tokens of a document in tokens of the model, after its start token.

        The result has another length than `tokens`. A part of a character at the end is left out.

        Args:
            document: Index of the held-out document.
            tokens: Tokens of the corpus.
        """
        texts = [passage.text for passage in passages(self.documents[document][:tokens], self.corpus_tokenizer)]
        return np.concatenate([[self.tokenizer.eot], *map(self.tokenizer.encode, texts)])

    def tokens_of(self, text: str) -> int:
        """Return the length of a text in tokens of the corpus, so that every model reads the same amount of text."""
        return len(self.corpus_tokenizer.encode(text))


class NativeSubject(OpenWeightSubject):
    """Subject that reads texts of a fixed number of the model's own tokens, as in the paper.

    Its documents are those that are long enough in its own tokens. End-of-text tokens are left out of its validation
    stream.
    """

    def __init__(
        self, scorer: ChunkedScorer, tokenizer: Tokenizer, corpus: Corpus, config: CellConfig, max_positions: int | None
    ) -> None:
        """Tokenise the held-out documents and the validation stream again, and put them into a copy of the corpus.

        Args:
            scorer: Scorer of the model.
            tokenizer: Tokenizer of the model.
            corpus: Corpus of the sweep; not changed.
            config: Config of the cell.
            max_positions: Length in tokens of a learned position table; None for any length.

        Raises:
            SweepError: The tokens of the corpus cannot be decoded to text.
        """
        super().__init__(scorer, tokenizer, corpus, config, max_positions)
        self._rows = int(config.eval.settings.get("junk", {}).get("rows", 16))
        self.corpus = replace(corpus, heldout=self._long_documents(), validation=self._validation_stream())

    def _long_documents(self) -> list[np.ndarray]:
        """Return the first `eval.documents` documents, in the model's tokens, that exceed the longest context.

        Each begins with the model's start token. Documents of at most `eval.lengths[-1]` tokens are left out, so the
        list can be shorter than requested, or empty. A document's type is uint16, or uint32 for a large vocabulary.
        """
        n_documents, longest = self.config.eval.documents, self.config.eval.lengths[-1]
        documents: list[np.ndarray] = []
        for document in self.corpus.heldout:
            texts = [passage.text for passage in passages(np.asarray(document), self.corpus_tokenizer)]
            tokens = np.concatenate([[self.tokenizer.eot], *map(self.tokenizer.encode, texts)])
            if len(tokens) > longest and len(documents) < n_documents:
                documents.append(tokens.astype(dtype_of(self.tokenizer.vocabulary)))
        return documents

    def _validation_stream(self) -> np.ndarray:
        """Return at most as many tokens of the validation split as the probes read, in the model's tokens, int64 [n].

        The number is one more than `eval.validation_tokens` or the tokens of the junk probe's rows at the longest
        context, whichever is larger. If the split is too short, the result is shorter, without an error. It has no
        end-of-text tokens. The split is decoded 65,536 tokens at a time; parts of characters at the borders of these
        pieces are lost.
        """
        max_tokens = max(self._rows * self.config.eval.lengths[-1], self.config.eval.validation_tokens) + 1
        parts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        count, position, step = 0, 0, 1 << 16
        stream = self.corpus.validation
        while position < len(stream) and count < max_tokens:
            for passage in passages(np.asarray(stream[position : position + step]), self.corpus_tokenizer):
                parts.append(self.tokenizer.encode(passage.text).astype(np.int64))
                count += len(parts[-1])
            position += step
        return np.concatenate(parts)[:max_tokens]

    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool | None = None, last: int | None = None
    ) -> Tensor:
        """Return the loss of each target in nats, row by row, float32 [B, T] on the CPU; [B, last] with `last`.

        Each row is a text of its own: its first input has no earlier context.

        Args:
            inputs_BT: Tokens of the model on the CPU, int64; only the first of each row is read.
            targets_BT: The inputs shifted by one token.
            full_context: Ignored; the model always reads with its own context.
            last: Return the last targets of each row alone.
        """
        rows = torch.cat([inputs_BT[:, :1], targets_BT], 1).numpy()
        losses = torch.from_numpy(np.stack([self.scorer.losses(row) for row in rows]))
        return losses if last is None else losses[:, -last:]

    def extent(self, targets_BT: Tensor) -> TextExtent:
        """Return the extent of the targets, counting all of them.

        Their text is decoded row by row, without special tokens.
        """
        texts = [self.tokenizer.text(row) for row in targets_BT.numpy()]  # type: ignore[attr-defined]
        return self._extent(torch.ones(targets_BT.shape, dtype=torch.bool), texts)


PAIRINGS: dict[str, type[OpenWeightSubject]] = {"text": TextPairedSubject, "native": NativeSubject}
"""Subject classes: "text" gives every model the same characters, "native" the same number of its own tokens."""
