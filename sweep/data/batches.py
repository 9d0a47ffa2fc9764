"""Training batches as rows of a token stream, in an order that follows from corpus fingerprint, seed and step alone."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..config import CellConfig
from ..errors import SweepError
from .computed_rows import ComputedMarks, Stream, pieces, replace_targets
from .corpora import UNMARKED, Corpus


class DataError(SweepError):
    """Exception for a split with too few tokens, or without the marked targets that a config needs."""


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the shuffled order of the rows in one epoch, int64 [count]: entry i is the row that is read i-th.

    The order sorts raw Philox numbers: NumPy guarantees those across versions, but not the result of
    `Generator.permutation`. The last two orders are cached, so the result must not be changed.

    Args:
        count: Number of rows in an epoch.
        seed: Seed of the order.
        epoch: Number of the epoch, from 0; each has an order of its own.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/data/{epoch}".encode()).digest()[:16], "big")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Batches:
    """Training rows of `seq_len` + 1 tokens, `rows_per_step` for each optimizer step.

    Consecutive rows of a shard share one token, as target of one and first input of the next. No row crosses from one
    shard to the next. With `whole_steps` a shard of n tokens gives floor((n - 2) / tokens per step) steps and its
    remainder is dropped, as in the published runs (docs/reference/mechanisms.md, "Training").

    Raises:
        DataError: The shards hold less than one row, or with `whole_steps` less than one step.
    """

    shards: Sequence[Stream]
    """Tokens of each training shard, in order."""
    seq_len: int
    """Targets per row."""
    rows_per_step: int
    """Rows of an optimizer step."""
    seed: int
    """Seed of the order of the rows."""
    shuffle: bool
    """Shuffle the rows anew in every epoch; False reads them in file order."""
    whole_steps: bool = False
    """Drop the remainder of each shard that does not fill a step."""
    marks: Sequence[Stream] | None = None
    """For each training shard the marks of its tokens: 1 for a token that counts as a target, 0 else; more replaces it.

    None: every token counts.
    """
    _ends: np.ndarray = field(init=False, repr=False)
    """Cumulative number of rows up to the end of each shard, int64 [shards]."""

    def __post_init__(self) -> None:
        """Count the rows of each shard.

        Raises:
            DataError: The shards hold no row, or with `whole_steps` no step.
        """
        counts = [self._count_rows(len(shard)) for shard in self.shards]
        object.__setattr__(self, "_ends", np.cumsum(counts))
        if self.rows < 1:
            tokens = sum(map(len, self.shards))
            step = self.rows_per_step * self.seq_len
            required = f"one step of {step} + 2 in any shard" if self.whole_steps else f"one row of {self.seq_len} + 1"
            raise DataError(f"the training split has {tokens} tokens, less than {required}")

    def _count_rows(self, tokens: int) -> int:
        """Return the number of rows in a shard of `tokens` tokens."""
        if self.whole_steps:
            return max(0, tokens - 2) // (self.rows_per_step * self.seq_len) * self.rows_per_step
        return max(0, tokens - 1) // self.seq_len

    @property
    def rows(self) -> int:
        """Number of rows in one epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> int:
        """Return the row of the stream that is read as number `index` of the run.

        Both count from 0. `index` continues across epochs and has no upper limit. With `shuffle` every epoch has an
        order of its own, else every epoch is read in file order.
        """
        epoch, position = divmod(index, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[position]) if self.shuffle else position

    def _locate_row(self, row: int) -> tuple[int, int]:
        """Return (index of the shard, offset in tokens within it) of a row, counted across all shards."""
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, (row - (int(self._ends[shard - 1]) if shard else 0)) * self.seq_len

    def _read_step(self, streams: Sequence[Stream], step: int) -> np.ndarray:
        """Return the rows of one step in the streams' type, [rows_per_step, seq_len + 1].

        The last column holds the last target of each row.

        Args:
            streams: One stream per shard, in the order of `shards`: either tokens or marks.
            step: Optimizer step, from 0; steps past the first epoch read the next one.
        """
        first = step * self.rows_per_step
        locations = [self._locate_row(self.row(index)) for index in range(first, first + self.rows_per_step)]
        if len(streams) == 1:
            return pieces(streams[0], [start for _, start in locations], self.seq_len + 1)
        return np.concatenate([pieces(streams[shard], [start], self.seq_len + 1) for shard, start in locations])

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one optimizer step, each int64 [rows_per_step, seq_len] on the CPU.

        Targets are the next tokens, except where marks replace them.
        """
        tokens = self._read_step(self.shards, step).astype(np.int64)
        targets = tokens[:, 1:]
        if self.marks is not None and may_replace_targets(self.marks[0]):
            targets = replace_targets(targets, self._read_step(self.marks, step)[:, 1:])
        return torch.from_numpy(tokens)[:, :-1].contiguous(), torch.from_numpy(targets).contiguous()

    def marked(self, step: int) -> Tensor | None:
        """Return a mask of the targets of a step that count, bool [rows_per_step, seq_len]; None when all do.

        Raises:
            DataError: No target of the step is marked.
        """
        if self.marks is None:
            return None
        is_marked = torch.from_numpy(self._read_step(self.marks, step)[:, 1:].astype(bool))
        if not is_marked.any():
            raise DataError(f"step {step} has no marked target: set train.loss_on: all, or raise train.batch_tokens")
        return is_marked


class MarkedTargets(NamedTuple):
    """Targets of a micro-batch that count for the loss."""

    indices_M: Tensor
    """Positions of the targets in the flattened micro-batch, int64 [M]."""
    targets_M: Tensor
    """Target tokens at these positions, int64 [M]; negative for padding up to a fixed M."""
    share: Tensor
    """Number of micro-batches of the step divided by its number of marked targets, float64 scalar."""


class StepBatch(NamedTuple):
    """Tensors that one optimizer step reads."""

    inputs: Tensor
    """Input tokens, int64 [rows_per_step, seq_len]."""
    targets: Tensor
    """Target tokens, int64 [rows_per_step, seq_len]."""
    marked: list[MarkedTargets] | None
    """Marked targets of each micro-batch; None when every target counts."""


def marked_capacity(share: float, targets: int) -> int:
    """Return the padded number of marked targets of a micro-batch.

    It is the expected number plus eight times its square root, rounded up to a multiple of 64, and at most `targets`.
    The square root is about the standard deviation where few targets are marked.

    Args:
        share: Share of the targets that are marked, 0 to 1.
        targets: Number of targets in a micro-batch.
    """
    upper_bound = share * targets + 8 * math.sqrt(share * targets)
    return min(targets, 64 * math.ceil(upper_bound / 64))


class StepPrefetcher:
    """Prefetcher of optimizer steps: the next step is read and copied to the device while the current one runs."""

    def __init__(
        self, batches: Batches, device: torch.device, micro_batch: int = 1, capacity: int | None = None,
        share: slice = slice(None),
    ) -> None:  # fmt: skip
        """Create a prefetcher that has read nothing yet.

        Args:
            batches: Source of the steps.
            device: Training device.
            micro_batch: Rows that go through the network together.
            capacity: Number to which the marked targets of each micro-batch are padded; None pads nothing.
            share: Micro-batches of each step that go to the device; the others are left out of the tensors.
        """
        self._batches, self._device, self._micro_batch, self._capacity = batches, device, micro_batch, capacity
        self._share = share
        self._ready: tuple[int, StepBatch] | None = None

    def get(self, step: int) -> StepBatch:
        """Return a step on the device and forget it; read it now unless it is the step that `prepare` read last.

        A prepared step of another number is discarded.

        Raises:
            DataError: No target of the step is marked.
        """
        if self._ready is None or self._ready[0] != step:
            self.prepare(step)
        assert self._ready is not None
        step_batch = self._ready[1]
        self._ready = None
        return step_batch

    def prepare(self, step: int) -> None:
        """Read a step on this thread, start copying it to the device, and store it for `get`.

        It replaces a step that was stored before. On CUDA the copy comes from pinned memory, so that the host does not
        wait for queued work.

        Raises:
            DataError: No target of the step is marked.
        """
        inputs, targets = self._batches.step(step)
        is_marked = self._batches.marked(step)
        marked = None if is_marked is None else self._collect_marked(targets, is_marked)
        self._ready = step, StepBatch(self._own(inputs), self._own(targets), marked)

    def _own(self, rows_RT: Tensor) -> Tensor:
        """Return the rows of this prefetcher's share of the micro-batches, on the device."""
        if self._share != slice(None):
            rows_RT = torch.cat(rows_RT.split(self._micro_batch)[self._share])
        return self._to_device(rows_RT)

    def _collect_marked(self, targets_RT: Tensor, is_marked_RT: Tensor) -> list[MarkedTargets]:
        """Return the marked targets of the share's micro-batches in order, padded to the capacity, on the device.

        Padding entries have the target -1, and as indices 0, 1, 2, ... A micro-batch with more marked targets than the
        capacity is neither cut nor padded. Indices are collected on the CPU, because reading their number from the
        device would wait for it.

        Args:
            targets_RT: Targets of the step, int64 [rows, seq_len] on the CPU.
            is_marked_RT: Mask of the targets that count, bool [rows, seq_len] on the CPU, with at least one True.
        """
        micro_batches = list(
            zip(targets_RT.split(self._micro_batch), is_marked_RT.split(self._micro_batch), strict=True)
        )
        share = self._to_device(torch.tensor(len(micro_batches) / int(is_marked_RT.sum()), dtype=torch.float64))
        marked = []
        for part_targets, part_marks in micro_batches[self._share]:
            indices_M = part_marks.flatten().nonzero().squeeze(1)
            targets_M = part_targets.flatten()[indices_M]
            padding = 0 if self._capacity is None else max(0, self._capacity - len(indices_M))
            indices_M, targets_M = (
                torch.cat([indices_M, torch.arange(padding) % part_targets.numel()]),
                torch.cat([targets_M, torch.full((padding,), -1)]),
            )
            marked.append(MarkedTargets(self._to_device(indices_M), self._to_device(targets_M), share))
        return marked

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def training_batches(config: CellConfig, corpus: Corpus) -> Batches:
    """Return the training rows of a cell: `batch_tokens // seq_len` rows per step, in an order from the cell's seed.

    Marks are set only if `train.loss_on` is "marked"; otherwise every token counts, even in a corpus with marks.

    Raises:
        DataError: The corpus has too few tokens, or has no marks although `train.loss_on` is "marked".
    """
    train, data = config.train, config.data
    if train.loss_on == "marked" and corpus.train_marks is None:
        raise DataError(UNMARKED)
    marks = corpus.train_marks if train.loss_on == "marked" else None
    if marks is None and corpus.train_marks is not None and may_replace_targets(corpus.train_marks[0]):
        raise DataError("the targets of this task are not the next tokens: set train.loss_on: marked")
    rows = train.batch_tokens // train.seq_len
    return Batches(corpus.train, train.seq_len, rows, config.seed, data.shuffle, data.whole_steps, marks)


def may_replace_targets(marks: Stream) -> bool:
    """Return True if marks stand for targets in place of the marked tokens, in a computed corpus."""
    return isinstance(marks, ComputedMarks) and marks.replaces_targets


def stream_rows(tokens: Stream, seq_len: int, rows: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of `rows` consecutive rows of a stream, each int64 [rows, seq_len] on the CPU.

    Row r reads the tokens from r * seq_len on; its targets are the tokens one place later. So the last target of a row
    is the first input of the next.

    Args:
        tokens: The stream; marks work as well.
        seq_len: Targets per row.
        rows: Number of rows.
        start: Number of the first row, counted from 0.

    Raises:
        DataError: The stream is too short.
    """
    need = (start + rows) * seq_len + 1
    if len(tokens) < need:
        raise DataError(f"the stream has {len(tokens)} tokens; {start + rows} rows of {seq_len} need {need}")
    flat = torch.from_numpy(np.asarray(tokens[start * seq_len : need]).astype(np.int64))
    return flat[:-1].reshape(rows, seq_len), flat[1:].reshape(rows, seq_len)
