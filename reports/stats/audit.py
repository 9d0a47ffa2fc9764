"""What differs between the cells of a sweep besides what its axes say: read before any comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ...results.console.text import counted
from ...results.paper import OWNER
from ...results.store.records import Attempt, CellState, Provenance
from ...results.store.store import Store
from .. import cell_filter
from ..sweep_data import ExtraLengths, SweepData, load_sweep_data, provenances_of_attempts

SHOWN = 3  # different values named before the rest is counted
IGNORED_SETTINGS = (
    "seed",
    "resources.",
    "checkpoint.",
    "plugins",
    "published",
    "data.fingerprint",
    "data.corpus",
    "data.tokenizer",
    "eval.probes",
    "eval.lengths",
)
"""Settings that are no difference between two numbers, or that are told otherwise: which probes and lengths an attempt was
asked for changes none of its numbers."""
TEXT = "data."
OF_TEXT = ("tokenizer", "corpus")
"""Facts that an axis over texts explains: a setting that begins with TEXT."""
ALWAYS_NAMED = "train.micro_batch"
"""Named even where an axis explains it: regularizers can feel it."""
PROVENANCE_FACTS: Mapping[str, Callable[[Provenance], object]] = {
    "GPU": lambda p: p.gpu_name or p.device or None,
    "driver": lambda p: p.driver,
    "code": lambda p: p.git_commit[:12] + (" with changes" if p.git_dirty else "") if p.git_commit else None,
    "Python": lambda p: p.python or None,
    "precision": lambda p: p.dtype or None,
    "tokenizer": lambda p: p.tokenizer or None,
    "corpus": lambda p: f"{p.corpus} {p.corpus_fingerprint[:12]}".strip() or None,
    "threads": lambda p: p.threads if p.device == "cpu" else None,
}


def homogeneity(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: ExtraLengths = None
) -> list[str]:
    """One line for everything that differs between the cells with numbers that are shown: GPU, software, recipe, precision, micro-batch,
    kernels, plugins of probes, restarts, shared GPUs, co-tenancy; and one for what was not recorded. Empty when all is the same.

    A setting that follows the level of one axis is what the sweep is about and is not named, but for the micro-batch.
    Raises SweepUnknown.
    """
    data = load_sweep_data(store, sweep, revision=revision, lengths=lengths)
    used = {value.attempt_id for value in data.shown.values()}
    cells = {cell.cell_id: cell for cell in data.cells}
    by_cell = provenances_of(store, data)
    attempts = store.attempts_of(cells)
    paper = bool(attempts) and all(attempt.owner == OWNER for attempt in attempts)
    texts = {
        cell.cell_id: {axis: level for axis, level in cell.axes.items() if axis.startswith(TEXT)} for cell in data.cells
    }
    axes = {name: texts if name in OF_TEXT else None for name in PROVENANCE_FACTS}
    lines = [line for name, fact in PROVENANCE_FACTS.items() if (line := _differs(name, by_cell, fact, axes[name]))]
    lines += _named("package", by_cell, lambda p: p.packages) + _named("kernel of", by_cell, lambda p: p.kernels)
    lines += _probes(data)
    lines += _settings(data, {cell: found[-1].config for cell, found in by_cell.items() if found})
    if not paper:
        lines += _deviations([attempt for attempt in attempts if attempt.id in used])
        lines += _restarts(attempts, cells)
        lines += _sharing(by_cell)
        lines += _together([attempt for attempt in _everyone(store, data, attempts) if attempt.id in used or data.only])
    return lines + _unrecorded(by_cell, paper)


def _everyone(store: Store, data: SweepData, attempts: list[Attempt]) -> list[Attempt]:
    """The attempts of all cells of the sweep: those of cells that are not shown ran beside the others, too."""
    if not data.only:
        return attempts
    with cell_filter.only(data.sweep, ()):
        return store.attempts_of(
            {cell.cell_id for cell in load_sweep_data(store, data.sweep, revision=data.revision).cells}
        )


def provenances_of(store: Store, data: SweepData) -> dict[str, list[Provenance]]:
    """By cell with numbers that are shown: what is known of the attempts that these come from, the oldest first."""
    behind: dict[str, set[int]] = defaultdict(set)
    for (cell, *_), value in data.shown.items():
        behind[cell].add(value.attempt_id)
    known = provenances_of_attempts(store, {attempt for found in behind.values() for attempt in found})
    return {cell: [known[one] for one in sorted(found) if one in known] for cell, found in behind.items()}


def _groups(pairs: Iterable[tuple[str, object]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for cell, value in pairs:
        found[str(value)].add(cell)
    return found


def _line(name: str, groups: Mapping[str, set[str]]) -> str:
    ranked = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    told = [f"{value} ({counted(len(cells), 'cell')})" for value, cells in ranked[:SHOWN]]
    more = f", and {len(ranked) - SHOWN} more" if len(ranked) > SHOWN else ""
    return f"{name} differs: {', '.join(told)}{more}"


def _differs(
    name: str,
    by_cell: Mapping[str, Sequence[Provenance]],
    fact: Callable[[Provenance], object],
    levels: Mapping[str, Mapping[str, str]] | None = None,
) -> str | None:
    """The line on a fact, unless it follows one of these axes, by cell."""
    pairs = [(cell, fact(one)) for cell, found in by_cell.items() for one in found]
    groups = _groups((cell, value) for cell, value in pairs if value is not None)
    if len(groups) < 2 or (levels and _follows_an_axis({cell: str(value) for cell, value in pairs}, levels)):
        return None
    return _line(name, groups)


def _named(
    what: str, by_cell: Mapping[str, Sequence[Provenance]], facts: Callable[[Provenance], Mapping[str, Any]]
) -> list[str]:
    """The lines on facts that have names of their own, such as versions of packages."""
    names = sorted({name for found in by_cell.values() for one in found for name in facts(one)})
    told = (_differs(f"{what} {name}", by_cell, lambda p, n=name: facts(p).get(n)) for name in names)  # type: ignore[misc]
    return [line for line in told if line]


def _probes(data: SweepData) -> list[str]:
    """Probes whose numbers come from different versions of their plugin: nothing is measured again because a file changed."""
    behind: dict[str, list[tuple[str, object]]] = defaultdict(list)
    for (cell, probe, *_), value in data.shown.items():
        if value.source is not None:
            behind[probe].append((cell, value.source[:12]))
    found = {probe: _groups(pairs) for probe, pairs in sorted(behind.items())}
    return [_line(f"plugin of the probe {probe}", groups) for probe, groups in found.items() if len(groups) > 1]


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config as dotted path -> text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flatten_config(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = str(value)
    return found


def _settings(data: SweepData, configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    flattened = {cell: flatten_config(config) for cell, config in configs.items()}
    levels = {cell.cell_id: {**cell.axes, **cell.levels, "seed": str(cell.seed)} for cell in data.cells}
    lines = []
    for path in sorted({path for config in flattened.values() for path in config}):
        if path.startswith(IGNORED_SETTINGS):
            continue
        # a setting of a part that some cells do not have is no difference between them
        values = {cell: config[path] for cell, config in flattened.items() if path in config}
        groups = _groups(values.items())
        if len(groups) > 1 and (path == ALWAYS_NAMED or not _follows_an_axis(values, levels)):
            lines.append(_line(path, groups))
    return lines


def _follows_an_axis(values: Mapping[str, str], levels: Mapping[str, Mapping[str, str]]) -> bool:
    for axis in {axis for cell in values for axis in levels[cell]}:
        found: dict[str | None, set[str]] = defaultdict(set)
        for cell, value in values.items():
            found[levels[cell].get(axis)].add(value)
        if all(len(some) == 1 for some in found.values()):
            return True
    return False


def _deviations(attempts: Sequence[Attempt]) -> list[str]:
    """What attempts ran with other than their cell says, as a retry with a smaller micro-batch does."""
    groups = _groups(
        (attempt.cell_id, f"{path}={value}")
        for attempt in attempts
        for path, value in flatten_config(attempt.deviation or {}).items()
    )
    return [
        f"{setting}, other than asked for, in {counted(len(cells), 'cell')}"
        for setting, cells in sorted(groups.items())
    ]


def _restarts(attempts: Sequence[Attempt], cells: Mapping[str, CellState]) -> list[str]:
    trainings: dict[str, int] = defaultdict(int)
    for attempt in attempts:
        trainings[attempt.cell_id] += attempt.kind == "train"
    again = sum(count > 1 for count in trainings.values())
    return [f"restarts: {again} of {counted(len(cells), 'cell')} took more than one training attempt"] if again else []


def _sharing(by_cell: Mapping[str, Sequence[Provenance]]) -> list[str]:
    """Cells with an attempt beside another one on the same GPU."""
    most = {cell: max((p.co_tenants or 0 for p in found), default=0) for cell, found in by_cell.items()}
    shared = {cell for cell, count in most.items() if count}
    if not shared:
        return []
    return [
        f"shared GPUs: {counted(len(shared), 'cell')} met up to {max(most.values())} other attempts on the same GPU over their time; "
        "their tokens/s and MFU are not those of the GPU alone"
    ]


def _together(attempts: Sequence[Attempt]) -> list[str]:
    """The most attempts that ran at once on a host, whether or not on one GPU."""
    most: dict[str, int] = {}
    for host in sorted({attempt.host for attempt in attempts}):
        spans = [(a.started_at, a.finished_at) for a in attempts if a.host == host and a.finished_at is not None]
        # an end sorts before a start at the same moment: one after the other is not together
        moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
        most[host] = max(accumulate(step for _, step in moments), default=0)
    shared = {host: count for host, count in most.items() if count > 1}
    told = ", ".join(
        f"up to {counted(count, 'attempt')} at once on {host}" for host, count in list(shared.items())[:SHOWN]
    )
    return [f"co-tenancy: {told}; their speeds may have suffered"] if shared else []


def _unrecorded(by_cell: Mapping[str, Sequence[Provenance]], paper: bool) -> list[str]:
    lacking = {
        "code": [c for c, found in by_cell.items() if any(p.git_commit is None for p in found)],
        "software": [c for c, found in by_cell.items() if any(not p.packages for p in found)],
        "provenance": [c for c, found in by_cell.items() if not found],
    }
    if paper:
        return ["not recorded by the paper: code, software, seeds, restarts, co-tenancy"]
    told = [f"{name} ({len(cells)} of {counted(len(by_cell), 'cell')})" for name, cells in lacking.items() if cells]
    return [f"not recorded: {', '.join(told)}"] if told else []
