"""Comparability of two sweeps: recipe differences of matched cells, and the probes that each one affects.

A level of an axis is matched, so it is no difference. A setting that one side did not record is not a known difference;
it is reported separately.
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
from .audit import IGNORED_SETTINGS, MAX_LISTED, PROVENANCE_FACTS, flatten_config, provenances_of

MAX_NAMED = 8  # largest number of unrecorded settings that are named
SIZE_TOLERANCE = 0.005  # relative difference in parameters that is ignored
HARMLESS_SETTINGS = (
    *IGNORED_SETTINGS,  # texts are compared by fingerprint or name instead
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
"""Beginnings of settings that change numbers by rounding at most, or that are reported separately."""
DOCUMENTS = ("clean", "state_norm", "context", "position_nll", "passkey")
AFFECTED_PROBES: Mapping[str, tuple[str, ...]] = {
    "eval.validation_tokens": ("val", "extrapolation"),
    "eval.documents": DOCUMENTS,
    "eval.junk_": ("junk",),
    "eval.needle_": ("needle",),
    "data.heldout": (*DOCUMENTS, "needle"),
}
"""Probes whose numbers a setting affects, by the beginning of the setting; unlisted settings affect all probes."""
IDENTITY_DEFAULTS: Mapping[str, str] = {
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
TOKENS_AXIS = "train.tokens"
PROBE_SETTINGS_PREFIX = "eval.settings."
SPEED_PROBE = "throughput"


@dataclass(frozen=True)
class RecipeDifference:
    """A difference between the recipes of two sweeps: its text, and the probes whose numbers become incomparable.

    `probes` is None for all probes and empty for a difference that changes numbers by rounding only.
    """

    text: str
    probes: tuple[str, ...] | None = None

    def affects_probe(self, probe: str) -> bool:
        """Return True if the difference makes numbers of that probe incomparable."""
        return self.probes is None or probe in self.probes


@dataclass(frozen=True)
class ComparedSweep:
    """A sweep and the database that holds it."""

    store: Store
    data: SweepData

    @cached_property
    def provenances(self) -> dict[str, list[Provenance]]:
        """Provenances of the attempts behind the shown numbers, by cell id, oldest attempt first."""
        return provenances_of(self.store, self.data)

    def provenances_of_cells(self, cells: Sequence[CellState]) -> list[Provenance]:
        """Return the provenances of some cells, in their order; a cell without shown numbers adds none."""
        return [provenance for cell in cells for provenance in self.provenances.get(cell.cell_id, ())]

    def size(self, cells: Sequence[CellState]) -> float | None:
        """Return the number of parameters of the first of these cells that has it; None if none has.

        It is the stored metric `throughput.parameters`, so it is None too if that probe is not shown.
        """
        values = (self.data.value(cell.cell_id, SPEED_PROBE, "parameters", 0) for cell in cells)
        return next((value.value for value in values if value is not None and value.value is not None), None)


Pairs = Sequence[tuple[Sequence[CellState], Sequence[CellState]]]
"""(own cells, reference cells) of each matched configuration."""


def recipe_differences(
    own_sweep: ComparedSweep, reference_sweep: ComparedSweep, pairs: Pairs
) -> tuple[list[RecipeDifference], list[str]]:
    """Return the recipe differences of matched cells, and sentences on what only one side recorded.

    Two sides differ in a fact if both recorded it and their sets of values are unequal in any pair. Numbers of
    parameters that differ by at most 0.5 % are equal. Ignored are settings that begin with one of HARMLESS_SETTINGS,
    such as seed, resources., data.path, eval.chunk_tokens, train.compile and train.kernels. Identity defaults, which a
    stored config omits, are filled in for the side that lacks them.

    Args:
        own_sweep: The compared sweep.
        reference_sweep: The sweep it is compared with.
        pairs: Matched cells: (cells of `own_sweep`, cells of `reference_sweep`) of each configuration.

    Returns:
        (differences, sentences). Differences are in this order: tokenizer, corpus, parameters, settings (training
        tokens, other training settings, the network, the evaluation), GPU, precision. GPU affects the probe
        `throughput` only, precision no probe. One sentence "not recorded for SWEEP: ..." per sweep that lacks what the
        other one recorded.
    """
    facts = _TwoSidedFacts()
    settings = _TwoSidedFacts()
    for own_cells, reference_cells in pairs:
        own, reference = (
            own_sweep.provenances_of_cells(own_cells),
            reference_sweep.provenances_of_cells(reference_cells),
        )
        for name in ("tokenizer", "precision", "GPU"):
            facts.add(
                name,
                *(
                    {str(PROVENANCE_FACTS[name](p)) for p in side if PROVENANCE_FACTS[name](p)}
                    for side in (own, reference)
                ),
            )
        facts.add("corpus", *_corpora(own, reference))
        sizes = own_sweep.size(own_cells), reference_sweep.size(reference_cells)
        if all(sizes) and abs(sizes[0] / sizes[1] - 1) <= SIZE_TOLERANCE:  # type: ignore[operator]
            sizes = sizes[0], sizes[0]
        facts.add("parameters", *({format_count(size)} if size else set() for size in sizes))
        own_settings, reference_settings = _recorded_settings(own), _recorded_settings(reference)
        _add_identity_defaults(own_settings, own, reference_settings)
        _add_identity_defaults(reference_settings, reference, own_settings)
        for path in own_settings.keys() | reference_settings.keys():
            if not path.startswith(HARMLESS_SETTINGS):
                settings.add(path, own_settings.get(path, set()), reference_settings.get(path, set()))
    of_facts = {"precision": (), "GPU": (SPEED_PROBE,)}
    listed = [
        RecipeDifference(facts.text(name), of_facts.get(name))
        for name in ("tokenizer", "corpus", "parameters")
        if facts.differs(name)
    ]
    listed += [
        RecipeDifference(settings.text(path), _probes_of(path))
        for path in sorted(settings.own, key=_rank)
        if settings.differs(path)
    ]
    listed += [
        RecipeDifference(facts.text(name), of_facts[name]) for name in ("GPU", "precision") if facts.differs(name)
    ]
    sweeps = (own_sweep.data.sweep, reference_sweep.data.sweep)
    lacking = zip(sweeps, facts.lacking(), settings.lacking(), strict=True)
    named = [(sweep, [*facts, *sorted(paths, key=_rank)]) for sweep, facts, paths in lacking]
    return listed, [f"not recorded for {sweep}: {_names_text(names)}" for sweep, names in named if names]


class _TwoSidedFacts:
    """Values that both sides recorded, by name of the fact."""

    def __init__(self) -> None:
        self.own: dict[str, set[str]] = defaultdict(set)
        self.reference: dict[str, set[str]] = defaultdict(set)
        self._differ: set[str] = set()

    def add(self, name: str, own: set[str], reference: set[str]) -> None:
        """Add the values of both sides of one pair under a name; an empty set means not recorded.

        The name counts as different if both sides have values and these are unequal in this call.
        """
        self.own[name] |= own
        self.reference[name] |= reference
        if own and reference and own != reference:
            self._differ.add(name)

    def differs(self, name: str) -> bool:
        """Return True if both sides had values and these differed in any call of `add`."""
        return name in self._differ

    def text(self, name: str) -> str:
        """Return "NAME OWN VALUES instead of REFERENCE VALUES", over all calls of `add`.

        Of either side the first three values, sorted as texts, are named and the others counted.
        """
        texts = (_values_text(values) for values in (self.own[name], self.reference[name]))
        return f"{name} {' instead of '.join(texts)}"

    def lacking(self) -> tuple[list[str], list[str]]:
        """Return (names that only the reference recorded, names that only the own side recorded).

        Names are in the order of `add`.
        """
        own = [name for name in self.own if self.reference[name] and not self.own[name]]
        reference = [name for name in self.own if self.own[name] and not self.reference[name]]
        return own, reference


def _values_text(values: set[str]) -> str:
    ordered = sorted(values)
    return " / ".join(ordered[:MAX_LISTED]) + (
        f" and {len(ordered) - MAX_LISTED} more" if len(ordered) > MAX_LISTED else ""
    )


def _names_text(names: Sequence[str]) -> str:
    rest_text = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + rest_text


def _corpora(own: Sequence[Provenance], reference: Sequence[Provenance]) -> tuple[set[str], set[str]]:
    """Return the corpora (own, reference) as sets of texts: by fingerprint if both sides have one, else by name.

    If the fingerprints of both sides differ, each text is the name and the first 12 digits of the fingerprint. A side
    that recorded neither has an empty set.
    """
    fingerprints = [{p.corpus_fingerprint for p in side if p.corpus_fingerprint} for side in (own, reference)]
    if all(fingerprints) and fingerprints[0] == fingerprints[1]:
        return fingerprints[0], fingerprints[1]
    if all(fingerprints):
        return tuple({f"{p.corpus} {p.corpus_fingerprint[:12]}".strip() for p in side} for side in (own, reference))  # type: ignore[return-value]
    return tuple({p.corpus for p in side if p.corpus} for side in (own, reference))  # type: ignore[return-value]


def _recorded_settings(provenances: Sequence[Provenance]) -> dict[str, set[str]]:
    """Return the set of values, as text, of each setting in these provenances, by dotted path."""
    values: dict[str, set[str]] = defaultdict(set)
    for provenance in provenances:
        for path, value in flatten_config(provenance.config).items():
            values[path].add(value)
    return values


def _add_identity_defaults(
    own: dict[str, set[str]], provenances: Sequence[Provenance], reference: Mapping[str, set[str]]
) -> None:
    """Add to `own` the identity defaults of settings that only the reference recorded.

    An identity default is the value at which a setting is left out of a stored config. A stored config of a run omits
    such settings within the sections it has. A published config holds what is known of it only, so nothing is added if
    any provenance is published, or if there is none.

    Args:
        own: Values by dotted path; changed in place.
        provenances: Provenances that `own` was read from.
        reference: Values of the reference, by dotted path.
    """
    if not provenances or any("published" in provenance.extra for provenance in provenances):
        return
    sections = {path.partition(".")[0] for path in own}
    for path in reference.keys() - own.keys():
        if path in IDENTITY_DEFAULTS and path.partition(".")[0] in sections:
            own[path] = {IDENTITY_DEFAULTS[path]}


def _probes_of(path: str) -> tuple[str, ...] | None:
    """Return the probes whose numbers a setting (dotted path) affects, by AFFECTED_PROBES; None for all.

    A setting below `eval.settings.PROBE` affects that probe alone, eval.validation_tokens val and extrapolation,
    eval.junk_... junk, eval.needle_... needle. eval.documents and data.heldout affect clean, state_norm, context,
    position_nll and passkey, data.heldout also needle. All other settings affect all probes.
    """
    if path.startswith(PROBE_SETTINGS_PREFIX):
        return (path.removeprefix(PROBE_SETTINGS_PREFIX).partition(".")[0],)
    return next((probes for beginning, probes in AFFECTED_PROBES.items() if path.startswith(beginning)), None)


def _rank(path: str) -> tuple[bool, bool, bool, str]:
    """Return a sort key: training tokens, other training settings, settings of other sections, then the evaluation."""
    return path != "train.tokens", not path.startswith("train."), path.startswith("eval."), path


# --- configurations of both sweeps ------------------------------------------------------------------------------------


ABSENT_LEVELS = ("none", "off", "-")
"""Levels of a component that a network does not have; a config without the component is equivalent."""


ALSO_MIXER = "published.also_attn_type"
"""Setting of a published cell with a further mixer that its source may mean."""


@dataclass(frozen=True)
class Match:
    """A configuration that both sweeps have."""

    own_cells: Sequence[CellState]
    """Its runs in the own sweep."""
    reference_cells: Sequence[CellState]
    """Its runs in the reference sweep."""
    further: Mapping[str, str]
    """Level by extra axis, in lower case; an absent component is "none"."""


def match_configurations(own_sweep: SweepData, reference_sweep: SweepData) -> list[Match]:
    """Return the configurations that both sweeps have, in the order of the reference.

    Configurations match if their levels on the fixed AXES are equal and their levels on every extra axis of either
    sweep are, case ignored. The level of an axis that a sweep does not vary is read from its config. A missing setting
    equals the levels "none", "off" and "-" and no other, so a configuration may have no match; it is then left out.
    Where a published source leaves the mixer open, a second one that its config names (`ALSO_MIXER`) matches too, if
    the first has no match.
    Where the match has no number yet, but the same configuration trained on other tokens has, the longest of these is
    matched instead; the tokens are then a recipe difference.

    Args:
        own_sweep: The compared sweep.
        reference_sweep: The sweep it is compared with.
    """
    axes = further_axes(own_sweep, reference_sweep)
    matches = []
    measured = {key[0] for key, value in own_sweep.values.items() if value.value is not None}
    own_configurations: dict[tuple[str, ...], list[Sequence[CellState]]] = {}
    for key, cells in own_sweep.configurations().items():
        own_configurations.setdefault(key[: len(AXES)], []).append(cells)
    for key, cells in reference_sweep.configurations().items():
        levels = {axis: _level(reference_sweep, cells[0], axis) for axis in axes}
        candidates = own_configurations.get(key[: len(AXES)], [])
        if not candidates and (also := reference_sweep.setting(cells[0], ALSO_MIXER)):
            candidates = own_configurations.get((also, *key[1 : len(AXES)]), [])
        matching = [runs for runs in candidates if _has_levels(own_sweep, runs[0], levels)]
        if matching and not any(cell.cell_id in measured for runs in matching for cell in runs):
            shared = {axis: level for axis, level in levels.items() if axis != TOKENS_AXIS}
            trained = [
                runs
                for runs in candidates
                if any(cell.cell_id in measured for cell in runs) and _has_levels(own_sweep, runs[0], shared)
            ]
            matching = (
                [max(trained, key=lambda runs: float(_level(own_sweep, runs[0], TOKENS_AXIS) or 0))]
                if trained
                else matching
            )
        matches += [
            Match(runs, cells, {axis: level or ABSENT_LEVELS[0] for axis, level in levels.items()}) for runs in matching
        ]
    return matches


def _has_levels(data: SweepData, cell: CellState, levels: Mapping[str, str | None]) -> bool:
    """Return True if a cell has these levels on extra axes."""
    return all(_level(data, cell, axis) == level for axis, level in levels.items())


def further_axes(own_sweep: SweepData, reference_sweep: SweepData) -> list[str]:
    """Return the axes beyond AXES (and the seed) that vary in either sweep, those of `reference_sweep` first."""
    return list(dict.fromkeys([*reference_sweep.extra_axes(), *own_sweep.extra_axes()]))


def _level(data: SweepData, cell: CellState, axis: str) -> str | None:
    """Return the level of a cell on an extra axis in lower case, from its config where the sweep does not vary it.

    None for a missing setting and for the levels "none", "off" and "-".
    """
    level: Any = cell.axes.get(axis)
    if level is None:
        level = data.setting(cell, axis)
    text = "none" if level is None else str(level).lower()
    return None if text in ABSENT_LEVELS else text
