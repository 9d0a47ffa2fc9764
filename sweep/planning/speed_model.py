"""The speed of cells on a machine: as attempts like them were measured, as a calibration found, or as their FLOPs say."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ...model.config import ModelConfigError
from ...model.resolve import check_model_config
from ...results.console.output_files import write
from ...results.console.text import counted
from ...results.store.records import TrainingTiming
from ..config import CellConfig
from ..grid.cell import canonical, model_identity, train_identity
from ..host.allocation import is_shared
from ..probes import bound
from ..training import flops


@dataclass(frozen=True, slots=True)
class ThreePointEstimate:
    """A likely amount between a low and a high one."""

    low: float
    likely: float
    high: float

    @classmethod
    def exactly(cls, amount: float) -> ThreePointEstimate:
        """One that is known."""
        return cls(amount, amount, amount)

    @classmethod
    def seen(cls, amounts: Iterable[float], margin: float) -> ThreePointEstimate:
        """Around those that were seen, at least one: their median, from the smallest to the largest, `margin` wider."""
        found = sorted(amounts)
        return cls(found[0] * (1 - margin), median(found), found[-1] * (1 + margin))

    def times(self, factor: float) -> ThreePointEstimate:
        """So many of it."""
        return ThreePointEstimate(self.low * factor, self.likely * factor, self.high * factor)

    def by(self, other: ThreePointEstimate) -> ThreePointEstimate:
        """The product of two."""
        return ThreePointEstimate(self.low * other.low, self.likely * other.likely, self.high * other.high)

    def as_json(self, digits: int = 4) -> dict[str, float]:
        """The three numbers by name."""
        return {name: round(getattr(self, name), digits) for name in ("low", "likely", "high")}


NOTHING = ThreePointEstimate(0.0, 0.0, 0.0)


def total(spans: Iterable[ThreePointEstimate]) -> ThreePointEstimate:
    """The sum of all of them, all low or all high at once."""
    summands = list(spans)
    return ThreePointEstimate(*(sum(getattr(span, name) for span in summands) for name in ("low", "likely", "high")))


Seconds = Annotated[float, Field(ge=0)]
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How fast one cell, and every one that is alike, went. Seconds."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    like: str
    """As likeness.Likeness tells it."""
    device: str
    """As price.Place names it."""
    slug: str
    """The cell that was timed."""
    step_s: Annotated[float, Field(gt=0)]
    """Of one optimizer step."""
    low_s: Seconds
    high_s: Seconds
    """The quickest and the slowest."""
    start_s: Seconds
    """Imports, and building the network."""
    compile_s: Seconds
    """What the first two steps took beyond others: compiling, and capturing."""
    validation_token_s: Seconds
    """Of a token, forward, as a validation does it."""


def read_calibrations(runs: Path) -> list[Calibration]:
    """All that was found so far; none without a file, and none of one that is not ours."""
    try:
        found = json.loads((runs / CALIBRATION_FILE).read_text())
    except (OSError, ValueError):
        return []
    known = []
    for one in found if isinstance(found, list) else []:
        with contextlib.suppress(ValidationError):
            known.append(TypeAdapter(Calibration).validate_json(json.dumps(one)))
    return known


def keep_calibrations(runs: Path, new: Iterable[Calibration]) -> None:
    """Adds these to the file; a newer one takes the place of an older one of the same cells on the same machine."""
    every = {(one.device, one.like): one for one in (*read_calibrations(runs), *new)}
    write(runs / CALIBRATION_FILE, json.dumps([asdict(one) for one in every.values()], indent=1) + "\n")


SHAPE = (
    "seq_len", "batch_tokens", "micro_batch", "loss_on", "optimizer", "muon_iterations", "regularizer", "regularizer_source",
    "regularizer_sketch", "distractor", "distractor_count", "deterministic", "compile", "kernels", "activations",
    "precision",
)  # fmt: skip
"""Of the train section, what the time of a step depends on: no learning rate, no schedule, no number of steps."""


class SpeedClasses:
    """Tells cells that are alike. It remembers the sections that it has seen, which most cells of a grid share."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[object, str]] = {}
        self._numbers: dict[tuple[str, ...], str] = {}

    def of(self, config: CellConfig) -> str:
        """The same 16 hex digits for cells that are alike."""
        model = self._section(config.model, lambda: canonical(model_identity(config.model)))
        train = self._section(config.train, lambda: _shape(config))
        resources = config.resources
        # of a GPU the share counts; cores do where there is none
        share = f"{resources.gpus:g} of a GPU" if resources.gpus else counted(resources.cpus, "core")
        # graphs make a small network several times as fast, and there are none without a GPU
        key = (model, train, f"{share}, graphs {config.train.graphs}" if resources.gpus else share)
        if key not in self._numbers:
            self._numbers[key] = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        return self._numbers[key]

    def _section(self, section: object, tell: Callable[[], str]) -> str:
        # by identity, and kept, so that no other section can get the same one
        known = self._told.get(id(section))
        if known is None:
            known = self._told[id(section)] = section, tell()
        return known[1]


def _shape(config: CellConfig) -> str:
    told = train_identity(config.train)
    return canonical({name: told[name] for name in SHAPE if name in told})


Source = Literal["measured", "calibrated", "FLOPs"]
SOURCES: tuple[Source, ...] = ("measured", "calibrated", "FLOPs")
"""The best first."""
MARGIN = 0.05
"""How far a measured speed may be off, beyond what was seen."""
UTILISATION = ThreePointEstimate(0.12, 0.4, 0.6)
"""Share of a GPU's peak FLOP/s that the training of a network reaches which is large enough to fill it."""
UNKNOWN_PEAK = ThreePointEstimate(1e14, 3e14, 1e15)
"""FLOP/s of a GPU that is not in the table of peaks."""
LAUNCH_S = {True: ThreePointEstimate(0.2e-3, 0.6e-3, 2e-3), False: ThreePointEstimate(0.5e-3, 2e-3, 8e-3)}
"""Of one layer in one micro-batch, forward and backward, with a GPU and without: however small it is, it takes that long."""
CORE_FLOPS = ThreePointEstimate(3e9, 12e9, 40e9)
"""FLOP/s that the training of a small network reaches on a CPU core."""
START_S = {True: ThreePointEstimate(8.0, 15.0, 40.0), False: ThreePointEstimate(3.0, 5.0, 12.0)}
"""Of an attempt's process with a GPU and without one, until the network is built."""
COMPILE_S = ThreePointEstimate(20.0, 60.0, 180.0)
"""Of the first step of a network that is compiled."""
FORWARD = ThreePointEstimate(0.7, 1.0, 2.0)
"""Seconds of a validation, by what a third of a training step says."""
PROBING = ThreePointEstimate(0.7, 1.2, 3.0)
"""Seconds of a probe, by what a third of a training step says: its batches are smaller."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """How fast the cells of one likeness go. Seconds, one attempt having its share of the machine for itself."""

    source: Source
    token: ThreePointEstimate
    """Of a trained token."""
    start: ThreePointEstimate
    compile: ThreePointEstimate
    validation_token: ThreePointEstimate
    forward_token: ThreePointEstimate
    """Of a token that a probe reads in a row as long as a training row."""
    probes: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Of a token that a probe reads, by probe and context length, where that was measured."""
    shared: bool = False
    """Measured in the share of a GPU that the cell has, so that its neighbours are part of it."""
    attempts: int = 0
    """That it was measured on."""
    silent: str | None = None
    """Why the FLOPs are too few."""


@dataclass(frozen=True)
class TargetMachine:
    """What the cells are priced on: GPUs of one kind and this machine's cores."""

    gpu: str | None
    """As the driver reports it, or a word of that."""
    how: str = ""
    """Why that one, where nobody said it: "assumed"."""

    def name(self, config: CellConfig) -> str:
        """Where a cell would run."""
        if config.resources.gpus:
            return (self.gpu or "").removeprefix("NVIDIA ")
        return f"the CPU of {socket.gethostname()}"

    def is_here(self, config: CellConfig, one: TrainingTiming) -> bool:
        """Whether an attempt ran on such a machine: the same GPU by its whole name, or a CPU of the same host."""
        if not config.resources.gpus:
            return one.gpu_name is None and one.host == socket.gethostname()
        return one.gpu_name is not None and one.gpu_name.removeprefix("NVIDIA ") == self.name(config)


QUEUED = ("", "as they come: train.graphs: off")
"""What attempts tell of their steps that were not to be captured."""


class SpeedTable:
    """What is known of the speed of cells on one place; asked once a likeness, remembered."""

    def __init__(
        self, place: TargetMachine, timed: Iterable[TrainingTiming], calibrated: Iterable[Calibration]
    ) -> None:
        self.place = place
        self.likeness = SpeedClasses()
        self._runs = [run for one in timed if (run := _run(one, self.likeness)) is not None]
        self._calibrated = {(one.device, one.like): one for one in calibrated}
        self._known: dict[str, dict[Source, Speed]] = {}

    def of(self, config: CellConfig) -> dict[Source, Speed]:
        """What each source says, the best first; FLOPs are always among them."""
        like = self.likeness.of(config)
        if like not in self._known:
            here = [run for run in self._runs if self.place.is_here(config, run.timed)]
            same = [run for run in here if run.like == like]
            found = self._known[like] = {}
            if same:
                found["measured"] = _measured(config, same)
            calibration = self._calibrated.get((self.place.name(config), like))
            if calibration is not None:
                found["calibrated"] = _calibrated(config, calibration)
            found["FLOPs"] = self._counted(config, [run for run in here if run.like != like])
        return self._known[like]

    def _counted(self, config: CellConfig, others: Sequence[_Run]) -> Speed:
        train, share, on_gpu = config.train, config.resources.gpus, config.resources.gpus > 0
        # those on the same share of a GPU, and not alone on it, had such neighbours as this one will have
        alike = [
            run for run in others if run.timed.neighbours and is_shared(share) and run.config.resources.gpus == share
        ]
        others = alike or others
        each = flops.estimated_flops(config.model, train.seq_len)
        floor = LAUNCH_S[on_gpu].times(config.model.n_layers / (train.seq_len * train.micro_batch))
        if others:
            reached, floor = (
                ThreePointEstimate.seen([run.flops / run.token for run in others], 0.5),
                ThreePointEstimate.exactly(0.0),
            )
        elif on_gpu:
            peak = flops.peak_flops(self.place.gpu)
            reached = UTILISATION.times(peak) if peak is not None else UNKNOWN_PEAK.by(UTILISATION)
        else:
            reached = CORE_FLOPS.times(config.resources.cpus)
        token = ThreePointEstimate(
            max(each / reached.high, floor.low), max(each / reached.likely, floor.likely),
            max(each / reached.low, floor.high),
        )  # fmt: skip
        starts = [run.timed.start_s for run in others if run.timed.start_s is not None]
        return Speed(
            source="FLOPs",
            token=token,
            start=ThreePointEstimate.seen(starts, 0.5) if starts else START_S[on_gpu],
            compile=_first_step(config, [run.compile for run in others]),
            validation_token=token.times(1 / 3).by(FORWARD),
            forward_token=token.times(1 / 3).by(PROBING),
            shared=bool(alike),
            silent=flops.unknown(config.model),
        )


def _first_step(config: CellConfig, seen: Sequence[float]) -> ThreePointEstimate:
    if seen:
        return ThreePointEstimate(0.0, median(seen), 1.5 * max(seen))
    compiled = config.resources.gpus > 0 and config.train.compile
    return COMPILE_S if compiled else ThreePointEstimate(0.0, 0.5, 5.0)


def _calibrated(config: CellConfig, one: Calibration) -> Speed:
    tokens = config.train.batch_tokens
    forward = ThreePointEstimate.exactly(one.validation_token_s)
    return Speed(
        source="calibrated",
        token=ThreePointEstimate(
            one.low_s / tokens * (1 - MARGIN), one.step_s / tokens, one.high_s / tokens * (1 + MARGIN)
        ),
        start=ThreePointEstimate(0.7, 1.0, 2.0).times(one.start_s),
        compile=ThreePointEstimate(0.0, 1.0, 1.3).times(one.compile_s),
        validation_token=ThreePointEstimate(0.8, 1.0, 1.3).by(forward),
        forward_token=PROBING.by(forward),
    )


# --- from attempts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """A finished training, with what follows from its curve."""

    timed: TrainingTiming
    config: CellConfig
    like: str
    token: float
    """Seconds of a trained token, between the first and the last point of its curve."""
    compile: float
    flops: float
    """Of a trained token."""


def _run(one: TrainingTiming, likeness: SpeedClasses) -> _Run | None:
    """None for one whose config this release cannot read, or whose curve says nothing of its speed."""
    try:
        config = CellConfig.model_validate(one.config)
        config = config.model_copy(update={"model": check_model_config(config.model)})
        each = flops.estimated_flops(config.model, config.train.seq_len)
        small = each * config.train.micro_batch * config.train.seq_len <= flops.SMALL
        if one.gpu_name is not None and small and one.steps in QUEUED:
            # a config that says nothing of graphs is of a time when that meant none
            config = config.model_copy(update={"train": config.train.model_copy(update={"graphs": "off"})})
        like = likeness.of(config)
    except (ValidationError, ModelConfigError, LookupError):
        return None  # of a plugin that is not loaded
    (tokens, seconds), (all_tokens, all_seconds) = one.first, one.last
    if all_tokens > tokens and all_seconds > seconds:
        token = (all_seconds - seconds) / (all_tokens - tokens)
    elif one.tokens_per_s:
        token = 1 / one.tokens_per_s
    else:
        return None
    return _Run(one, config, like, token, max(0.0, seconds - tokens * token), each)


def _measured(config: CellConfig, runs: Sequence[_Run]) -> Speed:
    token = ThreePointEstimate.seen([run.token for run in runs], MARGIN)
    shares = [found for run in runs if (found := _beside(run)) is not None]
    starts = [start for start, _ in shares]
    validations = [one for _, one in shares]
    return Speed(
        source="measured",
        token=token,
        start=ThreePointEstimate.seen(starts, MARGIN) if starts else START_S[config.resources.gpus > 0],
        compile=ThreePointEstimate.seen([run.compile for run in runs], MARGIN),
        validation_token=ThreePointEstimate.seen(validations, MARGIN) if starts else token.times(1 / 3).by(FORWARD),
        forward_token=token.times(1 / 3).by(PROBING),
        probes=_probes(runs),
        shared=True,
        attempts=len(runs),
    )


def _beside(run: _Run) -> tuple[float, float] | None:
    """What is left of an attempt beside training and probes: seconds of its start, and of each token of its validations.

    Validations, checkpoints included, take no more of it than they can; the rest goes to the start, which begins before
    the process can tell the time. None for an attempt that went on from another one.
    """
    one = run.timed
    if not one.whole or one.start_s is None:
        return None
    rest = max(0.0, one.elapsed_s - one.start_s - one.last[1] - sum(one.probes.values()))
    tokens = one.points * validated(run.config)
    validating = min(rest, tokens * run.token / 3 * FORWARD.high)
    return one.start_s + rest - validating, validating / tokens if tokens else 0.0


def validated(config: CellConfig) -> int:
    """Tokens of one validation."""
    return config.eval.validation_tokens // config.train.seq_len * config.train.seq_len


def _probes(runs: Sequence[_Run]) -> dict[tuple[str, int], float]:
    """Seconds of a token by probe and context length; the median of the runs."""
    seen: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for (name, length), seconds in run.timed.probes.items():
            if name in run.config.eval.probes:
                tokens = bound(name, run.config).tokens(length)
                seen.setdefault((name, length), []).append(seconds / max(tokens, 1))
    return {key: median(some) for key, some in seen.items()}
