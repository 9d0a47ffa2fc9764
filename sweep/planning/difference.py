"""Difference between a grid and the database: cells by pending action, and changes since the last launch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...results.console.text import counted
from ...results.designs.design_option import design_from_options
from ...results.errors import SweepUnknown
from ...results.store.records import AXES, CellState, RevisionRecord
from ...results.store.store import Store
from ..grid.cell import Cell
from ..grid.grid import SEED, Grid
from ..grid.yaml_document import ValueLimitExceeded, value_of
from ..probes import requested
from .ordering import unpaired_contrasts
from .planner import Plan

Change = tuple[str, object, object]
"""A change as (key, old value, new value); None for a value that is missing."""
IGNORED_KEYS = ("name", "description")
"""Keys of a grid file that affect no cell and no report."""


@dataclass(frozen=True)
class ListedCell:
    """A cell in a group."""

    id: str | None
    """Id; None for a cell dropped by an exclude rule, which has no config."""
    slug: str
    """Slug; for a dropped cell its levels as axis=level."""
    note: str = ""
    """Share of finished steps, the rule that drops it, or the state of an orphan; "" without a note."""


@dataclass(frozen=True)
class GridDifference:
    """Every cell of the grid, of its exclude rules and of the last revision, in one group each, and what changed."""

    groups: Mapping[str, Sequence[ListedCell]]
    """Standing of the cells, "resumable", "excluded" or "orphaned" -> cells; empty groups are missing."""
    revision: int | None = None
    """Number of the sweep's last revision; None if it was never launched."""
    changes: Sequence[Change] = ()
    """Changes of the grid file, the command line and the requested measurements."""
    inherited: Sequence[Change] = ()
    """Changes of cells with a new id that the file does not explain: from a base, a default or the text."""
    axes: Sequence[str] = ()
    """A sentence for each new or removed axis."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """Exclude rule as text -> number of cells that it drops."""


def diff(grid: Grid, plan: Plan, cells: Sequence[Cell], store: Store | None) -> GridDifference:
    """Return the difference between a grid and the database.

    Groups are keyed by standing: new, running, done, failed, diverged, interrupted, pruned, needs-eval, weights gone;
    "resumable" stands for interrupted cells with finished steps. They come in the order of their first cell. "excluded"
    and "orphaned" follow where there are such cells. "orphaned" holds cells of the last revision that the grid no
    longer has. "excluded" has an entry per dropped combination (or per dropped seed); `rules` counts the cells. For a
    sweep that was never launched only groups and rules are set.

    Args:
        grid: The grid.
        plan: Plan of the launch, which gives the cells' standings; cells that `--only` filters out are in no group.
        cells: All cells of the grid.
        store: Database; None counts as an empty one.
    """
    groups = _group_by_standing(plan)
    rules: dict[str, int] = {}
    for index, combination in grid.excluded_combinations():
        rule = grid.exclude[index]
        text = f"exclude[{index}] ({', '.join(f'{name}: {_levels(levels)}' for name, levels in rule.items())})"
        rules[text] = rules.get(text, 0) + (1 if SEED in combination else len(grid.seeds))
        slug = ", ".join(f"{name}={word}" for name, word in combination.items())
        groups.setdefault("excluded", []).append(ListedCell(None, slug, f"by exclude[{index}]"))
    last = _last_revision(store, grid.name)
    if store is None or last is None:
        return GridDifference(groups, rules=rules)
    members = store.members(grid.name)
    now = {cell.id: cell for cell in cells}
    gone = [cell for cell, _ in members if cell not in now]
    states = store.states(gone) if gone else {}
    orphans = [states[cell] for cell in gone if cell in states]
    if orphans:
        groups["orphaned"] = [ListedCell(state.cell_id, state.slug, state.state) for state in orphans]
    changes = list(grid_changes(last, grid, cells))
    return GridDifference(
        groups,
        revision=last.number,
        changes=changes,
        inherited=_inherited(store, orphans, cells, {key.partition(".")[2] for key, _, _ in changes}),
        axes=list(_axis_changes(store, members, now, orphans)),
        rules=rules,
    )


def _levels(levels: Sequence[str]) -> str:
    return levels[0] if len(levels) == 1 else f"[{', '.join(levels)}]"


def _group_by_standing(plan: Plan) -> dict[str, list[ListedCell]]:
    """Return group -> the plan's cells in grid order, with a note on the finished share of a partly trained cell.

    The group is the standing's text; "interrupted" becomes "resumable" if part of the steps are done.
    """
    remaining = {task.cell.id: task.remaining_share for task in plan.tasks if task.kind == "train"}
    groups: dict[str, list[ListedCell]] = {}
    for cell in plan.cells:
        word, note = str(plan.standings[cell.id]), ""
        share = remaining.get(cell.id, 1.0)
        if share < 1:
            note = f"{1 - share:.0%} of its steps are done"
            word = "resumable" if word == "interrupted" else word
        groups.setdefault(word, []).append(ListedCell(cell.id, cell.slug, note))
    return groups


def _last_revision(store: Store | None, sweep: str) -> RevisionRecord | None:
    """Return the sweep's last revision; None without one."""
    try:
        return store.revision(sweep) if store is not None else None
    except SweepUnknown:
        return None


# --- what changed since the last revision -----------------------------------------------------------------------------


def flatten_keys(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys to values.

    Non-empty lists of mappings get indices, such as exclude[0].memory; any other list is a value, and so are empty
    mappings. A value that is no mapping comes back as {prefix: value}.

    Args:
        value: The nested value.
        prefix: Key that stands before all others, without a final dot.
    """
    if isinstance(value, Mapping) and value:
        return {key: leaf for name, child in value.items() for key, leaf in flatten_keys(child, f"{prefix}.{name}" if prefix else str(name)).items()}  # fmt: skip
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return {
            key: leaf
            for index, child in enumerate(value)
            for key, leaf in flatten_keys(child, f"{prefix}[{index}]").items()
        }
    return {prefix: value}


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Yield (key, old value, new value) for each key whose value differs: keys of `old` first, then new ones.

    A missing key counts as None, so that a key which is None on one side and missing on the other is no change.
    """
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            yield key, old.get(key), new.get(key)


def grid_changes(last: RevisionRecord, grid: Grid, cells: Sequence[Cell]) -> Iterator[Change]:
    """Yield the changes since the last revision: of the grid file, `--set`, and the requested measurements.

    Keys are dotted keys of the file (without name and description), "--set PATH", and "probe NAME" with the sorted
    context lengths as values. A stored file that cannot be read as a mapping counts as empty. Requests are skipped if
    the revision has none.

    Args:
        last: The last revision.
        grid: The grid.
        cells: All its cells, for the measurements that they request.
    """
    try:
        before = value_of(last.grid_text)
    except ValueLimitExceeded:
        before = None
    old_grid = before if isinstance(before, dict) else {}
    yield from changed_keys(
        *(
            {k: v for k, v in flatten_keys(d).items() if k and k not in IGNORED_KEYS}
            for d in (old_grid, grid.document.data)
        )
    )
    was, now = last.options.get("set", {}), {path: setting.value for path, setting in grid.command_line.items()}
    yield from changed_keys(
        *({f"--set {k}": v for k, v in options.items()} for options in (was, json.loads(json.dumps(now))))
    )
    requests = {
        pair for config in {id(c.config.eval): c.config.eval for c in cells}.values() for pair in requested(config)
    }
    pairs = ({(str(probe), int(length)) for probe, length in last.options.get("requested", [])}, requests)
    if last.options.get("requested") is not None:
        yield from changed_keys(*(_by_probe(requested_pairs) for requested_pairs in pairs))


def _by_probe(pairs: set[tuple[str, int]]) -> dict[str, list[int]]:
    """Return "probe NAME" -> its sorted context lengths."""
    lengths: dict[str, list[int]] = {}
    for probe, length in sorted(pairs):
        lengths.setdefault(f"probe {probe}", []).append(length)
    return lengths


def _inherited(store: Store, orphans: Sequence[CellState], cells: Sequence[Cell], explained: set[str]) -> list[Change]:
    """Return the changes between orphaned cells and the grid's cells of the same slug, each once: (path, old, new).

    Only settings of model, data and train that the stored config has are compared.

    Args:
        store: Database.
        orphans: Cells of the last revision that the grid no longer has.
        cells: Cells of the grid.
        explained: Dotted paths to leave out, as the file itself changed them.
    """
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
            for path, was, now in changed_keys(flatten_keys(old, section), flatten_keys(new[section], section)):
                # a setting newer than the database is not a change
                if path in flatten_keys(old, section) and path not in explained:
                    seen.setdefault(json.dumps([path, was, now], default=str), (path, was, now))
    return list(seen.values())


def _axis_changes(
    store: Store,
    members: Sequence[tuple[str, Mapping[str, str]]],
    now: Mapping[str, Cell],
    orphans: Sequence[CellState],
) -> Iterator[str]:
    """Yield a sentence for each axis that only the grid has, then for each that only the last revision has.

    It says how many cells of before keep their ids, and at which level. If no cell stays, it names the level that all
    orphans share, if there is one.

    Args:
        store: Database.
        members: (Cell id, axis -> level) of the last revision.
        now: Cell id -> cell of the grid.
        orphans: Cells of the last revision that the grid no longer has.
    """
    before = dict.fromkeys(name for _, axes in members for name in axes)
    after = dict.fromkeys(name for cell in now.values() for name in cell.axes)
    shared = [(cell, axes) for cell, axes in members if cell in now]
    num_members = len(members)
    for name in after:
        if name in before:
            continue
        levels = Counter(now[cell].axes.get(name, "no level") for cell, _ in shared)
        if len(shared) == num_members and len(levels) == 1:
            yield f"new axis {name}: all {num_members} earlier cells have {name}={next(iter(levels))} and keep their ids"
        elif shared:
            counts = ", ".join(f"{count} {name}={level}" for level, count in levels.items())
            yield f"new axis {name}: of {num_members} earlier cells, {counts} keep their ids; {num_members - len(shared)} are orphaned"
        else:
            common_level = _common_level(store, orphans, name)
            yield (
                f"new axis {name}: no earlier cell has one of its levels"
                + (
                    f"; all have {name}={common_level}: add this level to keep their results"
                    if common_level is not None
                    else ""
                )
            )
    for name in before:
        if name not in after:
            levels = Counter(axes.get(name, "no level") for _, axes in shared)
            counts = ", ".join(f"{count} {name}={level}" for level, count in levels.items())
            yield f"axis {name} was removed: " + (
                f"{counts} keep their ids" if shared else "no earlier cell keeps its id"
            )


def _common_level(store: Store, orphans: Sequence[CellState], axis: str) -> str | None:
    """Return the level of a built-in axis, or the JSON text of the value at a dotted path, that all orphans share.

    None if they differ or if no orphan has a value. Orphans without a value are ignored for a path.
    """
    if axis in AXES:
        levels = {state.levels[axis] for state in orphans}
    else:
        configs = store.configs([state.cell_id for state in orphans])
        stored_levels = [flatten_keys(config).get(axis) for config in configs.values()]
        levels = {
            level if isinstance(level, str) else json.dumps(level) for level in stored_levels if level is not None
        }
    return levels.pop() if len(levels) == 1 else None


def describe_design(grid: Grid, cells: Sequence[Cell], store: Store | None) -> list[str]:
    """Return the sentences on the grid's design, without full stops.

    One is on cells of the design launched before. Without a design, which is estimated by least squares, there is one
    on each declared contrast that has no pair of cells.
    """
    if grid.chosen is None:
        return [*_vanished_cells(grid.name, cells, store), *unpaired_contrasts(cells, grid.contrasts)]
    return [*grid.chosen.lines(), *_vanished_cells(grid.name, cells, store)]


def _vanished_cells(sweep: str, cells: Sequence[Cell], store: Store | None) -> list[str]:
    """Return one sentence: the cells of the last launched design are all in `cells`, or the number that are not.

    Empty if the sweep was never launched or its last launch had no design.
    """
    last = _last_revision(store, sweep)
    if store is None or last is None or design_from_options(last.options) is None:
        return []
    before = {state.cell_id for state in store.cell_states(sweep, revision=last.number)}
    gone = len(before - {cell.id for cell in cells})
    if not gone:
        return [f"design: all {counted(len(before), 'cell')} of the last launched design are among these {len(cells)}"]
    return [
        f"design: {gone} of the {counted(len(before), 'cell')} of the last launched design are not among these "
        f"{len(cells)}; their results stay in the database. A design contains a smaller one only for the same "
        "grid, contrasts, method and model"
    ]
