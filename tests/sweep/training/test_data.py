"""Which tokens a step sees."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from atma_sweep.sweep.training.data import Batches, DataError, stream_rows

STREAM = np.arange(1000, 1000 + 71, dtype=np.uint16)


def batches(*, count: int = 71, seq_len: int = 5, rows: int = 3, seed: int = 0, shuffle: bool = True) -> Batches:
    return Batches(STREAM[:count], seq_len, rows, seed, shuffle)


def starts(source: Batches, first: int, steps: int) -> list[int]:
    """Which row of the stream each row of these steps is, read off its tokens."""
    return [
        int(row[0] - 1000) // source.seq_len for step in range(first, first + steps) for row in source.step(step)[0]
    ]


def test_shapes_dtypes_and_targets_shifted_by_one() -> None:
    for step in (0, 3, 17):
        inputs, targets = batches().step(step)
        assert (inputs.shape, targets.shape) == ((3, 5), (3, 5))
        assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
        # the stream counts upwards, so a target is its input plus one
        assert torch.equal(targets, inputs + 1)


def test_rows_are_whole_and_share_a_border_token() -> None:
    source = batches(shuffle=False)
    inputs, targets = source.step(0)
    assert inputs[:, 0].tolist() == [1000, 1005, 1010]
    assert targets[0, -1] == inputs[1, 0]


def test_unshuffled_reads_in_order_and_begins_again() -> None:
    source = batches(shuffle=False)
    assert source.rows == 14
    assert starts(source, 0, 10) == [*range(14), *range(14), 0, 1]


def test_every_row_of_an_epoch_comes_once_and_the_next_epoch_is_in_another_order() -> None:
    source = batches(rows=7)
    first, second, third = (starts(source, 2 * epoch, 2) for epoch in range(3))
    for epoch in (first, second, third):
        assert sorted(epoch) == list(range(14))
        assert epoch != list(range(14))
    assert len({tuple(first), tuple(second), tuple(third)}) == 3


def test_epochs_meet_inside_a_step() -> None:
    found = starts(batches(rows=4), 0, 7)
    assert Counter(found) == dict.fromkeys(range(14), 2)
    assert sorted(found[:14]) == list(range(14))


def test_order_is_a_function_of_seed_and_step_alone() -> None:
    one, other = batches(seed=3), batches(seed=3)
    backwards = [other.step(step)[0] for step in reversed(range(9))][::-1]
    assert all(torch.equal(one.step(step)[0], backwards[step]) for step in range(9))
    assert starts(batches(seed=4), 0, 4) != starts(one, 0, 4)
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(batches(seed=3).step(5)[0], backwards[5])


def test_the_batch_size_does_not_change_the_order_of_rows() -> None:
    assert starts(batches(rows=2), 0, 7) == starts(batches(rows=7), 0, 2)


def test_order_is_the_same_for_ever() -> None:
    """NumPy promises the bits of Philox but not `permutation` itself: a version that changes it must not go unseen."""
    assert starts(batches(seed=0, rows=14), 0, 1) == [2, 6, 7, 3, 1, 11, 0, 4, 8, 13, 10, 5, 9, 12]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_smallest_stream(shuffle: bool) -> None:
    source = batches(count=6, shuffle=shuffle)
    assert source.rows == 1
    assert starts(source, 0, 2) == [0] * 6


def test_too_short_a_stream() -> None:
    with pytest.raises(DataError, match=r"the training split has 5 tokens, less than one row of 5 \+ 1"):
        batches(count=5)


def test_a_rest_shorter_than_a_row_is_left_out() -> None:
    assert batches(count=70).rows == 13
    assert batches(count=71).rows == 14


def test_stream_rows() -> None:
    inputs, targets = stream_rows(STREAM, 7, 3, start=1)
    assert inputs.tolist() == [list(range(1007 + 7 * row, 1014 + 7 * row)) for row in range(3)]
    assert torch.equal(targets, inputs + 1)
    assert stream_rows(STREAM, 7, 10)[1][-1, -1] == 1070


def test_stream_rows_never_gives_fewer() -> None:
    with pytest.raises(DataError, match="the stream has 71 tokens; 11 rows of 7 need 78"):
        stream_rows(STREAM, 7, 11)
    with pytest.raises(DataError, match="11 rows of 7 need 78"):
        stream_rows(STREAM, 7, 1, start=10)
