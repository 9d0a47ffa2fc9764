"""What a network remembers of the texts that it is writing: pages of keys and values, memories, tails of convolutions.

B texts of a step, T tokens, N pages, P pages of a text, R = slots + 1 rows of a table, of which the last is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.paged.pages import DUMMY, PAGE, Texts


class CacheFull(RuntimeError):
    """There is no room for another text, or for another token of one."""


@dataclass(frozen=True)
class Room:
    """How much there is room for, and where."""

    slots: int
    """Texts at a time."""
    pages: int
    """Pages for all of them, and DUMMY."""
    page: int
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
        return torch.zeros(self.pages, self.page, *shape, dtype=dtype or self.dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """Which texts get a token, as tensors: a graph of a step can be replayed for any of them."""

    slots_B: Tensor
    """int64: row of each text in every table."""
    texts: Texts
    """Their pages, and their lengths with the new token."""
    window: int | None
    nobody: int
    """The row of a table that belongs to no text."""

    @property
    def places(self) -> Tensor:
        """int64: where the new token stands, counted from 0."""
        return (self.texts.lengths_B.long() - 1).clamp(min=0)


class Pools:
    """What a mixer keeps of each token, by name; pools are made when the first tokens come, since only these have shapes."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._pools: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._pools[name]

    def write(self, step: Step, rows: Mapping[str, Tensor]) -> None:
        """`rows` [B, ...] of the new tokens."""
        for name, part in rows.items():
            step.texts.write(self._pool(name, part), part)

    def fill(self, pages_P: Tensor, rows: Mapping[str, Tensor]) -> None:
        """`rows` [T, ...] of a whole text into its pages, of which there are enough; those that are DUMMY get nothing."""
        page = self._room.page
        for name, part in rows.items():
            pool = self._pool(name, part)
            for index, number in enumerate(pages_P[: -(-len(part) // page)].tolist()):
                if number != DUMMY:
                    piece = part[index * page : (index + 1) * page]
                    pool[number, : len(piece)] = piece.to(pool.dtype)

    def copy(self, pages_P: Tensor, others_P: Tensor) -> None:
        """What lies in some pages into others."""
        for pool in self._pools.values():
            pool[others_P.long()] = pool[pages_P.long()]

    def before(self, step: Step, name: str) -> Tensor:
        """What is kept of the token before the new one, [B, ...]; zeros where there is none."""
        pool = self._pools[name]
        earlier = Texts(step.texts.tables_BP, step.texts.lengths_B - 1, step.texts.page)
        rows = pool.flatten(0, 1)[earlier.last]
        none_B = step.texts.lengths_B <= 1
        return rows.masked_fill(none_B.view(-1, *[1] * (rows.ndim - 1)), 0)

    @property
    def token_bytes(self) -> int:
        """Bytes that are kept of a token."""
        return sum(pool[0, 0].numel() * pool.element_size() for pool in self._pools.values())

    def _pool(self, name: str, like: Tensor) -> Tensor:
        if name not in self._pools:
            self._pools[name] = self._room.pool(*like.shape[1:], dtype=like.dtype)
        return self._pools[name]


@dataclass(frozen=True)
class Kept:
    """What a step of a mixer reads: rows of every token of each text, the new one's included."""

    pools: Pools
    step: Step

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
        return self.step.places

    @property
    def window(self) -> int | None:
        return self.step.window

    @property
    def seen(self) -> Tensor:
        """bool: the keys that the new token sees."""
        return self.texts.seen(self.window)


class _Change(NamedTuple):
    """Of a text's pages: places in its row of the table."""

    gone: list[int]
    new: range


class Book:
    """Who has which pages. Numbers are kept on the host, and copied to the device where they have changed."""

    def __init__(self, room: Room, pages_of_a_text: int) -> None:
        self.room, self._most = room, pages_of_a_text
        self._free_pages = list(range(room.pages - 1, DUMMY, -1))
        self._free_slots = list(range(room.slots - 1, -1, -1))
        self._tables = torch.full((room.rows, pages_of_a_text), DUMMY, dtype=torch.int32, device=room.device)
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def open(self, tokens: int, window: int | None = None) -> int:
        """A slot for a text of so many tokens; only the pages that the window's next token may see. Raises CacheFull."""
        if not self._free_slots:
            raise CacheFull(f"all {self.room.slots} texts are under way; close one first")
        slot = self._free_slots.pop()
        self._pages[slot], self._lengths[slot] = [], 0
        try:
            self.grow([slot], tokens, window)
        except CacheFull:
            self.close(slot)
            raise
        return slot

    def grow(self, slots: Sequence[int], tokens: int = 1, window: int | None = None) -> None:
        """Room for so many more tokens of each; pages that no later token will see become free. Rows that are nobody's get none.

        Raises CacheFull, with nothing changed.
        """
        changes = {slot: self._change(slot, tokens, window) for slot in slots if slot in self._pages}
        short = sum(len(change.new) - len(change.gone) for change in changes.values()) - len(self._free_pages)
        if short > 0:
            taken = f"all {self.room.pages - 1} pages of {self.room.page} tokens are taken"
            raise CacheFull(f"{taken}, {short} more are needed; close a text first")
        for slot, change in changes.items():
            self._free_pages.extend(reversed([self._pages[slot][index] for index in change.gone]))
        for slot, change in changes.items():
            self._lengths[slot] += tokens
            if change.gone or change.new:
                self._carry_out(slot, change)

    def _change(self, slot: int, tokens: int, window: int | None) -> _Change:
        pages, page = self._pages[slot], self.room.page
        length = self._lengths[slot] + tokens
        wanted = -(-length // page)
        if wanted > self._most:
            raise CacheFull(f"a text may have {self._most * page} tokens here, got {length}")
        # the token before the new one stays too: sums go on from what is kept of it
        first = 0 if window is None else max(0, length - max(window, 2)) // page
        gone = [index for index, number in enumerate(pages[:first]) if number != DUMMY]
        return _Change(gone, range(max(first, len(pages)), wanted))

    def _carry_out(self, slot: int, change: _Change) -> None:
        pages = self._pages[slot]
        for index in change.gone:
            pages[index] = DUMMY
        if change.new:
            pages.extend([DUMMY] * (change.new.start - len(pages)))
            pages.extend(self._free_pages.pop() for _ in change.new)
        said = torch.tensor(pages + [DUMMY] * (self._most - len(pages)), dtype=torch.int32)
        self._tables[slot] = said.to(self.room.device)

    def close(self, slot: int) -> None:
        """Forgets a text."""
        self._free_pages.extend(reversed([number for number in self._pages.pop(slot) if number != DUMMY]))
        del self._lengths[slot]
        self._tables[slot] = DUMMY
        self._free_slots.append(slot)

    def pages(self, slot: int) -> Tensor:
        """int32 [P]: the text's row of the table."""
        return self._tables[slot]

    def length(self, slot: int) -> int:
        """Tokens of the text."""
        return self._lengths[slot]

    @property
    def nobody(self) -> int:
        """The slot of rows that only fill a batch up."""
        return self.room.slots

    @property
    def taken(self) -> int:
        """Pages that texts have."""
        return self.room.pages - 1 - len(self._free_pages)

    def step(self, slots: Sequence[int], window: int | None) -> Step:
        """What a step of these texts needs, their new tokens counted already."""
        device = self.room.device
        lengths_B = torch.tensor([self._lengths.get(slot, 0) for slot in slots], dtype=torch.int32, device=device)
        slots_B = torch.tensor(list(slots), device=device)
        return Step(slots_B, Texts(self._tables[slots_B], lengths_B, self.room.page), window, self.nobody)


@dataclass
class Remembered:
    """States of a memory whose steps are worked out text by text: its state after the last whole chunk, and the tokens since."""

    states: dict[int, Any] = field(default_factory=dict)
    since: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


def has_step(part: Any) -> bool:
    """Whether a mixer or a memory says what its `forward` does one token at a time; a `forward` below a `step` may do another thing."""
    for cls in type(part).__mro__:
        if "step" in vars(cls):
            return vars(cls)["step"] is not None
        if "forward" in vars(cls):
            break
    return False


__all__ = ["DUMMY", "PAGE", "Book", "CacheFull", "Pools", "Remembered", "Room", "Step", "Texts", "has_step"]
