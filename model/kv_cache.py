"""What a network remembers of the texts that it is writing: pages of keys and values, memories, tails of convolutions.

B texts of a step, T tokens, N pages, P pages of a text, R = slots + 1 rows of a table, of which the last is nobody's.
"""

from __future__ import annotations

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
    """There is no room for another text, or for another token of one."""


@dataclass(frozen=True)
class CacheCapacity:
    """How much there is room for, and where."""

    slots: int
    """Texts at a time."""
    pages: int
    """Pages for all of them, and DUMMY."""
    page_size: int
    device: torch.device
    dtype: torch.dtype
    """Of activations, keys and values."""

    @property
    def rows(self) -> int:
        """Rows of a table that has one for each text: a row that only fills a batch up has the last."""
        return self.slots + 1

    def table(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros, a row for each text."""
        return torch.zeros(self.rows, *shape, dtype=dtype or self.dtype, device=self.device)

    def pool(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros, an entry for each token of each page."""
        return torch.zeros(self.pages, self.page_size, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class DecodeStep:
    """Which texts get a token, as tensors: a graph of a step can be replayed for any of them."""

    slots_B: Tensor
    """int64: row of each text in every table."""
    texts: Texts
    """Their pages, and their lengths with the new token."""
    window: int | None
    padding_slot: int
    """The row of a table that belongs to no text."""

    @property
    def positions(self) -> Tensor:
        """int64: where the new token stands, counted from 0."""
        return (self.texts.lengths_B.long() - 1).clamp(min=0)


class Pools:
    """What a mixer keeps of each token, by name; pools are made when the first tokens come, since only these have shapes."""

    def __init__(self, capacity: CacheCapacity) -> None:
        self._capacity = capacity
        self._pools: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._pools[name]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are made."""
        return self._pools

    def fill(self, pages_P: Tensor, rows: Mapping[str, Tensor]) -> None:
        """`slot_tensor` [T, ...] of a whole text into its pages, of which there are enough; those that are DUMMY get nothing."""
        page = self._capacity.page_size
        for name, rows_T in rows.items():
            pool = self._pool(name, rows_T)
            for index, number in enumerate(pages_P[: -(-len(rows_T) // page)].tolist()):
                if number != DUMMY:
                    chunk = rows_T[index * page : (index + 1) * page]
                    pool[number, : len(chunk)] = chunk.to(pool.dtype)

    def copy(self, sources_P: Tensor, targets_P: Tensor) -> None:
        """What lies in some pages into others."""
        for pool in self._pools.values():
            pool[targets_P.long()] = pool[sources_P.long()]

    @property
    def token_bytes(self) -> int:
        """Bytes that are kept of a token."""
        return sum(pool[0, 0].numel() * pool.element_size() for pool in self._pools.values())

    def _pool(self, name: str, like: Tensor) -> Tensor:
        if name not in self._pools:
            self._pools[name] = self._capacity.pool(*like.shape[1:], dtype=like.dtype)
        return self._pools[name]


@dataclass(frozen=True)
class KVView:
    """What a step of a mixer reads: rows of every token of each text, the new one's included."""

    pools: Mapping[str, Tensor]
    step: DecodeStep

    def write(self, rows: Mapping[str, Tensor]) -> None:
        """`slot_tensor` [B, ...] of the new tokens."""
        remaining = dict(rows)
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
        """What is kept of the token before the new one, [B, ...]; zeros where there is none."""
        earlier = Texts(self.texts.tables_BP, self.texts.lengths_B - 1, self.texts.page)
        rows = self.pools[name].flatten(0, 1)[earlier.last]
        none_B = self.texts.lengths_B <= 1
        return rows.masked_fill(none_B.view(-1, *[1] * (rows.ndim - 1)), 0)

    def __getitem__(self, name: str) -> Tensor:
        """The pool [N, page, ...] of what was kept under that name."""
        return self.pools[name]

    def gather(self, name: str) -> Tensor:
        """[B, S, ...], a copy."""
        return self.texts.gather(self.pools[name])

    @property
    def texts(self) -> Texts:
        return self.step.texts

    @property
    def places(self) -> Tensor:
        """int64: where the new token of each text stands."""
        return self.step.positions

    @property
    def window(self) -> int | None:
        return self.step.window

    @property
    def seen(self) -> Tensor:
        """bool: the keys that the new token sees."""
        return self.texts.seen(self.window)


@dataclass(frozen=True)
class PageTables:
    """Pages and lengths of every text, on the device, where they stay between steps."""

    tables_RP: Tensor
    """int32, as `Texts` has it."""
    lengths_R: Tensor
    """int32: tokens; 0 in a row that no text has."""
    page_size: int
    padding_slot: int

    def advance(self, slots_B: Tensor, window: int | None) -> DecodeStep:
        """Counts one token more of each text and says what its step needs; asks nothing of the host."""
        lengths_B = self.lengths_R[slots_B]
        lengths_B = lengths_B + (lengths_B > 0)
        self.lengths_R.index_copy_(0, slots_B, lengths_B)
        return self.step(slots_B, lengths_B, window)

    def step(self, slots_B: Tensor, lengths_B: Tensor, window: int | None) -> DecodeStep:
        """What a step needs of texts of these lengths."""
        return DecodeStep(slots_B, Texts(self.tables_RP[slots_B], lengths_B, self.page_size), window, self.padding_slot)


class PageAllocator:
    """Who has which pages. The host knows all of it; the device has tables and lengths of its own and is told what changes."""

    def __init__(self, capacity: CacheCapacity, pages_per_text: int) -> None:
        self.room, self._pages_per_text = capacity, pages_per_text
        self._free_pages = list(range(capacity.pages - 1, DUMMY, -1))
        self._free_slots = list(range(capacity.slots - 1, -1, -1))
        # a text has the pages of the columns from `_first` to before `_end`; those before have been given back
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

    def open(self, tokens: int, window: int | None = None) -> int:
        """A slot for a text of so many tokens, one or more; only the pages that the window's next token may see. Raises CacheFull."""
        if not self._free_slots:
            raise CacheFull(f"all {self.room.slots} texts are under way; close one first")
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
        """Room for so many more tokens of each; pages that no later token will see become free. Rows that are nobody's get none.

        Raises CacheFull, with nothing changed. The device counts the tokens itself, in `PageTables.advance`.
        """
        rows = np.asarray(slots, np.int64)
        rows = rows[self._is_open[rows]]
        length = self._length[rows] + tokens
        end, first = np.maximum(-(-length // self.room.page_size), self._end[rows]), self._first[rows]
        if window is not None:
            # the token before the new one stays too: sums go on from what is kept of it
            first = np.maximum(0, length - max(window, 2)) // self.room.page_size
        if (end > self._end[rows]).any() or (first > self._first[rows]).any():
            self._reassign_pages(*(part[np.unique(rows, return_index=True)[1]] for part in (rows, length, first, end)))
        self._length[rows] = length

    def _reassign_pages(self, slot_tensor: Array, length: Array, first: Array, end: Array) -> None:
        """Pages for texts of these lengths, in the columns from `first` to before `end`. Raises CacheFull, with nothing changed."""
        if (end > self._pages_per_text).any():
            got = length[np.argmax(end > self._pages_per_text)]
            raise CacheFull(f"a text may have {self._pages_per_text * self.room.page_size} tokens here, got {got}")
        old_first, old_end = self._first[slot_tensor], self._end[slot_tensor]
        freed = _cells(slot_tensor, old_first, np.minimum(first, old_end))
        added = _cells(slot_tensor, np.maximum(first, old_end), end)
        short = len(added[0]) - len(freed[0]) - len(self._free_pages)
        if short > 0:
            problem = f"all {self.room.pages - 1} pages of {self.room.page_size} tokens are taken"
            raise CacheFull(f"{problem}, {short} more are needed; close a text first")
        self._free_pages.extend(self._table[freed][::-1].tolist())
        num_left_free = len(self._free_pages) - len(added[0])
        self._table[freed] = DUMMY
        self._table[added] = self._free_pages[num_left_free:][::-1]
        del self._free_pages[num_left_free:]
        self._first[slot_tensor], self._end[slot_tensor] = first, end
        changed = tuple(np.concatenate(pair) for pair in zip(freed, added, strict=True))
        updates = np.stack([*changed, self._table[changed]])
        row, column, number = torch.from_numpy(updates).to(self.room.device, non_blocking=True)
        self.page_tables.tables_RP.index_put_((row, column), number.int())

    def shorten(self, slots: Sequence[int], tokens: int) -> None:
        """Takes the tokens of these texts behind their first `tokens` back; their pages stay theirs.

        Only what lies in pages is taken back, no memory's state. Raises ValueError for a text that is shorter or has given pages up.
        """
        rows = np.asarray(slots, np.int64)
        if (self._length[rows] < tokens).any() or self._first[rows].any():
            raise ValueError(f"a text of which the first {tokens} tokens are not kept cannot go back to them")
        self._length[rows] = tokens
        self.page_tables.lengths_R[torch.from_numpy(rows).to(self.room.device)] = tokens

    def free(self, slot: int) -> None:
        """Forgets a text."""
        self._free_pages.extend(self._table[slot, self._first[slot] : self._end[slot]][::-1].tolist())
        self._table[slot], self._first[slot], self._end[slot], self._length[slot] = DUMMY, 0, 0, 0
        self._is_open[slot] = False
        self.page_tables.tables_RP[slot].fill_(DUMMY)
        self.page_tables.lengths_R[slot].fill_(0)
        self._free_slots.append(slot)

    def pages(self, slot: int) -> Tensor:
        """int32 [P]: the text's row of the table."""
        return self.page_tables.tables_RP[slot]

    def length(self, slot: int) -> int:
        """Tokens of the text."""
        return int(self._length[slot])

    @property
    def padding_slot(self) -> int:
        """The slot of rows that only fill a batch up."""
        return self.room.slots

    @property
    def num_used_pages(self) -> int:
        """Pages that texts have."""
        return self.room.pages - 1 - len(self._free_pages)

    def rows(self, slots: Sequence[int], count: int) -> Tensor:
        """int64 [count]: these slots, then nobody's. One tensor for each count, to which nothing is copied while its slots stay."""
        wanted = list(slots)
        if count not in self._rows:
            self._rows[count] = [], torch.full((count,), self.padding_slot, device=self.room.device)
        said, rows_B = self._rows[count]
        if said != wanted:
            filled = [*wanted, *[self.padding_slot] * (count - len(wanted))]
            rows_B.copy_(torch.tensor(filled), non_blocking=True)
            self._rows[count] = wanted, rows_B
        return rows_B

    def prefill_step(self, slots: Sequence[int], window: int | None) -> DecodeStep:
        """What a text's beginning needs: its slot, its pages, its length."""
        slots_B = torch.tensor(list(slots), device=self.room.device)
        return self.page_tables.step(slots_B, self.page_tables.lengths_R[slots_B], window)


def _cells(rows: Array, start: Array, stop: Array) -> tuple[Array, Array]:
    """(row, column) of every cell from `start` to before `stop`, row after row."""
    count = np.maximum(stop - start, 0)
    owner = np.repeat(np.arange(len(rows)), count)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
    return rows[owner], start[owner] + within


@dataclass
class ChunkedStates:
    """States of a memory whose steps are worked out text by text: its state after the last whole chunk, and the tokens since."""

    states: dict[int, Any] = field(default_factory=dict)
    since_chunk: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


def has_step(part: Any) -> bool:
    """Whether a mixer or a memory says what its `forward` does one token at a time; a `forward` below a `prefill_step` may do another thing."""
    for cls in type(part).__mro__:
        if "step" in vars(cls):
            return vars(cls)["step"] is not None
        if "forward" in vars(cls):
            break
    return False


__all__ = [
    "DUMMY",
    "PAGE",
    "PageAllocator",
    "CacheFull",
    "DecodeStep",
    "Pools",
    "ChunkedStates",
    "CacheCapacity",
    "DecodeStep",
    "Texts",
    "has_step",
]
