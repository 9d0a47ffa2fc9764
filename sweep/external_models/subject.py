"""A model from elsewhere as the subject of probes: transformers' own classes, read piece by piece through the model's own cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import CellConfig
from ..data.corpora import Corpus
from ..data.tokenizer import Tokenizer, dtype_of, load_tokenizer
from ..errors import MachineError, SweepError
from ..probes.base import Prompt
from ..probes.subject import Subject, TextExtent, no_pause
from .hub_tokenizer import check_lossless, passages, spread_over_tokens

PIECE = 2048
"""Tokens that go through the model at a time; what came before stands in its cache."""
LOSS_ROWS = 256
"""Rows of logits that are turned into losses at a time: the vocabularies are large."""


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The language model of a checkpoint, in evaluation mode; no foreign code is run, and nothing but safetensors is read.

    Raises SweepError where the checkpoint lacks weights that the model has: they would be random.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    auto: Any = AutoModelForCausalLM
    transformers_logging.set_verbosity_error()  # what it advises is not for whoever measures
    transformers_logging.disable_progress_bar()
    try:
        model, loading_info = auto.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, ImportError) as error:
        raise SweepError(f"{folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    missing = sorted({*loading_info["missing_keys"], *(str(key[0]) for key in loading_info.get("mismatched_keys", ()))})
    if missing:
        raise SweepError(
            f"{folder} lacks weights of its model, {len(missing)} of them, such as {missing[0]}; get it anew"
        )
    return model.to(device).eval()


class ChunkedScorer:
    """Runs a model over one text, `piece` tokens at a time, so that memory grows with the cache alone."""

    def __init__(
        self, model: Any, device: torch.device, pause: Callable[[], None] = no_pause, piece: int = PIECE
    ) -> None:
        """`model(input_ids=, past_key_values=, use_cache=True, logits_to_keep=)` gives `logits` and `past_key_values`."""
        self.model, self.device, self.pause, self.piece = model, device, pause, piece

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """(place, logits [n, V]) of the tokens from `first_token` on, in order, on the device."""
        row = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        cache = None
        for start in range(0, len(row), self.piece):
            self.pause()
            part = row[None, start : start + self.piece]
            stop = start + part.shape[1]
            # 0 would mean all of them
            keep = max(1, stop - max(start, first))
            output = self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=keep)
            cache = output.past_key_values
            if stop > first:
                yield stop - keep, output.logits[0, -keep:]

    def losses(self, tokens: np.ndarray) -> np.ndarray:
        """Nats of every token but the first, given those before it, float32."""
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

    def score_prompt(self, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """Whether each scored token has the largest logit, and its nats."""
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
    """What both pairings share: the reader, and the prompts, which are made of the model's own tokens."""

    own_tokens = True

    def __init__(
        self, reader: ChunkedScorer, tokenizer: Tokenizer, corpus: Corpus, config: CellConfig, max_positions: int | None
    ) -> None:
        """`max_positions`: tokens beyond which the model has no positions. Raises SweepError for tokens without their text."""
        self.reader, self.tokenizer, self.corpus, self.config, self._max_positions = (
            reader,
            tokenizer,
            corpus,
            config,
            max_positions,
        )
        self.device = reader.device
        self.corpus_tokenizer = corpus.load_tokenizer()
        check_lossless(self.corpus_tokenizer)

    def answers(self, prompts: Sequence[Prompt], *, full_context: bool = True) -> list[tuple[Tensor, Tensor]]:
        """One after the other: no two tokenizers make them equally long."""
        return [self.reader.score_prompt(prompt) for prompt in prompts]

    def beyond(self, tokens: int) -> str | None:
        """Where the model's positions are a table, its end; rotary positions have none."""
        if self._max_positions is None or tokens <= self._max_positions:
            return None
        return f"n/a: the model has {self._max_positions} positions, fewer than {tokens} tokens"

    @cached_property
    def gpt2_tokenizer(self) -> Tokenizer | MachineError:
        """GPT-2's tokenizer, in whose tokens every model's bits are given, too; why there is none."""
        if self.corpus_tokenizer.name == "gpt2":
            return self.corpus_tokenizer
        try:
            return load_tokenizer("gpt2")
        except MachineError as error:
            return error

    def _extent(self, counted_BT: Tensor, texts: Sequence[str]) -> TextExtent:
        gpt2, size = self.gpt2_tokenizer, sum(len(text.encode()) for text in texts)
        if isinstance(gpt2, MachineError):
            return TextExtent(counted_BT, size, None, f"n/a: {gpt2}")
        return TextExtent(counted_BT, size, sum(len(gpt2.encode(text)) for text in texts))


class TextPairedSubject(OpenWeightSubject):
    """Reads the very characters that the corpus's own tokens stand for, and answers for those tokens.

    A target's loss is what the model's own tokens cost that lie on its bytes. Where a text ends the model reads the token that
    begins one, and is not asked for it.
    """

    def losses(
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True, last: int | None = None
    ) -> Tensor:
        """Row by row; float64, since they are sums of parts. Targets are the inputs one token on."""
        rows = zip(inputs_BT.numpy(), targets_BT.numpy(), strict=True)
        losses = torch.from_numpy(np.stack([self._row_losses(int(inputs[0]), targets) for inputs, targets in rows]))
        return losses if last is None else losses[:, -last:]

    def _row_losses(self, before: int, targets: np.ndarray) -> np.ndarray:
        """Nats of the targets of one row, of whose inputs the first is `before`."""
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
        nats = self.reader.losses(np.concatenate(parts))
        losses = np.zeros(len(targets))
        for passage, byte_spans, begin in encoded:
            if len(byte_spans):
                covered = slice(passage.first, passage.first + len(passage.ends))
                losses[covered] = spread_over_tokens(nats[begin - 1 : begin - 1 + len(byte_spans)], byte_spans, passage)
        return losses

    def extent(self, targets_BT: Tensor) -> TextExtent:
        """The tokens of the corpus that bear whole characters."""
        counted_BT = torch.zeros(targets_BT.shape, dtype=torch.bool)
        texts = []
        for row, targets in enumerate(targets_BT.numpy()):
            for passage in passages(targets, self.corpus_tokenizer):
                counted_BT[row, passage.first_token : passage.first_token + len(passage.ends)] = True
                texts.append(passage.text)
        if self.corpus_tokenizer.name == "gpt2":
            # they are GPT-2's tokens of that text
            return TextExtent(counted_BT, sum(len(text.encode()) for text in texts), int(counted_BT.sum()))
        return self._extent(counted_BT, texts)

    def haystack(self, document: int, tokens: int) -> np.ndarray:
        """The text of the first `tokens` tokens of the corpus, led as every text is."""
        texts = [passage.text for passage in passages(self.documents[document][:tokens], self.corpus_tokenizer)]
        return np.concatenate([[self.tokenizer.eot], *map(self.tokenizer.encode, texts)])

    def tokens_of(self, text: str) -> int:
        """In tokens of the corpus, so that every model reads as much text."""
        return len(self.corpus_tokenizer.encode(text))


class NativeSubject(OpenWeightSubject):
    """Reads texts cut by its own tokens, as the paper did: as many of them, and so more or less text than other models.

    The documents are those that are long enough in its own tokens; ends of text are left out of the stream.
    """

    def __init__(
        self, reader: ChunkedScorer, tokenizer: Tokenizer, corpus: Corpus, config: CellConfig, max_positions: int | None
    ) -> None:
        super().__init__(reader, tokenizer, corpus, config, max_positions)
        self._rows = int(config.eval.settings.get("junk", {}).get("rows", 16))
        self.corpus = replace(corpus, heldout=self._long_documents(), validation=self._validation_stream())

    def _long_documents(self) -> list[np.ndarray]:
        """As many documents as are asked for, in order, of those with a token more than the longest context."""
        n_documents, longest = self.config.eval.documents, self.config.eval.lengths[-1]
        documents: list[np.ndarray] = []
        for document in self.corpus.heldout:
            texts = [passage.text for passage in passages(np.asarray(document), self.corpus_tokenizer)]
            tokens = np.concatenate([[self.tokenizer.eot], *map(self.tokenizer.encode, texts)])
            if len(tokens) > longest and len(documents) < n_documents:
                documents.append(tokens.astype(dtype_of(self.tokenizer.vocabulary)))
        return documents

    def _validation_stream(self) -> np.ndarray:
        """As much of the validation split as any row reads."""
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
        self, inputs_BT: Tensor, targets_BT: Tensor, *, full_context: bool = True, last: int | None = None
    ) -> Tensor:
        """Nats of its own tokens."""
        rows = torch.cat([inputs_BT[:, :1], targets_BT], 1).numpy()
        losses = torch.from_numpy(np.stack([self.reader.losses(row) for row in rows]))
        return losses if last is None else losses[:, -last:]

    def extent(self, targets_BT: Tensor) -> TextExtent:
        """All of its tokens, and the text that they stand for."""
        texts = [self.tokenizer.text(row) for row in targets_BT.numpy()]  # type: ignore[attr-defined]
        return self._extent(torch.ones(targets_BT.shape, dtype=torch.bool), texts)


PAIRINGS: dict[str, type[OpenWeightSubject]] = {"text": TextPairedSubject, "native": NativeSubject}
"""text: every model reads the same characters; native: as many of its own tokens, the published way."""
