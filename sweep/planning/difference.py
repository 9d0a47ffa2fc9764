"""What lies between a grid and the database: cells by what is to be done about them, and what changed since the last launch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...results.console.text import counted
from ...results.designs.design_option import design_of
from ...results.errors import SweepUnknown
from ...results.store.records import AXES, CellState, RevisionRecord
from ...results.store.store import Store
from ..grid.cell import Cell
from ..grid.grid import SEED, Grid
from ..grid.yaml_document import ValueLimitExceeded, value_of
from ..probes import requested
from .planner import Plan

Change = tuple[str, object, object]
"""What changed: where, and from what to what; None where there was, or is, nothing."""
LEFT_OUT = ("name", "description")
"""Of a grid file, what changes no cell and no report."""


@dataclass(frozen=True)
class ListedCell:
    """A cell in a group."""

    id: str | None
    """None for one that an exclude rule drops: it has no config, so no id."""
    slug: str
    note: str = ""


@dataclass(frozen=True)
class GridDifference:
    """Every cell of the grid, of its exclude rules and of the last revision is in one group."""

    groups: Mapping[str, Sequence[ListedCell]]
    revision: int | None = None
    """The sweep's last one; None for a sweep that was never launched."""
    changes: Sequence[Change] = ()
    """Of the grid file, the command line and what is measured."""
    inherited: Sequence[Change] = ()
    """Of cells that got another id though the file does not say why: a base, a default or the text."""
    axes: Sequence[str] = ()
    """A sentence for every axis that is new or gone."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """By exclude rule, the cells that it drops."""


def between(grid: Grid, plan: Plan, cells: Sequence[Cell], store: Store | None) -> GridDifference:
    """The difference between the grid with its cells, of which the plan carries out some, and what the database holds."""
    groups = _standing(plan)
    rules: dict[str, int] = {}
    for index, words in grid.excluded_combinations():
        rule = grid.exclude[index]
        text = f"exclude[{index}] ({', '.join(f'{name}: {_levels(some)}' for name, some in rule.items())})"
        rules[text] = rules.get(text, 0) + (1 if SEED in words else len(grid.seeds))
        slug = ", ".join(f"{name}={word}" for name, word in words.items())
        groups.setdefault("excluded", []).append(ListedCell(None, slug, f"by exclude[{index}]"))
    last = _last(store, grid.name)
    if store is None or last is None:
        return GridDifference(groups, rules=rules)
    members = store.members(grid.name)
    now = {cell.id: cell for cell in cells}
    gone = [cell for cell, _ in members if cell not in now]
    states = store.states(gone) if gone else {}
    orphans = [states[cell] for cell in gone if cell in states]
    if orphans:
        groups["orphaned"] = [ListedCell(state.cell_id, state.slug, state.state) for state in orphans]
    changes = list(changed(last, grid, cells))
    return GridDifference(
        groups,
        revision=last.number,
        changes=changes,
        inherited=_inherited(store, orphans, cells, {key.partition(".")[2] for key, _, _ in changes}),
        axes=list(_axes(store, members, now, orphans)),
        rules=rules,
    )


def _levels(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"[{', '.join(words)}]"


def _standing(plan: Plan) -> dict[str, list[ListedCell]]:
    rest = {task.cell.id: task.rest for task in plan.tasks if task.kind == "train"}
    groups: dict[str, list[ListedCell]] = {}
    for cell in plan.cells:
        word, note = str(plan.standings[cell.id]), ""
        left = rest.get(cell.id, 1.0)
        if left < 1:
            note = f"{1 - left:.0%} of its steps are done"
            word = "resumable" if word == "interrupted" else word
        groups.setdefault(word, []).append(ListedCell(cell.id, cell.slug, note))
    return groups


def _last(store: Store | None, sweep: str) -> RevisionRecord | None:
    try:
        return store.revision(sweep) if store is not None else None
    except SweepUnknown:
        return None


# --- what changed since the last revision -----------------------------------------------------------------------------


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted keys of nested mappings, of lists of mappings with their places: exclude[0].memory; any other list is a value."""
    if isinstance(value, Mapping) and value:
        return {key: one for name, some in value.items() for key, one in flat(some, f"{path}.{name}" if path else str(name)).items()}  # fmt: skip
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return {key: one for index, some in enumerate(value) for key, one in flat(some, f"{path}[{index}]").items()}
    return {path: value}


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """The keys whose values differ, those of `old` first."""
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def changed(last: RevisionRecord, grid: Grid, cells: Sequence[Cell]) -> Iterator[Change]:
    """Key by key: the grid's file, --set, and the probes and lengths that are asked for."""
    try:
        before = value_of(last.grid_text)
    except ValueLimitExceeded:
        before = None
    told = before if isinstance(before, dict) else {}
    yield from compared(
        *({k: v for k, v in flat(d).items() if k and k not in LEFT_OUT} for d in (told, grid.document.data))
    )
    was, now = last.options.get("set", {}), {path: one.value for path, one in grid.command_line.items()}
    yield from compared(*({f"--set {k}": v for k, v in some.items()} for some in (was, json.loads(json.dumps(now)))))
    asked = {
        pair for config in {id(c.config.eval): c.config.eval for c in cells}.values() for pair in requested(config)
    }
    pairs = ({(str(probe), int(length)) for probe, length in last.options.get("requested", [])}, asked)
    if last.options.get("requested") is not None:
        yield from compared(*(_by_probe(some) for some in pairs))


def _by_probe(pairs: set[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for probe, length in sorted(pairs):
        found.setdefault(f"probe {probe}", []).append(length)
    return found


def _inherited(store: Store, orphans: Sequence[CellState], cells: Sequence[Cell], known: set[str]) -> list[Change]:
    """What differs between orphans and cells of the same slug, but for `known` paths."""
    by_slug = {cell.slug: cell for cell in cells}
    twins = {state.cell_id: by_slug[state.slug] for state in orphans if state.slug in by_slug}
    configs = store.configs(twins)
    seen: dict[str, Change] = {}
    for cell, config in configs.items():
        new = twins[cell].config.model_dump(mode="json")
        for section in ("model", "data", "train"):
            old = config.get(section)
            if not isinstance(old, Mapping):
                continue
            for path, was, now in compared(flat(old, section), flat(new[section], section)):
                # a setting that is newer than the database was not changed by anybody
                if path in flat(old, section) and path not in known:
                    seen.setdefault(json.dumps([path, was, now], default=str), (path, was, now))
    return list(seen.values())


def _axes(
    store: Store,
    members: Sequence[tuple[str, Mapping[str, str]]],
    now: Mapping[str, Cell],
    orphans: Sequence[CellState],
) -> Iterator[str]:
    """A sentence for every axis that only the last revision, or only the grid, has."""
    before = dict.fromkeys(name for _, axes in members for name in axes)
    after = dict.fromkeys(name for cell in now.values() for name in cell.axes)
    kept = [(cell, axes) for cell, axes in members if cell in now]
    many = len(members)
    for name in after:
        if name in before:
            continue
        levels = Counter(now[cell].axes.get(name, "no level") for cell, _ in kept)
        if len(kept) == many and len(levels) == 1:
            yield f"new axis {name}: all {many} cells of before have {name}={next(iter(levels))}; their ids stay"
        elif kept:
            told = ", ".join(f"{count} {name}={level}" for level, count in levels.items())
            yield f"new axis {name}: of {many} cells of before {told}, whose ids stay; {many - len(kept)} are orphaned"
        else:
            had = _had(store, orphans, name)
            yield (
                f"new axis {name}: no cell of before has one of its levels"
                + (f"; they have {name}={had}, which as a level would keep them" if had is not None else "")
            )
    for name in before:
        if name not in after:
            levels = Counter(axes.get(name, "no level") for _, axes in kept)
            told = ", ".join(f"{count} {name}={level}" for level, count in levels.items())
            yield f"axis {name} is gone: " + (f"of before stay {told}" if kept else "no cell of before stays")


def _had(store: Store, orphans: Sequence[CellState], axis: str) -> str | None:
    """The one level of the axis that all the orphans have, None for several or where nobody knows."""
    if axis in AXES:
        levels = {state.levels[axis] for state in orphans}
    else:
        configs = store.configs([state.cell_id for state in orphans])
        found = [flat(config).get(axis) for config in configs.values()]
        levels = {one if isinstance(one, str) else json.dumps(one) for one in found if one is not None}
    return levels.pop() if len(levels) == 1 else None


def describe_design(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[str]:
    """Sentences of the grid's design, a line each; of one that leaves out cells of the design launched before, how many."""
    found = grid.chosen.lines() if grid.chosen is not None else []
    return [*found, *_left(grid.name, cells, store)]


def _left(sweep: str, cells: Sequence[Cell], store: Store | None) -> list[str]:
    last = _last(store, sweep)
    if store is None or last is None or design_of(last.options) is None:
        return []
    before = {state.cell_id for state in store.cell_states(sweep, revision=last.number)}
    gone = len(before - {cell.id for cell in cells})
    if not gone:
        return [
            f"design: all {counted(len(before), 'cell')} of the design launched before are among these {len(cells)}"
        ]
    return [
        f"design: {gone} of the {counted(len(before), 'cell')} of the design launched before are not among these {len(cells)}; they stay in the "
        "database (report --orphans). Designs hold smaller ones of the same grid, contrasts, method and model"
    ]
