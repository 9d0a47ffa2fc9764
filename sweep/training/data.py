"""Rows of a token stream. The order is a pure function of (corpus fingerprint, seed, step)."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import SweepError


class DataError(SweepError):
    """Too little text for what was asked."""


@functools.lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    key = int.from_bytes(hashlib.sha256(f"{seed}/data/{epoch}".encode()).digest()[:16], "big")
    return np.random.Generator(np.random.Philox(key=key)).permutation(count)


@dataclass(frozen=True)
class Batches:
    """Training rows of `seq_len` + 1 tokens, `rows_per_step` for each optimizer step."""

    tokens: np.ndarray
    seq_len: int
    rows_per_step: int
    seed: int
    shuffle: bool

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise DataError(
                f"the training split has {len(self.tokens)} tokens, less than one row of {self.seq_len} + 1"
            )

    @property
    def rows(self) -> int:
        """Rows of one pass over the stream; consecutive rows share one token, as target and first input."""
        return (len(self.tokens) - 1) // self.seq_len

    def row(self, index: int) -> int:
        """Which row of the stream is the `index`-th of the run; passes are shuffled anew."""
        epoch, position = divmod(index, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[position]) if self.shuffle else position

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one optimizer step, each int64 [rows_per_step, seq_len], on the CPU."""
        first = step * self.rows_per_step
        starts = [self.row(index) * self.seq_len for index in range(first, first + self.rows_per_step)]
        rows = np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).astype(np.int64)
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def stream_rows(tokens: np.ndarray, seq_len: int, rows: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """`rows` consecutive rows from row `start` of a stream: inputs and targets, int64 [rows, seq_len].

    Raises DataError when the stream is too short.
    """
    need = (start + rows) * seq_len + 1
    if len(tokens) < need:
        raise DataError(f"the stream has {len(tokens)} tokens; {start + rows} rows of {seq_len} need {need}")
    flat = torch.from_numpy(np.asarray(tokens[start * seq_len : need]).astype(np.int64))
    return flat[:-1].reshape(rows, seq_len), flat[1:].reshape(rows, seq_len)
