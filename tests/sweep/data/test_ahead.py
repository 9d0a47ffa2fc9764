"""Prefetching of steps while the device works on the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from atma_sweep.sweep.data.batches import Batches, StepPrefetcher
from torch import Tensor

CPU = torch.device("cpu")
STREAM = np.arange(1000, 1000 + 71, dtype=np.uint16)


class Counted(Batches):
    """Batches that record which steps were read."""

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        read.append(step)
        return super().step(step)


read: list[int] = []


@pytest.fixture
def batches() -> Counted:
    read.clear()
    return Counted([STREAM], 5, 3, 0, True)


def same(actual: Sequence[Tensor | list[Tensor] | None], step: int) -> bool:
    expected = Batches([STREAM], 5, 3, 0, True).step(step)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(actual[:2], expected, strict=True))


def test_prefetcher_reads_each_step_once(batches: Counted) -> None:
    """Read as the training loop does: get a step, train, prepare the next."""
    ahead = StepPrefetcher(batches, CPU)
    for step in range(12):
        assert same(ahead.get(step), step)
        if step + 1 < 12:
            ahead.prepare(step + 1)
            assert read == list(range(step + 2))
    assert read == list(range(12))


@pytest.mark.parametrize("orders", list(product([("take", 4), ("prepare", 4), ("take", 9), ("prepare", 0)], repeat=3)))
def test_prefetcher_returns_requested_step_in_any_order(orders: tuple[tuple[str, int], ...], batches: Counted) -> None:
    """A step prepared for another number, as after a resumption, is dropped."""
    ahead = StepPrefetcher(batches, CPU)
    for what, step in orders:
        if what == "prepare":
            ahead.prepare(step)
        else:
            assert same(ahead.get(step), step)
    for step in (9, 4, 4, 5):
        assert same(ahead.get(step), step)


def test_prefetcher_returns_prepared_step_once(batches: Counted) -> None:
    ahead = StepPrefetcher(batches, CPU)
    ahead.prepare(3)
    first = ahead.get(3)
    assert read == [3]
    second = ahead.get(3)
    assert read == [3, 3]
    assert first[0].data_ptr() != second[0].data_ptr()
    # returned tensors are not shared: changing them in place changes no later step
    first[0].zero_()
    assert same(second, 3)
    assert same(ahead.get(3), 3)


def test_prefetcher_drops_unused_step(batches: Counted) -> None:
    ahead = StepPrefetcher(batches, CPU)
    ahead.prepare(1)
    assert same(ahead.get(2), 2)
    assert read == [1, 2]
    assert same(ahead.get(1), 1)
    assert read == [1, 2, 1]


@pytest.mark.gpu
def test_prefetcher_copies_steps_to_gpu(batches: Counted) -> None:
    """The copy does not wait, and is complete when it is read on the device."""
    ahead = StepPrefetcher(batches, torch.device("cuda"))
    busy = torch.randn(4096, 4096, device="cuda")
    for step in range(20):
        step_batch = ahead.get(step)
        for _ in range(20):
            busy = (busy @ busy).clamp(-1, 1)
        ahead.prepare(step + 1)
        assert all(x.is_cuda for x in step_batch[:2])
        assert same((step_batch.inputs.cpu(), step_batch.targets.cpu()), step)
    assert read == list(range(21))
