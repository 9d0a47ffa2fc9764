"""Rows of a token stream. The order is a pure function of (corpus fingerprint, seed, step)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..config import CellConfig
from ..errors import SweepError


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

    shards: Sequence[np.ndarray]
    seq_len: int
    rows_per_step: int
    seed: int
    shuffle: bool
    whole_steps: bool = False
    _ends: np.ndarray = field(init=False, repr=False)
    """Rows up to the end of each shard."""

    def __post_init__(self) -> None:
        counts = [self._rows_of(len(shard)) for shard in self.shards]
        object.__setattr__(self, "_ends", np.cumsum(counts))
        if self.rows < 1:
            tokens = sum(map(len, self.shards))
            step = self.rows_per_step * self.seq_len
            what = f"one step of {step} + 2 in any shard" if self.whole_steps else f"one row of {self.seq_len} + 1"
            raise DataError(f"the training split has {tokens} tokens, less than {what}")

    def _rows_of(self, tokens: int) -> int:
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

    def _tokens(self, row: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, row, side="right"))
        start = (row - (int(self._ends[shard - 1]) if shard else 0)) * self.seq_len
        return self.shards[shard][start : start + self.seq_len + 1]

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one optimizer step, each int64 [rows_per_step, seq_len], on the CPU."""
        first = step * self.rows_per_step
        rows = [self._tokens(self.row(index)) for index in range(first, first + self.rows_per_step)]
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


class Ahead:
    """Whole steps on the training device. The next one is read and sent while the device works on the present one."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._ready: tuple[int, tuple[Tensor, Tensor]] | None = None

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """`Batches.step` on the device."""
        if self._ready is None or self._ready[0] != step:
            self.prepare(step)
        assert self._ready is not None
        taken = self._ready[1]
        self._ready = None
        return taken

    def prepare(self, step: int) -> None:
        """Makes a step ready. On CUDA from pinned memory, so that the host need not wait for what is queued before."""
        inputs, targets = self._batches.step(step)
        if self._device.type == "cuda":
            inputs, targets = (x.pin_memory().to(self._device, non_blocking=True) for x in (inputs, targets))
        self._ready = step, (inputs, targets)


def training_batches(config: CellConfig, shards: Sequence[np.ndarray]) -> Batches:
    """The training rows of a cell. Raises DataError when the shards hold too few tokens."""
    train, data = config.train, config.data
    rows = train.batch_tokens // train.seq_len
    return Batches(shards, train.seq_len, rows, config.seed, data.shuffle, data.whole_steps)


def stream_rows(tokens: np.ndarray, seq_len: int, rows: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` consecutive rows from row `start` of a stream: inputs and targets, int64 [rows, seq_len].

    Raises DataError when the stream is too short.
    """
    need = (start + rows) * seq_len + 1
    if len(tokens) < need:
        raise DataError(f"the stream has {len(tokens)} tokens; {start + rows} rows of {seq_len} need {need}")
    flat = torch.from_numpy(np.asarray(tokens[start * seq_len : need]).astype(np.int64))
    return flat[:-1].reshape(rows, seq_len), flat[1:].reshape(rows, seq_len)
