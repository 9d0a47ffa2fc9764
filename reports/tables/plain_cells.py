"""The cells that the small tables of the paper are about, in any sweep.

They stand at the plain recipe: the regularizer `baseline` where the sweep has it (else its first), other switches off
unless the table is about them. A sweep of published numbers gives the rows and columns that were printed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...results.store.records import AXES, CellState
from ..sweep_data import SweepData

OURS = "polar"
NATS, NEEDLE = ("clean", "nats"), ("needle", "digit_accuracy")


def plain_levels(data: SweepData, **levels: str) -> dict[str, str]:
    """The plain recipe with the given levels."""
    modes = data.levels("reg_mode")
    mode = "baseline" if "baseline" in modes or not modes else modes[0]
    return {"reg_mode": mode, "distractor": "off", "memory": "off", "window": "off"} | levels


def chosen(data: SweepData, levels: dict[str, str]) -> dict[tuple[str, ...], list[CellState]]:
    """The cells at these levels, by their levels of the extra axes; several of one group differ in their seed."""
    found: dict[tuple[str, ...], list[CellState]] = {}
    for key, cells in data.configurations().items():
        if all(cells[0].levels[axis] == level for axis, level in levels.items()):
            found.setdefault(key[len(AXES) :], []).extend(cells)
    return found


def memories(data: SweepData) -> list[str]:
    """The levels of memory but `off`; `on` where the sweep has none."""
    return [level for level in data.levels("memory") if level != "off"] or ["on"]


def mixers(data: SweepData) -> list[str]:
    """The levels of attn_type by name."""
    return sorted(data.levels("attn_type"))


def ours_last(names: Iterable[str]) -> list[str]:
    """The names with our own mixer at the end, as the paper has it."""
    return sorted(names, key=lambda name: (name == OURS, name))


def named(mixer: str, memory: str, one_memory: bool) -> str:
    if memory == "off":
        return mixer
    return f"{mixer} + memory" if one_memory else f"{mixer} + {memory}"


def titled(number: str, title: str, data: SweepData) -> str:
    name = f"Table {number}. " if number.isdigit() else ""
    return f"{name}{title}, sweep {data.sweep}, revision {data.revision}"
