"""Rows of a token stream. The order is a pure function of (corpus fingerprint, seed, step)."""

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
from .computed_rows import Stream, pieces
from .corpora import UNMARKED, Corpus


class DataError(SweepError):
    """Too little text for what was asked."""


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Sorts raw Philox numbers: NumPy promises those for ever, but not what `Generator.permutation` makes of them."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/data/{epoch}".encode()).digest()[:16], "big")
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


@dataclass(frozen=True)
class Batches:
    """Training rows of `seq_len` + 1 tokens, `rows_per_step` for each optimizer step.

    Consecutive rows of a shard share one token, as target and first input; no row crosses from a shard to the next.
    With `whole_steps` a shard of n tokens gives floor((n - 2) / tokens of a step) steps and its rest is left out, as in
    the published runs (docs/mechanisms.md, "Training"). Raises DataError when nothing is left.
    """

    shards: Sequence[Stream]
    seq_len: int
    rows_per_step: int
    seed: int
    shuffle: bool
    whole_steps: bool = False
    marks: Sequence[Stream] | None = None
    """For each shard which of its tokens count as targets, 0 or 1; None: all."""
    _ends: np.ndarray = field(init=False, repr=False)
    """Rows up to the end of each shard."""

    def __post_init__(self) -> None:
        counts = [self._count_rows(len(shard)) for shard in self.shards]
        object.__setattr__(self, "_ends", np.cumsum(counts))
        if self.rows < 1:
            tokens = sum(map(len, self.shards))
            step = self.rows_per_step * self.seq_len
            required = f"one step of {step} + 2 in any shard" if self.whole_steps else f"one row of {self.seq_len} + 1"
            raise DataError(f"the training split has {tokens} tokens, less than {required}")

    def _count_rows(self, tokens: int) -> int:
        if self.whole_steps:
            return max(0, tokens - 2) // (self.rows_per_step * self.seq_len) * self.rows_per_step
        return max(0, tokens - 1) // self.seq_len

    @property
    def rows(self) -> int:
        """Rows of one pass over the stream."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def row(self, index: int) -> int:
        """Which row of the stream is the `index`-th of the run; passes are shuffled anew."""
        epoch, position = divmod(index, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[position]) if self.shuffle else position

    def _locate_row(self, row: int) -> tuple[int, int]:
        """The shard of a row, and where in it the row begins."""
        shard = int(np.searchsorted(self._ends, row, side="right"))
        return shard, (row - (int(self._ends[shard - 1]) if shard else 0)) * self.seq_len

    def _read_step(self, streams: Sequence[Stream], step: int) -> np.ndarray:
        """The rows of a step out of streams in shards, the last target of each included."""
        first = step * self.rows_per_step
        locations = [self._locate_row(self.row(index)) for index in range(first, first + self.rows_per_step)]
        if len(streams) == 1:
            return pieces(streams[0], [start for _, start in locations], self.seq_len + 1)
        return np.concatenate([pieces(streams[shard], [start], self.seq_len + 1) for shard, start in locations])

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one optimizer step, each int64 [rows_per_step, seq_len], on the CPU."""
        rows = torch.from_numpy(self._read_step(self.shards, step).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def marked(self, step: int) -> Tensor | None:
        """Which targets of a step count, bool [rows_per_step, seq_len]; None when all do.

        Raises DataError for a step in which none does.
        """
        if self.marks is None:
            return None
        is_marked = torch.from_numpy(self._read_step(self.marks, step)[:, 1:].astype(bool))
        if not is_marked.any():
            raise DataError(f"step {step} has no marked target: set train.loss_on to all, or raise train.batch_tokens")
        return is_marked


class MarkedTargets(NamedTuple):
    """The targets of a micro-batch that count."""

    places_M: Tensor
    """Where they are in its flattened targets, int64."""
    targets_M: Tensor
    """The tokens there, int64; negative in what only fills up to a number that stays."""
    share: Tensor
    """Micro-batches of the step over its marked targets; float64, no dimensions."""


class StepBatch(NamedTuple):
    """What one optimizer step reads."""

    inputs: Tensor
    targets: Tensor
    marked: list[MarkedTargets] | None
    """For each micro-batch what counts; None: all does."""


def marked_capacity(share: float, targets: int) -> int:
    """Room for the marked among so many targets, if `share` of them are: eight deviations above it, a multiple of 64 or all."""
    upper_bound = share * targets + 8 * math.sqrt(share * targets)
    return min(targets, 64 * math.ceil(upper_bound / 64))


class StepPrefetcher:
    """Whole steps on the training device. The next one is read and sent while the device works on the present one."""

    def __init__(
        self, batches: Batches, device: torch.device, micro_batch: int = 1, capacity: int | None = None
    ) -> None:
        """`micro_batch`: rows that go through the network together; `capacity`: what its marked targets are filled up to, if they are fewer."""
        self._batches, self._device, self._micro_batch, self._capacity = batches, device, micro_batch, capacity
        self._ready: tuple[int, StepBatch] | None = None

    def take(self, step: int) -> StepBatch:
        """`Batches.step` and `Batches.marked` on the device."""
        if self._ready is None or self._ready[0] != step:
            self.prepare(step)
        assert self._ready is not None
        step_batch = self._ready[1]
        self._ready = None
        return step_batch

    def prepare(self, step: int) -> None:
        """Makes a step ready. On CUDA from pinned memory, so that the host need not wait for what is queued before."""
        inputs, targets = self._batches.step(step)
        is_marked = self._batches.marked(step)
        marked = None if is_marked is None else self._collect_marked(targets, is_marked)
        self._ready = step, StepBatch(self._to_device(inputs), self._to_device(targets), marked)

    def _collect_marked(self, targets_RT: Tensor, is_marked_RT: Tensor) -> list[MarkedTargets]:
        """Looked for on the CPU, since the device would have to be waited for."""
        micro_batches = list(
            zip(targets_RT.split(self._micro_batch), is_marked_RT.split(self._micro_batch), strict=True)
        )
        share = self._to_device(torch.tensor(len(micro_batches) / int(is_marked_RT.sum()), dtype=torch.float64))
        marked = []
        for part_targets, part_marks in micro_batches:
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
    """The training rows of a cell. Raises DataError when the corpus has too few tokens, or lacks the marks it needs."""
    train, data = config.train, config.data
    if train.loss_on == "marked" and corpus.train_marks is None:
        raise DataError(UNMARKED)
    marks = corpus.train_marks if train.loss_on == "marked" else None
    rows = train.batch_tokens // train.seq_len
    return Batches(corpus.train, train.seq_len, rows, config.seed, data.shuffle, data.whole_steps, marks)


def stream_rows(tokens: Stream, seq_len: int, rows: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` consecutive rows from row `start` of a stream: inputs and targets, int64 [rows, seq_len].

    Raises DataError when the stream is too short.
    """
    need = (start + rows) * seq_len + 1
    if len(tokens) < need:
        raise DataError(f"the stream has {len(tokens)} tokens; {start + rows} rows of {seq_len} need {need}")
    flat = torch.from_numpy(np.asarray(tokens[start * seq_len : need]).astype(np.int64))
    return flat[:-1].reshape(rows, seq_len), flat[1:].reshape(rows, seq_len)
