"""The book of pages: against one of Python lists, on the host and on the device, and what a step tells the device."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from atma_sweep.model.kv_cache import DUMMY, CacheCapacity, CacheFull, PageAllocator
from torch.utils._python_dispatch import TorchDispatchMode

SLOTS, PAGE, MOST = 5, 4, 6


def book(pages: int = 17) -> PageAllocator:
    return PageAllocator(CacheCapacity(SLOTS, pages, PAGE, torch.device("cpu"), torch.float32), MOST)


class Counted(TorchDispatchMode):
    """Ops that reach the device."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 1, 6, 9])
def test_pages_are_those_that_a_text_needs(window: int | None) -> None:
    """Every page belongs to one text at most; which columns have one follows from length and window alone."""
    ours, draw = book(), random.Random(window or 0)
    lengths: dict[int, int] = {}
    refused = 0
    for _ in range(400):
        kind = draw.choice(["open", "close", *["grow"] * 6])
        before = {slot: ours.pages(slot).tolist() for slot in lengths}
        try:
            if kind == "open" and len(lengths) < SLOTS:
                tokens = draw.randrange(1, 14)
                lengths[ours.allocate(tokens, window)] = tokens
            elif kind == "close" and lengths:
                slot = draw.choice(sorted(lengths))
                ours.free(slot)
                del lengths[slot]
            elif lengths:
                slots = draw.sample(sorted(lengths), draw.randrange(1, len(lengths) + 1))
                ours.extend([*slots, ours.padding_slot], window=window)
                ours.page_tables.advance(ours.slot_tensor(slots, 8), window)
                lengths |= {slot: lengths[slot] + 1 for slot in slots}
        except CacheFull:
            refused += 1
            assert {slot: ours.pages(slot).tolist() for slot in before} == before
        used_pages = []
        for slot, length in lengths.items():
            row = ours.pages(slot).tolist()
            first = 0 if window is None else max(0, length - max(window, 2)) // PAGE
            assert [at for at, page in enumerate(row) if page != DUMMY] == [*range(first, -(-length // PAGE))]
            assert ours.length(slot) == length == int(ours.page_tables.lengths_R[slot])
            used_pages += [page for page in row if page != DUMMY]
        assert len(used_pages) == len(set(used_pages)) == ours.num_used_pages
        assert sum(ours.page_tables.lengths_R.tolist()) == sum(lengths.values())
        assert ours.pages(ours.padding_slot).tolist() == [DUMMY] * MOST
    assert refused > 5


def test_truncated_sequence_keeps_its_pages() -> None:
    ours = book()
    slots = [ours.allocate(length) for length in (3, 5)]
    ours.extend(slots, 9)
    before = [ours.pages(slot).tolist() for slot in slots]
    with pytest.raises(ValueError, match="cannot truncate to 13 tokens"):
        ours.truncate(slots, 13)
    ours.truncate(slots, 2)
    assert [ours.length(slot) for slot in slots] == [2, 2]
    assert ours.page_tables.lengths_R[slots].tolist() == [2, 2]
    ours.extend(slots, 10)
    assert [ours.pages(slot).tolist() for slot in slots] == before, "12 tokens have room in the pages of 12"
    ours.extend(slots[:1], 1)
    assert ours.num_used_pages == 3 + 4 + 1
    for slot in slots:
        ours.free(slot)
    assert ours.num_used_pages == 0
    windowed = ours.allocate(9, window=4)
    with pytest.raises(ValueError, match="cannot truncate to 1 tokens"):
        ours.truncate([windowed], 1)


def test_repeated_step_copies_only_new_pages_to_the_device() -> None:
    ours = book(pages=31)
    slots = [ours.allocate(length) for length in (1, 2, 4)]
    copies = []
    for turn in range(8):
        with Counted() as counted:
            ours.extend(slots)
            ours.slot_tensor(slots, 4)
        copies.append(len(counted.ops))
        ours.page_tables.advance(ours.slot_tensor(slots, 4), None)
        if turn == 0:
            assert any("copy" in op for op in counted.ops), "the slots, once"
    # lengths 1, 2 and 4 before: the third crosses at turns 0 and 4, the second at 2 and 6, the first at 3 and 7
    assert [turn for turn, ops in enumerate(copies) if ops] == [0, 2, 3, 4, 6, 7]
    with Counted() as counted:
        ours.slot_tensor(slots[::-1], 4)
    assert any("copy" in op for op in counted.ops)


def test_a_text_may_not_outgrow_its_row() -> None:
    ours = book(pages=100)
    slots = [ours.allocate(MOST * PAGE - 1), ours.allocate(3)]
    ours.extend(slots)
    with pytest.raises(CacheFull, match="a sequence may have at most 24 tokens, got 25"):
        ours.extend(slots)
    assert [ours.length(slot) for slot in slots] == [24, 4]
    with pytest.raises(CacheFull, match="a sequence may have at most 24 tokens, got 30"):
        ours.allocate(30)
    assert ours.num_used_pages == 7


def test_freeing_a_slot_twice_is_an_error() -> None:
    ours = book()
    slot, second = ours.allocate(5), ours.allocate(5)
    ours.free(slot)
    with pytest.raises(ValueError, match=f"slot {slot} holds no sequence"):
        ours.free(slot)
    assert ours.num_used_pages == 2
    assert ours.allocate(5) == slot
    assert ours.allocate(5) not in (slot, second)
