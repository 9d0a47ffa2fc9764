"""Whether two sweeps may be judged by each other: what their matched cells do not share, and which numbers that touches.

A level of an axis is matched and no difference. A setting that one side did not record is no difference that we know of, and is
said as such.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...results.store.records import AXES, CellState, Provenance
from ...results.store.store import Store
from ..number_format import format_count
from ..sweep_data import SweepData
from .audit import IGNORED_SETTINGS, PROVENANCE_FACTS, SHOWN, flatten_config, provenances_of

NAMED = 8  # settings that one side did not record, by name
SAME_SIZE = 0.005  # part of the parameters that does not make another size
HARMLESS_SETTINGS = (
    *IGNORED_SETTINGS,  # the text is told by its fingerprint or, without one, by its name
    "data.path",
    "data.end_of_text",
    "data.train_tokens",
    "eval.validate_every",
    "eval.chunk_tokens",
    "train.compile",
    "train.graphs",
    "train.kernels",
    "train.deterministic",
)
"""Beginnings of settings that change no number by more than its rounding, or that are told otherwise."""
DOCUMENTS = ("clean", "state_norm", "context", "position_nll", "passkey")
OF_PROBES: Mapping[str, tuple[str, ...]] = {
    "eval.validation_tokens": ("val", "extrapolation"),
    "eval.documents": DOCUMENTS,
    "eval.junk_": ("junk",),
    "eval.needle_": ("needle",),
    "data.heldout": (*DOCUMENTS, "needle"),
}
"""By beginning of a setting: the probes whose numbers it changes, where it does not change them all."""
LEFT_OUT: Mapping[str, str] = {
    "model.attn_every": "4",
    "model.attn_offset": "2",
    "model.memory": "none",
    "model.mlp": "relu2",
    "model.mlp_ratio": "4",
    "model.positions": "none",
    "model.window": "False",
    "train.constant": "0.3",
    "train.distractor": "False",
    "train.embedding_lr": "0.3",
    "train.head_lr": "0.003125",
    "train.loss_on": "all",
    "train.loss_reduction": "mean",
    "train.muon_lr": "0.02",
    "train.optimizer": "muon",
    "train.regularizer": "baseline",
    "train.scalar_lr": "0.01",
    "train.schedule": "cosine",
    "train.warmup_steps": "0",
}
"""Identity defaults by dotted path, as text: settings that a stored config leaves out where they stand at them.

Reports know no config classes; these are the literals of the settings that published sweeps record.
"""
SETTINGS = "eval.settings."
SPEED = "throughput"


@dataclass(frozen=True)
class RecipeDifference:
    """One thing that is not the same: in words, and the probes whose numbers cannot be judged by it (None: all of them; none:
    rounding alone)."""

    text: str
    probes: tuple[str, ...] | None = None

    def touches(self, probe: str) -> bool:
        """Whether numbers of that probe cannot be judged."""
        return self.probes is None or probe in self.probes


@dataclass(frozen=True)
class ComparedSweep:
    """A sweep and the database it lies in."""

    store: Store
    data: SweepData

    @cached_property
    def provenances(self) -> dict[str, list[Provenance]]:
        """By cell, those of the attempts that its numbers come from."""
        return provenances_of(self.store, self.data)

    def of(self, cells: Sequence[CellState]) -> list[Provenance]:
        """Those of some cells."""
        return [one for cell in cells for one in self.provenances.get(cell.cell_id, ())]

    def size(self, cells: Sequence[CellState]) -> float | None:
        """How many parameters the model of these cells has."""
        found = (self.data.value(cell.cell_id, SPEED, "parameters", 0) for cell in cells)
        return next((value.value for value in found if value is not None and value.value is not None), None)


Pairs = Sequence[tuple[Sequence[CellState], Sequence[CellState]]]
"""The cells of one configuration in both sweeps."""


def differences(mine: ComparedSweep, theirs: ComparedSweep, pairs: Pairs) -> tuple[list[RecipeDifference], list[str]]:
    """What matched cells do not share, what spoils every number first; and what one side alone recorded, in words."""
    found = _TwoSidedFacts()
    settings = _TwoSidedFacts()
    for left_cells, right_cells in pairs:
        left, right = mine.of(left_cells), theirs.of(right_cells)
        for name in ("tokenizer", "precision", "GPU"):
            found.add(
                name,
                *(
                    {str(PROVENANCE_FACTS[name](p)) for p in some if PROVENANCE_FACTS[name](p)}
                    for some in (left, right)
                ),
            )
        found.add("corpus", *_texts(left, right))
        sizes = mine.size(left_cells), theirs.size(right_cells)
        if all(sizes) and abs(sizes[0] / sizes[1] - 1) <= SAME_SIZE:  # type: ignore[operator]
            sizes = sizes[0], sizes[0]
        found.add("parameters", *({format_count(size)} if size else set() for size in sizes))
        flat_left, flat_right = _settings(left), _settings(right)
        _fill(flat_left, left, flat_right)
        _fill(flat_right, right, flat_left)
        for path in flat_left.keys() | flat_right.keys():
            if not path.startswith(HARMLESS_SETTINGS):
                settings.add(path, flat_left.get(path, set()), flat_right.get(path, set()))
    of_facts = {"precision": (), "GPU": (SPEED,)}
    told = [
        RecipeDifference(found.text(name), of_facts.get(name))
        for name in ("tokenizer", "corpus", "parameters")
        if found.differs(name)
    ]
    told += [
        RecipeDifference(settings.text(path), _probes_of(path))
        for path in sorted(settings.left, key=_rank)
        if settings.differs(path)
    ]
    told += [RecipeDifference(found.text(name), of_facts[name]) for name in ("GPU", "precision") if found.differs(name)]
    sweeps = (mine.data.sweep, theirs.data.sweep)
    lacking = zip(sweeps, found.lacking(), settings.lacking(), strict=True)
    named = [(sweep, [*facts, *sorted(paths, key=_rank)]) for sweep, facts, paths in lacking]
    return told, [f"not recorded of {sweep}: {_listed(names)}" for sweep, names in named if names]


class _TwoSidedFacts:
    """What both sides say, by name."""

    def __init__(self) -> None:
        self.left: dict[str, set[str]] = defaultdict(set)
        self.right: dict[str, set[str]] = defaultdict(set)
        self._differ: set[str] = set()

    def add(self, name: str, left: set[str], right: set[str]) -> None:
        self.left[name] |= left
        self.right[name] |= right
        if left and right and left != right:
            self._differ.add(name)

    def differs(self, name: str) -> bool:
        return name in self._differ

    def text(self, name: str) -> str:
        both = (_some(values) for values in (self.left[name], self.right[name]))
        return f"{name} {' instead of '.join(both)}"

    def lacking(self) -> tuple[list[str], list[str]]:
        """What the right side alone recorded, and what the left side alone did."""
        left = [name for name in self.left if self.right[name] and not self.left[name]]
        right = [name for name in self.left if self.left[name] and not self.right[name]]
        return left, right


def _some(values: set[str]) -> str:
    known = sorted(values)
    return " / ".join(known[:SHOWN]) + (f" and {len(known) - SHOWN} more" if len(known) > SHOWN else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _texts(left: Sequence[Provenance], right: Sequence[Provenance]) -> tuple[set[str], set[str]]:
    """The texts that both sides name: by name and fingerprint where both have one, else by name."""
    prints = [{p.corpus_fingerprint for p in some if p.corpus_fingerprint} for some in (left, right)]
    if all(prints) and prints[0] == prints[1]:
        return prints[0], prints[1]
    if all(prints):
        return tuple({f"{p.corpus} {p.corpus_fingerprint[:12]}".strip() for p in some} for some in (left, right))  # type: ignore[return-value]
    return tuple({p.corpus for p in some if p.corpus} for some in (left, right))  # type: ignore[return-value]


def _settings(known: Sequence[Provenance]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for one in known:
        for path, value in flatten_config(one.config).items():
            found[path].add(value)
    return found


def _fill(here: dict[str, set[str]], known: Sequence[Provenance], there: Mapping[str, set[str]]) -> None:
    """Adds what the other side records and this one left out as what it always was: the config of an attempt of one's own is
    whole, section by section, that of a published one is what is known of it."""
    if not known or any("published" in one.extra for one in known):
        return
    sections = {path.partition(".")[0] for path in here}
    for path in there.keys() - here.keys():
        if path in LEFT_OUT and path.partition(".")[0] in sections:
            here[path] = {LEFT_OUT[path]}


def _probes_of(path: str) -> tuple[str, ...] | None:
    if path.startswith(SETTINGS):
        return (path.removeprefix(SETTINGS).partition(".")[0],)
    return next((probes for beginning, probes in OF_PROBES.items() if path.startswith(beginning)), None)


def _rank(path: str) -> tuple[bool, bool, bool, str]:
    """The tokens trained first, then the rest of the recipe, the network, and how it was measured."""
    return path != "train.tokens", not path.startswith("train."), path.startswith("eval."), path


# --- configurations of both sweeps ------------------------------------------------------------------------------------


NOT_THERE = ("none", "off", "-")
"""Levels of a part that a network does not have; a config that leaves the part out says the same."""


@dataclass(frozen=True)
class Match:
    """A configuration of both sweeps: its runs here and there, and its levels of the further axes."""

    mine: Sequence[CellState]
    theirs: Sequence[CellState]
    further: Mapping[str, str]


def matched(mine: SweepData, theirs: SweepData) -> list[Match]:
    """The configurations that both have, in the order of `theirs`. One that varies an axis of which the other's config says nothing
    has no partner; else the config says at which level the other stands."""
    axes = further_axes(mine, theirs)
    found = []
    ours: dict[tuple[str, ...], list[Sequence[CellState]]] = {}
    for key, cells in mine.configurations().items():
        ours.setdefault(key[: len(AXES)], []).append(cells)
    for key, cells in theirs.configurations().items():
        levels = {axis: _level(theirs, cells[0], axis) for axis in axes}
        for some in ours.get(key[: len(AXES)], []):
            if all(_level(mine, some[0], axis) == level for axis, level in levels.items()):
                found.append(Match(some, cells, {axis: level or NOT_THERE[0] for axis, level in levels.items()}))
    return found


def further_axes(mine: SweepData, theirs: SweepData) -> list[str]:
    """The axes beyond the five that vary in either sweep."""
    return list(dict.fromkeys([*theirs.extra_axes(), *mine.extra_axes()]))


def _level(data: SweepData, cell: CellState, axis: str) -> str | None:
    """The level of an axis at which a cell stands, by its config where the sweep does not vary it; None for none."""
    level: Any = cell.axes.get(axis)
    if level is None:
        level = data.setting(cell, axis)
    text = "none" if level is None else str(level).lower()
    return None if text in NOT_THERE else text
