"""Evaluations of a trained model, one file each. A new probe is one file and one line in PROBES."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...results.store.records import Example, Measurement
    from ..config import EvalConfig
    from .subject import Subject

Result = tuple[list["Measurement"], list["Example"]]


class Probe(Protocol):
    """Yields what it measured at each length, one result a length, always at full context."""

    def __call__(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """Runs on a model in evaluation mode and leaves it as it was found."""


@dataclass(frozen=True)
class ProbeSpec:
    """Where a probe lives and what it is asked for."""

    target: str
    by_length: bool
    """Measured at every context length of the grid, or once (length 0)."""
    longest: str = ""
    """The function of limits.py that gives its longest length; none when no limit is known beforehand."""


PROBES: dict[str, ProbeSpec] = {
    "val": ProbeSpec("perplexity:validation", by_length=False),
    "clean": ProbeSpec("perplexity:clean", by_length=True, longest="targets"),
    "junk": ProbeSpec("perplexity:junk", by_length=True, longest="rows"),
    "needle": ProbeSpec("needle:needle", by_length=True, longest="documents"),
    "state_norm": ProbeSpec("state_norm:state_norm", by_length=True, longest="documents"),
    "count_map": ProbeSpec("count_map:count_map", by_length=False),
}


def load_probe(name: str) -> Probe:
    """The probe function of that name."""
    module, attribute = PROBES[name].target.split(":")
    probe: Any = getattr(importlib.import_module(f".{module}", __package__), attribute)
    return probe


def requested(config: EvalConfig) -> list[tuple[str, int]]:
    """Every (probe, length) that a cell is asked for; a cell is done when each has a value or a reason."""
    return [(name, length) for name in config.probes for length in (config.lengths if PROBES[name].by_length else (0,))]
