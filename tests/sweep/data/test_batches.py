"""Tokens of each training step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from atma_sweep.sweep.config import CellConfig, DataConfig, TrainConfig
from atma_sweep.sweep.data.batches import Batches, DataError, stream_rows, training_batches
from atma_sweep.sweep.data.corpora import Corpus
from atma_sweep.sweep.grid.cell import Cell
from refusals import refused

STREAM = np.arange(1000, 1000 + 71, dtype=np.uint16)
SHARDS = [np.arange(start, start + size, dtype=np.uint16) for start, size in [(0, 23), (100, 5), (200, 71), (300, 1)]]
"""4, 0, 14 and 0 rows of 5; whole steps of 2 rows: 4, 0, 12 and 0 rows."""


def batches(*, count: int = 71, seq_len: int = 5, rows: int = 3, seed: int = 0, shuffle: bool = True) -> Batches:
    return Batches([STREAM[:count]], seq_len, rows, seed, shuffle)


def corpus_of(shards: list[np.ndarray]) -> Corpus:
    """Return a corpus with these training shards alone."""
    nothing = np.zeros(0, dtype=np.uint16)
    return Corpus("f" * 64, "bytes", shards, nothing, [], [], 1.0, None)


def starts(source: Batches, first: int, steps: int) -> list[int]:
    """Return the row of the stream that each row of these steps is, read off its tokens."""
    return [
        int(row[0] - 1000) // source.seq_len for step in range(first, first + steps) for row in source.step(step)[0]
    ]


def test_batches_shapes_dtypes_and_shifted_targets() -> None:
    for step in (0, 3, 17):
        inputs, targets = batches().step(step)
        assert (inputs.shape, targets.shape) == ((3, 5), (3, 5))
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        # the stream counts upwards, so a target is its input plus one
        assert torch.equal(targets, inputs + 1)


def test_epoch_yields_each_row_once_in_a_new_order() -> None:
    source = batches(rows=7)
    first, second, third = (starts(source, 2 * epoch, 2) for epoch in range(3))
    for epoch in (first, second, third):
        assert sorted(epoch) == list(range(14))
        assert epoch != list(range(14))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_batches_order_depends_on_seed_and_step_alone() -> None:
    first, second = batches(seed=3), batches(seed=3)
    backwards = [second.step(step)[0] for step in reversed(range(9))][::-1]
    assert all(torch.equal(first.step(step)[0], backwards[step]) for step in range(9))
    assert starts(batches(seed=4), 0, 4) != starts(first, 0, 4)
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(batches(seed=3).step(5)[0], backwards[5])


@pytest.mark.parametrize(("seed", "epoch", "order"), [
    (0, 0, [7, 13, 2, 1, 9, 0, 12, 3, 4, 5, 6, 11, 10, 8]),
    (0, 1, [4, 11, 12, 0, 5, 6, 2, 7, 8, 3, 13, 9, 10, 1]),
    (7, 0, [13, 2, 10, 6, 11, 0, 7, 3, 12, 5, 8, 9, 1, 4]),
])  # fmt: skip
def test_batches_order_is_pinned(seed: int, epoch: int, order: list[int]) -> None:
    """NumPy guarantees the bits of Philox; the order derived from them must not change either."""
    assert starts(batches(seed=seed, rows=14), epoch, 1) == order


def test_batches_first_rows_of_long_epoch_are_pinned() -> None:
    source = Batches([np.broadcast_to(np.uint16(0), 487_801)], 1, 6, 1, True)
    assert [source.row(2 * 487_800 + n) for n in range(6)] == [335747, 217108, 59601, 240078, 46486, 177127]


# --- shards -------------------------------------------------------------------------------------------------------


def naive_rows(shards: list[np.ndarray], seq_len: int, rows: int, *, full_steps: bool) -> list[list[int]]:
    """Return every row of one epoch over the shards, target included, cut out one by one."""
    row_list = []
    for shard in shards:
        mine: list[list[int]] = []
        while (len(mine) + 1) * seq_len + 1 <= len(shard):
            mine.append(shard[len(mine) * seq_len : (len(mine) + 1) * seq_len + 1].tolist())
        if full_steps:
            steps = 0
            while (steps + 1) * rows * seq_len + 2 <= len(shard):
                steps += 1
            mine = mine[: steps * rows]
        row_list += mine
    return row_list


def naive_order(seed: int, count: int) -> Iterator[int]:
    """Yield row numbers epoch by epoch: rows sorted by their Philox number."""
    epoch = 0
    while True:
        digest = hashlib.sha256(f"{seed}/data/{epoch}".encode()).digest()
        numbers = [int(n) for n in np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(count)]
        yield from sorted(range(count), key=lambda row: numbers[row])
        epoch += 1


@pytest.mark.parametrize("full_steps", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("shards", "seq_len", "rows"), [
    (SHARDS, 5, 2), (SHARDS, 3, 4), (SHARDS, 7, 3), ([STREAM], 5, 4), ([STREAM[:70]], 5, 1), ([STREAM[:7]], 5, 1),
])  # fmt: skip
def test_batches_rows_match_naive_count(
    full_steps: bool, shuffle: bool, shards: list[np.ndarray], seq_len: int, rows: int
) -> None:
    source = Batches(shards, seq_len, rows, 11, shuffle, full_steps)
    expected = naive_rows(shards, seq_len, rows, full_steps=full_steps)
    assert source.rows == len(expected)
    order = naive_order(11, len(expected)) if shuffle else (i % len(expected) for i in range(10**6))
    for step in range(3 * len(expected) // rows + 2):
        inputs, targets = source.step(step)
        actual = [[*row.tolist(), int(last)] for row, last in zip(inputs, targets[:, -1], strict=True)]
        assert actual == [expected[next(order)] for _ in range(rows)]
        assert torch.equal(targets[:, :-1], inputs[:, 1:])


def test_batches_read_shards_of_both_widths() -> None:
    wide = np.arange(70_000, 70_012, dtype=np.uint32)
    inputs, targets = Batches([STREAM[:6], wide], 5, 3, 0, False).step(0)
    assert inputs[:, 0].tolist() == [1000, 70_000, 70_005]
    assert targets[:, -1].tolist() == [1005, 70_005, 70_010]


def test_batches_ten_published_shards_give_1900_steps() -> None:
    """docs/reference/mechanisms.md, "Training": floor((n - 2) / 524288) = 190 steps per shard.

    A broadcast zero is 100M tokens.
    """
    shard = np.broadcast_to(np.uint16(0), 100_000_000)
    source = Batches([shard] * 10, 2048, 256, 0, False, True)
    assert source.rows == 1900 * 256
    assert Batches([shard], 2048, 256, 0, False, True).rows == 190 * 256
    # read through, the border tokens give four more rows' worth a shard
    assert Batches([shard], 2048, 256, 0, False).rows == (100_000_000 - 1) // 2048 == 190 * 256 + 188
    config = CellConfig(train=TrainConfig(), data=DataConfig(shuffle=False, whole_steps=True))
    cell_batches = training_batches(config, corpus_of([shard] * 10))
    assert (cell_batches.rows, cell_batches.seq_len, cell_batches.rows_per_step) == (1900 * 256, 2048, 256)
    assert config.train.steps == 1900


@pytest.mark.parametrize(("tokens", "rows"), [(22, 4), (21, 2), (12, 2), (11, 0)])
def test_batches_full_steps_need_two_further_tokens(tokens: int, rows: int) -> None:
    """Steps are floor((n - 2) / 10): a shard of n = 10 k + 1 tokens gives k - 1, as in the published code."""
    more = np.arange(12, dtype=np.uint16)
    assert Batches([np.arange(tokens, dtype=np.uint16), more], 5, 2, 0, False, True).rows == rows + 2


def test_training_batches_use_settings_of_cell(cells: Callable[..., list[Cell]]) -> None:
    (cell,) = cells("set:\n  data: {shuffle: off, whole_steps: on}\nseeds: [5]\n")
    cell_batches = training_batches(cell.config, corpus_of([np.zeros(4000, dtype=np.uint16)]))
    assert (cell_batches.seed, cell_batches.shuffle, cell_batches.whole_steps) == (5, False, True)
    assert (cell_batches.seq_len, cell_batches.rows_per_step, cell_batches.rows) == (128, 8, 3 * 8)


# --- too little data ----------------------------------------------------------------------------------------------


def test_batches_reject_short_stream() -> None:
    assert refused(lambda: batches(count=5), DataError) == "the training split has 5 tokens, less than one row of 5 + 1"
    assert (
        refused(lambda: Batches([STREAM[:5], STREAM[:4]], 5, 3, 0, True), DataError)
        == "the training split has 9 tokens, less than one row of 5 + 1"
    )
    assert (
        refused(lambda: Batches([STREAM[:16], STREAM[:16]], 5, 3, 0, True, True), DataError)
        == "the training split has 32 tokens, less than one step of 15 + 2 in any shard"
    )


def test_stream_rows_inputs_and_targets() -> None:
    inputs, targets = stream_rows(STREAM, 7, 3, start=1)
    assert inputs.tolist() == [list(range(1007 + 7 * row, 1014 + 7 * row)) for row in range(3)]
    assert torch.equal(targets, inputs + 1)
    assert stream_rows(STREAM, 7, 10)[1][-1, -1] == 1070


def test_stream_rows_rejects_short_stream() -> None:
    with pytest.raises(DataError, match="the stream has 71 tokens; 11 rows of 7 need 78"):
        stream_rows(STREAM, 7, 11)
    with pytest.raises(DataError, match="11 rows of 7 need 78"):
        stream_rows(STREAM, 7, 1, start=10)
