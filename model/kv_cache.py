"""Decoding cache: pages of keys and values, page allocator, and states of sequences that are being decoded.

A slot is the number of a sequence that is being decoded, and its row in every table. Pages of a fixed number of tokens
are shared by all sequences; page DUMMY (0) belongs to none and takes writes that nobody reads.

Letters of shapes: B sequences of a step, T tokens, N pages of a pool, P pages of one sequence, S = P * page_size keys,
R = slots + 1 rows of a table, of which the last is a padding row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.paged.op import write_pages
from ..kernels.paged.page_tables import DUMMY, PAGE, Texts

Array = npt.NDArray[np.int64]


class CacheFull(RuntimeError):
    """No slot is free for another sequence, or no page for another token."""


@dataclass(frozen=True)
class CacheCapacity:
    """Capacity of a decoding cache: sequence slots, pages, page size, device and dtype."""

    slots: int
    """Sequences that can be decoded at a time."""
    pages: int
    """Pages shared by all sequences, the DUMMY page included."""
    page_size: int
    """Tokens per page."""
    device: torch.device
    dtype: torch.dtype
    """Type of activations, keys and values."""
    fp8: bool = False
    """True if mixers cache keys and values in 8 bits (`Mixer.quantize`)."""

    @property
    def rows(self) -> int:
        """Rows of a table with one row per slot and a last one for padding rows of a batch."""
        return self.slots + 1

    def table(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros [slots + 1, *shape] on the cache's device, one row per slot; `dtype` None is the cache's.

        The last row belongs to padding rows of a batch.
        """
        return torch.zeros(self.rows, *shape, dtype=dtype or self.dtype, device=self.device)

    def pool(self, *shape: int, dtype: torch.dtype | None = None, span: int = 1) -> Tensor:
        """Return zeros [pages, page_size / span, *shape] on the cache's device; `dtype` None is the cache's.

        Args:
            *shape: shape of an entry.
            dtype: type of the entries.
            span: consecutive tokens that share an entry, a divisor of `page_size`.
        """
        return torch.zeros(self.pages, self.page_size // span, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class DecodeStep:
    """Sequences that get a token in this step, as device tensors: a captured CUDA graph serves any sequences.

    For a prefill: one sequence whose length is that of the prompt.
    """

    slots_B: Tensor
    """int64: slot (row in every table) of each sequence."""
    texts: Texts
    """Page tables and lengths of the sequences, the new token included."""
    window: int | None
    """Number of most recent keys that the new token sees; None: all."""
    padding_slot: int
    """Row of every table that belongs to no sequence."""

    @property
    def positions(self) -> Tensor:
        """Position of the last token (the new one), int64 [B], counted from 0; 0 in a padding row."""
        return (self.texts.lengths_B.long() - 1).clamp(min=0)


class Pools:
    """Paged cache of one global layer: name -> pool [pages, page_size, ...] of what its mixer stores per token.

    A pool is allocated, in its first tokens' type and shape, when these are stored. `[name]` raises KeyError before
    that. Where consecutive tokens have equal entries (`Mixer.entry_spans`), a pool has fewer rows per page than tokens.
    """

    def __init__(self, capacity: CacheCapacity, spans: Mapping[str, int] | None = None) -> None:
        """Create a cache without pools.

        Args:
            capacity: pages, page size, device and type of the pools.
            spans: name -> number of consecutive tokens, counted from a sequence's start, whose entries are equal. As
                many of them share a row of a page as divide both this number and the page size. Names that are missing
                have an entry per token.
        """
        self._capacity = capacity
        self._pools: dict[str, Tensor] = {}
        self._spans = {name: math.gcd(span, capacity.page_size) for name, span in (spans or {}).items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._pools[name]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._capacity.page_size

    @property
    def fp8(self) -> bool:
        """True if keys and values are to be stored in 8 bits."""
        return self._capacity.fp8

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Name -> pool, of the pools that have been allocated."""
        return self._pools

    def fill(self, pages_P: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Store consecutive tokens from a page's start on; allocates pools of new names. Copies page numbers to the host.

        Args:
            pages_P: int32, the tokens' pages in order, at least as many as needed; tokens of DUMMY pages are
                skipped.
            rows: name -> [T, ...], an entry per token; cast to the pool's type.
        """
        page = self._capacity.page_size
        for name, rows_T in rows.items():
            pool, span = self._pool(name, rows_T), self._spans.get(name, 1)
            for index, number in enumerate(pages_P[: -(-len(rows_T) // page)].tolist()):
                if number != DUMMY:
                    chunk = rows_T[index * page : (index + 1) * page : span]
                    pool[number, : len(chunk)] = chunk.to(pool.dtype)

    def copy(self, sources_P: Tensor, targets_P: Tensor) -> None:
        """Copy the contents of some pages to other pages, in every pool that has been allocated.

        Args:
            sources_P: numbers of the pages to read.
            targets_P: numbers of the pages to overwrite, as many and in the same order.
        """
        for pool in self._pools.values():
            pool[targets_P.long()] = pool[sources_P.long()]

    @property
    def token_bytes(self) -> int:
        """Bytes stored per token, over all pools; entries that tokens share count in equal parts, rounded up."""
        page_bytes = sum(pool[0].numel() * pool.element_size() for pool in self._pools.values())
        return -(-page_bytes // self._capacity.page_size)

    def _pool(self, name: str, like: Tensor) -> Tensor:
        """Return the pool of that name; allocate zeros with entry shape and type of `like` [T, ...] if it is new."""
        if name not in self._pools:
            span = self._spans.get(name, 1)
            self._pools[name] = self._capacity.pool(*like.shape[1:], dtype=like.dtype, span=span)
        return self._pools[name]


@dataclass(frozen=True)
class KVView:
    """Cached entries that a mixer's decoding step reads: those of all tokens of each sequence, the new one included.

    `[name]` is the pool of all sequences; `gather` arranges entries by sequence.
    """

    pools: Mapping[str, Tensor]
    """Name -> pool [N, page_size, ...]."""
    step: DecodeStep
    tables: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> table [slots + 1, ...] of the mixer's state per sequence (`Mixer.open`)."""
    new: Mapping[str, Tensor] = field(default_factory=dict)
    """Keys "k" and values "v" of the new tokens, [B, J, X]."""

    def row(self, name: str) -> Tensor:
        """Return a copy [B, ...] of the state of that name of each sequence."""
        return self.tables[name][self.step.slots_B]

    def set_rows(self, rows: Mapping[str, Tensor]) -> None:
        """Replace states of the sequences in place, name -> [B, ...]."""
        for name, part in rows.items():
            self.tables[name].index_copy_(0, self.step.slots_B, part.to(self.tables[name].dtype))

    def write(self, rows: Mapping[str, Tensor]) -> None:
        """Store the new tokens' entries in the pools, in place; those with a table of their name replace its rows.

        Pools must have been allocated by a prefill. Rows of the padding slot write to the DUMMY page.

        Args:
            rows: name -> [B, ...], one entry per sequence.
        """
        self.set_rows({name: part for name, part in rows.items() if name in self.tables})
        remaining = {name: part for name, part in rows.items() if name not in self.tables}
        if (
            "k" in remaining
            and "v" in remaining
            and remaining["k"].ndim == 3
            and remaining["k"].shape == remaining["v"].shape
        ):
            write_pages(remaining.pop("k"), remaining.pop("v"), self.pools["k"], self.pools["v"], self.texts)
        for name, part in remaining.items():
            self.texts.write(self.pools[name], part)

    def before(self, name: str) -> Tensor:
        """Return the entry `name` of the token before the new one, [B, ...]; zeros for a sequence's first token."""
        if name in self.tables:
            rows = self.row(name)
        else:
            earlier, pool = Texts(self.texts.tables_BP, self.texts.lengths_B - 1, self.texts.page), self.pools[name]
            rows = pool.flatten(0, 1)[earlier.write_rows(pool.shape[1])]
        none_B = self.texts.lengths_B <= 1
        return rows.masked_fill(none_B.view(-1, *[1] * (rows.ndim - 1)), 0)

    def __getitem__(self, name: str) -> Tensor:
        """Return the pool [N, page_size, ...] of that name."""
        return self.pools[name]

    def gather(self, name: str) -> Tensor:
        """Return a copy [B, S, ...] of each sequence's entries in order; those beyond its end are arbitrary.

        S is the most tokens that a sequence may have. Entries of freed pages, outside the window, are arbitrary too.
        """
        return self.texts.gather(self.pools[name])

    @property
    def texts(self) -> Texts:
        """Page tables and lengths of the sequences."""
        return self.step.texts

    @property
    def places(self) -> Tensor:
        """Position of the new token of each sequence, int64 [B], counted from 0; 0 in a padding row."""
        return self.step.positions

    @property
    def window(self) -> int | None:
        """Number of most recent keys that the new token sees; None: all."""
        return self.step.window

    @property
    def seen(self) -> Tensor:
        """Mask of the keys that the new token sees, its own included, bool [B, S]; all False in a padding row."""
        return self.texts.visible_keys(self.window)


@dataclass(frozen=True)
class PageTables:
    """Page tables and lengths of all slots, on the device, where they stay between steps."""

    tables_RP: Tensor
    """int32: pages of each slot in order, DUMMY where it has none."""
    lengths_R: Tensor
    """int32: tokens of each slot's sequence; 0 in a free slot and in the padding row."""
    page_size: int
    """Tokens per page."""
    padding_slot: int
    """Row that belongs to no sequence."""

    def advance(self, slots_B: Tensor, window: int | None) -> DecodeStep:
        """Increment the length of each of these sequences by one token, in place; return the description of its step.

        Rows of length 0 (padding and free slots) stay 0. Never copies to or from the host. Pages are not reserved here:
        `PageAllocator.extend` must have done it.

        Args:
            slots_B: int64, slots of the sequences; only the padding slot may occur twice.
            window: number of most recent keys that the new token sees; None: all.
        """
        lengths_B = self.lengths_R[slots_B]
        lengths_B = lengths_B + (lengths_B > 0)
        self.lengths_R.index_copy_(0, slots_B, lengths_B)
        return self.step(slots_B, lengths_B, window)

    def step(self, slots_B: Tensor, lengths_B: Tensor, window: int | None) -> DecodeStep:
        """Return the description of a step for these slots with these lengths, without changing anything.

        Page tables are copied, so later changes do not reach the result.

        Args:
            slots_B: int64, slots of the sequences.
            lengths_B: tokens of each sequence, the new one included.
            window: number of most recent keys that the new token sees; None: all.
        """
        return DecodeStep(slots_B, Texts(self.tables_RP[slots_B], lengths_B, self.page_size), window, self.padding_slot)


class PageAllocator:
    """Host-side page allocator: assigns cache pages to sequences and mirrors page tables and lengths to the device."""

    def __init__(self, capacity: CacheCapacity, pages_per_text: int) -> None:
        """Create an allocator with every slot and page free, and its page tables on the cache's device.

        Args:
            capacity: slots, pages and page size of the cache; one page is DUMMY, so `pages - 1` can be assigned.
            pages_per_text: most pages that one sequence may span, pages freed by a window included.
        """
        self.capacity, self._pages_per_text = capacity, pages_per_text
        self._free_pages = list(range(capacity.pages - 1, DUMMY, -1))
        self._free_slots = list(range(capacity.slots - 1, -1, -1))
        # a sequence has the pages of columns `_first` (inclusive) to `_end` (exclusive); earlier ones were freed
        self._table = np.full((capacity.rows, pages_per_text), DUMMY, np.int32)
        self._first, self._end, self._length = (np.zeros(capacity.rows, np.int64) for _ in range(3))
        self._is_open = np.zeros(capacity.rows, np.bool_)
        self.page_tables = PageTables(
            torch.full((capacity.rows, pages_per_text), DUMMY, dtype=torch.int32, device=capacity.device),
            torch.zeros(capacity.rows, dtype=torch.int32, device=capacity.device),
            capacity.page_size,
            self.padding_slot,
        )
        self._rows: dict[int, tuple[list[int], Tensor]] = {}

    def allocate(self, tokens: int, window: int | None = None) -> int:
        """Reserve a slot and pages for a new sequence of `tokens` tokens, one or more; return the slot.

        The length is set on host and device. Pages are not cleared.

        Args:
            tokens: length of the sequence.
            window: number of keys that a query sees; only the pages of the last `window` tokens are reserved. None: all
                pages.

        Raises:
            CacheFull: no slot or too few pages are free, or the sequence is longer than one may be; nothing has
                changed.
        """
        if not self._free_slots:
            raise CacheFull(f"all {self.capacity.slots} sequence slots are in use; close a sequence first")
        slot = int(self._free_slots.pop())
        self._is_open[slot] = True
        try:
            self.extend([slot], tokens, window)
        except CacheFull:
            self.free(slot)
            raise
        self.page_tables.lengths_R[slot].fill_(tokens)
        return slot

    def extend(self, slots: Sequence[int], tokens: int = 1, window: int | None = None) -> None:
        """Reserve pages for `tokens` more tokens of each sequence, and free pages that no later token will see.

        Increments the host's lengths. The device increments its own, in `PageTables.advance`, by one token per step.
        Slots without a sequence are ignored.

        Args:
            slots: slots of the sequences.
            tokens: new tokens per sequence.
            window: number of keys that a query sees; None: all, so that no page is freed.

        Raises:
            CacheFull: too few pages are free or a sequence gets too long; nothing has changed.
        """
        rows = np.asarray(slots, np.int64)
        rows = rows[self._is_open[rows]]
        length = self._length[rows] + tokens
        end, first = np.maximum(-(-length // self.capacity.page_size), self._end[rows]), self._first[rows]
        if window is not None:
            # the previous token's page stays too, because cumulative sums continue from its entry
            first = np.maximum(0, length - max(window, 2)) // self.capacity.page_size
        if (end > self._end[rows]).any() or (first > self._first[rows]).any():
            self._reassign_pages(*(part[np.unique(rows, return_index=True)[1]] for part in (rows, length, first, end)))
        self._length[rows] = length

    def _reassign_pages(self, rows: Array, length: Array, first: Array, end: Array) -> None:
        """Change which pages sequences have: reserve new ones and free those that a window has passed.

        A sequence's table row has a column per page; afterwards it has pages in columns `first` (inclusive) to `end`
        (exclusive), DUMMY in those before. Pages freed by one sequence may be reserved for another in the same call.
        Updates the host's table and the device's; lengths stay.

        Args:
            rows: slots of the sequences, each once.
            length: lengths of the sequences in tokens, for the error message alone.
            first: first column of each slot that has a page.
            end: column after the last one that has a page.

        Raises:
            CacheFull: too few free pages, or a sequence needs more columns than there are; nothing has changed.
        """
        if (end > self._pages_per_text).any():
            got = length[np.argmax(end > self._pages_per_text)]
            raise CacheFull(
                f"a sequence may have at most {self._pages_per_text * self.capacity.page_size} tokens, got {got}"
            )
        old_first, old_end = self._first[rows], self._end[rows]
        freed = _cells(rows, old_first, np.minimum(first, old_end))
        added = _cells(rows, np.maximum(first, old_end), end)
        short = len(added[0]) - len(freed[0]) - len(self._free_pages)
        if short > 0:
            problem = f"all {self.capacity.pages - 1} cache pages of {self.capacity.page_size} tokens are in use"
            raise CacheFull(f"{problem}, {short} more are needed; close a sequence first")
        self._free_pages.extend(self._table[freed][::-1].tolist())
        num_remaining_free = len(self._free_pages) - len(added[0])
        self._table[freed] = DUMMY
        self._table[added] = self._free_pages[num_remaining_free:][::-1]
        del self._free_pages[num_remaining_free:]
        self._first[rows], self._end[rows] = first, end
        changed = tuple(np.concatenate(pair) for pair in zip(freed, added, strict=True))
        updates = np.stack([*changed, self._table[changed]])
        row, column, number = torch.from_numpy(updates).to(self.capacity.device, non_blocking=True)
        self.page_tables.tables_RP.index_put_((row, column), number.int())

    def truncate(self, slots: Sequence[int], tokens: int) -> None:
        """Shorten these sequences to their first `tokens` tokens, on host and device; their pages stay reserved.

        Only pages are rolled back, not the states of memories and convolutions, which still hold the dropped tokens.

        Args:
            slots: slots of the sequences.
            tokens: new length of each of them.

        Raises:
            ValueError: a sequence is shorter than that, or its first pages were freed (sliding window); nothing has
                changed.
        """
        rows = np.asarray(slots, np.int64)
        if (self._length[rows] < tokens).any() or self._first[rows].any():
            raise ValueError(
                f"cannot truncate to {tokens} tokens: a sequence is shorter, or its first pages were freed (sliding window)"
            )
        self._length[rows] = tokens
        self.page_tables.lengths_R[torch.from_numpy(rows).to(self.capacity.device)] = tokens

    def free(self, slot: int) -> None:
        """Release the slot and the pages of a sequence; its lengths become 0 on host and device.

        Raises:
            ValueError: the slot is free already, and would be handed out twice; nothing has changed.
        """
        if not self._is_open[slot]:
            raise ValueError(f"slot {slot} holds no sequence: it is free already")
        self._free_pages.extend(self._table[slot, self._first[slot] : self._end[slot]][::-1].tolist())
        self._table[slot], self._first[slot], self._end[slot], self._length[slot] = DUMMY, 0, 0, 0
        self._is_open[slot] = False
        self.page_tables.tables_RP[slot].fill_(DUMMY)
        self.page_tables.lengths_R[slot].fill_(0)
        self._free_slots.append(slot)

    def pages(self, slot: int) -> Tensor:
        """Return the slot's row of the page table on the device, int32 [P]: a view, DUMMY where it has no page."""
        return self.page_tables.tables_RP[slot]

    def length(self, slot: int) -> int:
        """Return the number of tokens of the slot's sequence on the host, without waiting; 0 for a free slot."""
        return int(self._length[slot])

    @property
    def padding_slot(self) -> int:
        """Slot of padding rows, which only fill a batch up."""
        return self.capacity.slots

    @property
    def num_used_pages(self) -> int:
        """Number of pages that sequences have, DUMMY not included."""
        return self.capacity.pages - 1 - len(self._free_pages)

    def slot_tensor(self, slots: Sequence[int], count: int) -> Tensor:
        """Return the slots as a device tensor int64 [count], filled up with the padding slot.

        The tensor is cached per `count` and is overwritten in place by a call with other slots, so that CUDA graphs can
        read it from the same memory.

        Args:
            slots: slots of the sequences, at most `count`.
            count: rows of the batch.
        """
        requested = list(slots)
        if count not in self._rows:
            self._rows[count] = [], torch.full((count,), self.padding_slot, device=self.capacity.device)
        cached_slots, rows_B = self._rows[count]
        if cached_slots != requested:
            filled = [*requested, *[self.padding_slot] * (count - len(requested))]
            rows_B.copy_(torch.tensor(filled), non_blocking=True)
            self._rows[count] = requested, rows_B
        return rows_B

    def prefill_step(self, slots: Sequence[int], window: int | None) -> DecodeStep:
        """Return the `DecodeStep` for the prefill of sequences: slots, pages and lengths, not advanced.

        Args:
            slots: slots that `allocate` returned.
            window: number of most recent keys that a query sees; None: all.
        """
        slots_B = torch.tensor(list(slots), device=self.capacity.device)
        return self.page_tables.step(slots_B, self.page_tables.lengths_R[slots_B], window)


def _cells(rows: Array, start: Array, stop: Array) -> tuple[Array, Array]:
    """Return (rows, columns) of all table entries from column `start` (inclusive) to `stop` (exclusive).

    Two arrays of equal length, ordered by row as given, then by column. A row whose `stop` is not above `start` has
    none.

    Args:
        rows: rows of the table.
        start: first column of each of these rows.
        stop: column after the last one of each of these rows.
    """
    count = np.maximum(stop - start, 0)
    owner = np.repeat(np.arange(len(rows)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return rows[owner], start[owner] + within


@dataclass
class ChunkedStates:
    """States of a memory that is decoded sequence by sequence, by slot; slots without a sequence may be missing."""

    states: dict[int, Any] = field(default_factory=dict)
    """State after the last complete chunk."""
    since_chunk: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """Inputs (x, q, k, v) of the tokens after that chunk, [1, T, ...] each; T may be 0."""


def can_capture(part: Any) -> bool:
    """Return True if a CUDA graph can capture the `step` of a part, which then never copies to the host.

    The part says so (`is_capturable`). Parts defined outside this package, whose `step` may copy, count as not capturable.
    """
    ours = __name__.rpartition(".")[0]
    return type(part).__module__.startswith(f"{ours}.") and part.is_capturable


def has_step(part: Any) -> bool:
    """Return True if a mixer or memory defines `step` for the `forward` that it uses, so that it can decode.

    A class that overrides `forward` without overriding `step` has none: the inherited `step` may compute another
    function. `step = None` means that there is none.
    """
    for cls in type(part).__mro__:
        if "step" in vars(cls):
            return vars(cls)["step"] is not None
        if "forward" in vars(cls):
            break
    return False


__all__ = [
    "DUMMY",
    "PAGE",
    "CacheCapacity",
    "CacheFull",
    "ChunkedStates",
    "DecodeStep",
    "PageAllocator",
    "Pools",
    "Texts",
    "can_capture",
    "has_step",
]
