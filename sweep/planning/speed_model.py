"""Speed of cells on a machine: from measured attempts of equal cells, from a calibration, or from FLOPs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ...model.config import ModelConfigError
from ...model.resolve import check_model_config
from ...results.console.output_files import write_file
from ...results.console.text import counted
from ...results.metrics import TEXT_SEPARATOR
from ...results.store.records import TrainingTiming
from ..config import CellConfig
from ..grid.cell import canonical_json, model_identity, train_identity
from ..host.allocation import is_shared
from ..probes import PROBES, bound, requested_of
from ..training import flops


@dataclass(frozen=True, slots=True)
class ThreePointEstimate:
    """A low, a likely and a high value of one quantity."""

    low: float
    likely: float
    high: float

    @classmethod
    def exactly(cls, amount: float) -> ThreePointEstimate:
        """Return an estimate without uncertainty."""
        return cls(amount, amount, amount)

    @classmethod
    def from_samples(cls, amounts: Iterable[float], margin: float) -> ThreePointEstimate:
        """Return (smallest x (1 - margin), median, largest x (1 + margin)) of the samples.

        Args:
            amounts: At least one sample; IndexError without any.
            margin: Relative widening of the ends, such as 0.05.
        """
        ordered = sorted(amounts)
        return cls(ordered[0] * (1 - margin), median(ordered), ordered[-1] * (1 + margin))

    def scaled(self, factor: float) -> ThreePointEstimate:
        """Return the estimate times a number."""
        return ThreePointEstimate(self.low * factor, self.likely * factor, self.high * factor)

    def multiplied(self, factor: ThreePointEstimate) -> ThreePointEstimate:
        """Return the product with another estimate: low x low, likely x likely, high x high."""
        return ThreePointEstimate(self.low * factor.low, self.likely * factor.likely, self.high * factor.high)

    def as_json(self, digits: int = 4) -> dict[str, float]:
        """Return the values under low, likely and high, rounded to `digits` decimals."""
        return {name: round(getattr(self, name), digits) for name in ("low", "likely", "high")}


ZERO = ThreePointEstimate(0.0, 0.0, 0.0)


def sum_estimates(spans: Iterable[ThreePointEstimate]) -> ThreePointEstimate:
    """Return the sum of estimates, value by value: all low or all high at once; zeros without any."""
    summands = list(spans)
    return ThreePointEstimate(*(sum(getattr(span, name) for span in summands) for name in ("low", "likely", "high")))


Seconds = Annotated[float, Field(ge=0)]
CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured speed of one cell, valid for all cells of equal speed key. Times in seconds."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    like: str
    """Speed key, as `SpeedClasses.key` returns it."""
    device: str
    """Device, as `TargetMachine.name` returns it."""
    slug: str
    """Slug of the timed cell."""
    step_s: Annotated[float, Field(gt=0)]
    """Median seconds of an optimizer step."""
    low_s: Seconds
    high_s: Seconds
    """Fastest and slowest step."""
    start_s: Seconds
    """Imports and construction of the network."""
    compile_s: Seconds
    """Additional time of the first two steps: compiling and capturing."""
    validation_token_s: Seconds
    """Seconds per token of a validation's forward pass."""


def read_calibrations(runs: Path) -> list[Calibration]:
    """Return the calibrations stored in `runs`, in file order, without entries that are not valid.

    Empty without a file, or for one that cannot be read as a JSON list.
    """
    try:
        entries = json.loads((runs / CALIBRATION_FILE).read_text())
    except (OSError, ValueError):
        return []
    calibrations = []
    for entry in entries if isinstance(entries, list) else []:
        with contextlib.suppress(ValidationError):
            calibrations.append(TypeAdapter(Calibration).validate_json(json.dumps(entry)))
    return calibrations


def save_calibrations(runs: Path, new: Iterable[Calibration]) -> None:
    """Add calibrations to the file in `runs`; a new one replaces that of the same speed key and device.

    Entries of the old file that are not valid are dropped. Raises StoreError or WriteRefused if it cannot be written.
    """
    every = {(calibration.device, calibration.like): calibration for calibration in (*read_calibrations(runs), *new)}
    write_file(
        runs / CALIBRATION_FILE, json.dumps([asdict(calibration) for calibration in every.values()], indent=1) + "\n"
    )


SHAPE = (
    "seq_len", "batch_tokens", "micro_batch", "loss_on", "optimizer", "muon_for", "muon_iterations", "muon_split", "regularizer",
    "regularizer_source", "regularizer_sketch", "distractor", "distractor_count", "deterministic", "compile", "kernels", "activations",
    "precision",
)  # fmt: skip
"""Fields of the train section that affect the time of a step; learning rates, schedule and number of steps do not."""


class SpeedClasses:
    """Speed keys of cells: cells with equal keys take equally long per token. Texts of config sections are cached."""

    def __init__(self) -> None:
        self._section_texts: dict[int, tuple[object, str]] = {}
        self._numbers: dict[tuple[str, ...], str] = {}

    def key(self, config: CellConfig) -> str:
        """Return the cell's speed key, 16 hex digits.

        It covers the model's identity, the train settings that shape a step (SHAPE: seq_len, batch and micro-batch,
        optimizer, loss_on, regularizer, distractor, kernels, precision and more; no learning rates), and the number of
        GPUs or the share of one with the setting of CUDA graphs, or without a GPU the number of cores and ranks. Data,
        seed, evaluation and number of steps have no effect.
        """
        model = self._section(config.model, lambda: canonical_json(model_identity(config.model)))
        train = self._section(config.train, lambda: _step_shape(config))
        resources = config.resources
        # the share of a GPU matters, or without a GPU the number of cores
        share = f"{resources.gpus:g} of a GPU" if resources.gpus else counted(resources.cpus, "core")
        if resources.ranks > 1:
            share += f", {resources.ranks} ranks"
        # CUDA graphs make small networks several times as fast
        key = (model, train, f"{share}, graphs {config.train.graphs}" if resources.gpus else share)
        if key not in self._numbers:
            self._numbers[key] = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        return self._numbers[key]

    def _section(self, section: object, dump: Callable[[], str]) -> str:
        """Return the text of a section, made by `dump` at first sight and then cached by the section's identity."""
        # keyed by identity; the section is kept alive so that no other one gets its id
        cached = self._section_texts.get(id(section))
        if cached is None:
            cached = self._section_texts[id(section)] = section, dump()
        return cached[1]


def _step_shape(config: CellConfig) -> str:
    """Return the SHAPE fields of the train section, and `recompute` unless it is none, as canonical JSON."""
    identity = train_identity(config.train)
    shape = {name: identity[name] for name in SHAPE if name in identity}
    # outside the identity; keys of stored calibrations stay
    recompute = {} if config.train.recompute == "none" else {"recompute": config.train.recompute}
    return canonical_json(shape | recompute)


RECOMPUTED_SHARE = {"none": 0.0, "selective": 0.5, "block": 1.0}
"""Share of the forward pass that the backward pass computes again, by `train.recompute`."""


def _computed_flops(config: CellConfig) -> float:
    """Return the estimated FLOPs per trained token, those of recomputed blocks included."""
    each = flops.estimated_flops(config.model, config.train.seq_len)
    return each * (1 + RECOMPUTED_SHARE[config.train.recompute] / 3)


PriceBasis = Literal["measured", "calibrated", "FLOPs"]
PRICE_BASES: tuple[PriceBasis, ...] = ("measured", "calibrated", "FLOPs")
"""Bases of an estimate, the best first."""
MARGIN = 0.05
"""Relative uncertainty of a measured speed beyond the range of the samples."""
UTILISATION = ThreePointEstimate(0.12, 0.4, 0.6)
"""Share of a GPU's peak FLOP/s that training reaches if the network is large enough to fill the GPU."""
UNKNOWN_PEAK = ThreePointEstimate(1e14, 3e14, 1e15)
"""Peak FLOP/s of a GPU that is not in the table of peaks."""
LAUNCH_S = {True: ThreePointEstimate(0.2e-3, 0.6e-3, 2e-3), False: ThreePointEstimate(0.5e-3, 2e-3, 8e-3)}
"""With a GPU -> lowest seconds per layer and micro-batch, forward and backward, however small the layer is."""
CORE_FLOPS = ThreePointEstimate(3e9, 12e9, 40e9)
"""FLOP/s per CPU core when training a small network."""
START_S = {True: ThreePointEstimate(8.0, 15.0, 40.0), False: ThreePointEstimate(3.0, 5.0, 12.0)}
"""With a GPU -> seconds from the start of an attempt's process until the network is built."""
COMPILE_S = ThreePointEstimate(20.0, 60.0, 180.0)
"""Seconds of the first step of a compiled network."""
FORWARD = ThreePointEstimate(0.7, 1.0, 2.0)
"""Factor from a third of a training step to the forward pass of a validation, per token."""
RANK_EFFICIENCY = ThreePointEstimate(0.85, 0.97, 1.0)
"""Share of N times the speed of one GPU that N GPUs are assumed to reach, until attempts with N GPUs are measured."""
PROBING = ThreePointEstimate(0.7, 1.2, 3.0)
"""Factor from a third of a training step to the forward pass of a probe, per token; its batches are smaller."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds per token and per phase of cells with one speed key, for an attempt with its share of the machine."""

    source: PriceBasis
    token: ThreePointEstimate
    """Seconds per trained token."""
    start: ThreePointEstimate
    """Seconds from the start of the process until the network is built."""
    compile: ThreePointEstimate
    """Additional seconds of the first steps."""
    validation_token: ThreePointEstimate
    """Seconds per token of a validation."""
    forward_token: ThreePointEstimate
    """Seconds per token that a probe reads, in rows as long as training rows."""
    probes: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """(Probe, context length) -> seconds per token that the probe reads, if measured."""
    has_neighbours: bool = False
    """True if measured next to other attempts on the same GPU, so that their effect is included."""
    attempts: int = 0
    """Number of attempts that were measured."""
    unknown_flops: str | None = None
    """Reason why the FLOP count is too low; None if it is complete."""
    assumed_ranks: int = 0
    """Number of GPUs or ranks for which the speed of one was extrapolated with RANK_EFFICIENCY; 0 if it was not."""


@dataclass(frozen=True)
class TargetMachine:
    """Machine on which cells are priced: GPUs of one type, and this machine's cores."""

    gpu: str | None
    """Driver name of the GPU, or a word of it; None for the CPU."""
    reason: str = ""
    """Reason for the choice if the user did not make it, such as "assumed"."""

    def name(self, config: CellConfig) -> str:
        """Return the name of the device on which a cell would run.

        The GPU's name without "NVIDIA ", or "the CPU of HOST" for a cell without a GPU.
        """
        if config.resources.gpus:
            return (self.gpu or "").removeprefix("NVIDIA ")
        return f"the CPU of {socket.gethostname()}"

    def matches(self, config: CellConfig, timing: TrainingTiming) -> bool:
        """Return True if an attempt ran on this device: a GPU of the same name, or the CPU of this host."""
        if not config.resources.gpus:
            return timing.gpu_name is None and timing.host == socket.gethostname()
        return timing.gpu_name is not None and timing.gpu_name.removeprefix("NVIDIA ") == self.name(config)


UNCAPTURED = ("", "as they come: train.graphs: off")
"""Recorded descriptions of steps that were not captured as CUDA graphs by request."""


class SpeedTable:
    """Speeds of cells on one machine, cached by speed key."""

    def __init__(
        self, machine: TargetMachine, timed: Iterable[TrainingTiming], calibrated: Iterable[Calibration]
    ) -> None:
        """Index the measurements; trainings whose speed cannot be determined are ignored.

        Args:
            machine: Machine to price on.
            timed: Finished trainings of the database, on any machine.
            calibrated: Stored calibrations, of any device; the last one counts for an equal device and speed key.
        """
        self.machine = machine
        self.speed_classes = SpeedClasses()
        self._runs = [run for timing in timed if (run := _timed_run(timing, self.speed_classes)) is not None]
        self._calibrated = {(calibration.device, calibration.like): calibration for calibration in calibrated}
        self._speeds: dict[str, dict[PriceBasis, Speed]] = {}

    def lookup(self, config: CellConfig) -> dict[PriceBasis, Speed]:
        """Return basis -> speed of a cell, the best basis first; cached by speed key, so do not change the result.

        "measured" needs a finished training of equal speed key on the machine. "calibrated" needs a calibration of
        equal speed key and device. "FLOPs" is always present; runs of other speed keys on the machine are its
        reference. Without a measurement of a cell on several GPUs, the speeds of the same cell on one GPU are
        extrapolated, and `assumed_ranks` says so.
        """
        like = self.speed_classes.key(config)
        if like not in self._speeds and config.resources.n_ranks > 1:
            single = {
                basis: extrapolate(config, speed) for basis, speed in self.lookup(single_rank_config(config)).items()
            }
            same = [run for run in self._runs if run.like == like and self.machine.matches(config, run.timed)]
            self._speeds[like] = {"measured": _measured(config, same), "FLOPs": single["FLOPs"]} if same else single
        if like not in self._speeds:
            same_machine = [run for run in self._runs if self.machine.matches(config, run.timed)]
            same = [run for run in same_machine if run.like == like]
            speeds = self._speeds[like] = {}
            if same:
                speeds["measured"] = _measured(config, same)
            calibration = self._calibrated.get((self.machine.name(config), like))
            if calibration is not None:
                speeds["calibrated"] = _calibrated(config, calibration)
            speeds["FLOPs"] = self._from_flops(config, [run for run in same_machine if run.like != like])
        return self._speeds[like]

    def _from_flops(self, config: CellConfig, reference_runs: Sequence[_TimedRun]) -> Speed:
        """Return the speed by FLOPs, at the FLOP/s that reference runs reached or, without any, at typical values.

        Reference runs with neighbours on an equal share of a GPU are preferred: if there are any, only they count. With
        references, the ends are the extremes of their FLOP/s widened by 50 %. Without any, a token takes at least the
        launch time of its layers. Unknown parts of the FLOP count make the result too fast; `unknown_flops` then gives
        the reason.

        Args:
            config: Config of the cell.
            reference_runs: Runs of other speed keys on the same machine; may be empty.
        """
        train, share, on_gpu = config.train, config.resources.gpus, config.resources.gpus > 0
        # runs with neighbours on the same share of a GPU met the conditions that this cell will have
        alike = [
            run
            for run in reference_runs
            if run.timed.gpu_neighbours and is_shared(share) and run.config.resources.gpus == share
        ]
        reference_runs = alike or reference_runs
        each = _computed_flops(config)
        floor = LAUNCH_S[on_gpu].scaled(config.model.n_layers / (train.seq_len * train.micro_batch))
        if reference_runs:
            reached, floor = (
                ThreePointEstimate.from_samples([run.flops / run.token / run.speedup for run in reference_runs], 0.5),
                ThreePointEstimate.exactly(0.0),
            )
        elif on_gpu:
            peak = flops.peak_flops(self.machine.gpu)
            reached = UTILISATION.scaled(peak) if peak is not None else UNKNOWN_PEAK.multiplied(UTILISATION)
        else:
            reached = CORE_FLOPS.scaled(config.resources.cpus)
        token = ThreePointEstimate(
            max(each / reached.high, floor.low), max(each / reached.likely, floor.likely),
            max(each / reached.low, floor.high),
        )  # fmt: skip
        starts = [run.timed.start_s for run in reference_runs if run.timed.start_s is not None]
        return Speed(
            source="FLOPs",
            token=token,
            start=ThreePointEstimate.from_samples(starts, 0.5) if starts else START_S[on_gpu],
            compile=_first_step(config, [run.compile for run in reference_runs]),
            validation_token=token.scaled(1 / 3).multiplied(FORWARD),
            forward_token=token.scaled(1 / 3).multiplied(PROBING),
            has_neighbours=bool(alike),
            unknown_flops=flops.unknown_reason(config.model),
        )


def _first_step(config: CellConfig, samples: Sequence[float]) -> ThreePointEstimate:
    """Return the additional seconds of the first steps, from samples or typical values.

    Samples give (0, median, 1.5 x largest). Without any, compiled GPU cells take 20, 60 and 180 s (low, likely, high;
    COMPILE_S), others 0, 0.5 and 5 s.
    """
    if samples:
        return ThreePointEstimate(0.0, median(samples), 1.5 * max(samples))
    compiled = config.resources.gpus > 0 and config.train.compile
    return COMPILE_S if compiled else ThreePointEstimate(0.0, 0.5, 5.0)


def _calibrated(config: CellConfig, calibration: Calibration) -> Speed:
    """Return the speed that a calibration gives; its ends are fixed factors around the measured values.

    The factors (low, likely, high) are 0.7, 1 and 2 for the start, 0, 1 and 1.3 for compiling, and 0.8, 1 and 1.3 for
    validation. The time per token spans the fastest to the slowest step, widened by 5 % (MARGIN) at both ends.
    """
    tokens = config.train.batch_tokens
    forward = ThreePointEstimate.exactly(calibration.validation_token_s)
    return Speed(
        source="calibrated",
        token=ThreePointEstimate(
            calibration.low_s / tokens * (1 - MARGIN),
            calibration.step_s / tokens,
            calibration.high_s / tokens * (1 + MARGIN),
        ),
        start=ThreePointEstimate(0.7, 1.0, 2.0).scaled(calibration.start_s),
        compile=ThreePointEstimate(0.0, 1.0, 1.3).scaled(calibration.compile_s),
        validation_token=ThreePointEstimate(0.8, 1.0, 1.3).multiplied(forward),
        forward_token=PROBING.multiplied(forward),
    )


# --- from attempts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TimedRun:
    """A finished training with the speed that follows from its curve."""

    timed: TrainingTiming
    config: CellConfig
    like: str
    """Speed key."""
    token: float
    """Seconds per trained token, between the first and the last point of the curve."""
    compile: float
    """Additional seconds of the first steps."""
    flops: float
    """FLOPs per trained token."""

    @property
    def speedup(self) -> float:
        """Assumed ratio of its speed to that of the same cell on one GPU."""
        return rank_speedup(self.config).likely


def rank_speedup(config: CellConfig) -> ThreePointEstimate:
    """Return the assumed ratio of a cell's speed on its GPUs or ranks to that on one; exactly 1 for one.

    N ranks take ceil(A / N) micro-batches of the A of a step one after the other; RANK_EFFICIENCY of the rest is
    assumed.
    """
    n_ranks, accumulation = config.resources.n_ranks, config.train.accumulation
    if n_ranks == 1:
        return ThreePointEstimate.exactly(1.0)
    return RANK_EFFICIENCY.scaled(accumulation / -(-accumulation // n_ranks))


def single_rank_config(config: CellConfig) -> CellConfig:
    """Return the config of a cell on one GPU, or with one rank on as many cores as each of its ranks has."""
    resources = config.resources
    changes = {"gpus": min(resources.gpus, 1), "ranks": 1, "cpus": max(1, resources.cpus // resources.n_ranks)}
    return config.model_copy(update={"resources": resources.model_copy(update=changes)})


def extrapolate(config: CellConfig, speed: Speed) -> Speed:
    """Return the assumed speed of a cell on its GPUs from that on one: training, validation and probes are divided.

    Start and compilation take as long as on one GPU.
    """
    ratio = rank_speedup(config)
    factor = ThreePointEstimate(1 / ratio.high, 1 / ratio.likely, 1 / ratio.low)
    return replace(
        speed,
        token=speed.token.multiplied(factor),
        validation_token=speed.validation_token.multiplied(factor),
        forward_token=speed.forward_token.multiplied(factor),
        probes={key: seconds * factor.likely for key, seconds in speed.probes.items()},
        assumed_ranks=config.resources.n_ranks,
    )


def _timed_run(timing: TrainingTiming, likeness: SpeedClasses) -> _TimedRun | None:
    """Return the speed of a finished training, or None if it cannot be determined.

    Seconds per token are the slope between the first and the last point of the curve, else the inverse of the recorded
    tokens/s. `compile` is the time of the first point beyond that slope, at least 0. None if neither is available, or
    if the config cannot be read, for instance because its plugin is not loaded.

    Args:
        timing: The finished training.
        likeness: Gives the speed key. Runs whose steps were not captured as CUDA graphs by request count as `graphs:
            off`.
    """
    try:
        config = CellConfig.model_validate(timing.config)
        config = config.model_copy(update={"model": check_model_config(config.model)})
        each = flops.estimated_flops(config.model, config.train.seq_len)
        small = each * config.train.micro_batch * config.train.seq_len <= flops.MAX_CAPTURE_FLOPS
        each = _computed_flops(config)
        if timing.gpu_name is not None and small and timing.step_mode in UNCAPTURED:
            # configs without the field are from before CUDA graphs were used
            config = config.model_copy(update={"train": config.train.model_copy(update={"graphs": "off"})})
        like = likeness.key(config)
    except (ValidationError, ModelConfigError, LookupError):
        return None  # its plugin is not loaded
    (tokens, seconds), (all_tokens, all_seconds) = timing.curve_start, timing.curve_end
    if all_tokens > tokens and all_seconds > seconds:
        token = (all_seconds - seconds) / (all_tokens - tokens)
    elif timing.tokens_per_s:
        token = 1 / timing.tokens_per_s
    else:
        return None
    return _TimedRun(timing, config, like, token, max(0.0, seconds - tokens * token), each)


def _measured(config: CellConfig, runs: Sequence[_TimedRun]) -> Speed:
    """Return the speed from at least one run of the same speed key.

    Estimates span the extremes of the runs, widened by 5 % (MARGIN) at both ends. Start and validation come from first
    attempts alone; without any, they are typical values. The runs count as measured with neighbours, whatever shared
    their GPU.
    """
    token = ThreePointEstimate.from_samples([run.token for run in runs], MARGIN)
    shares = [overhead for run in runs if (overhead := _overhead(run)) is not None]
    starts = [start for start, _ in shares]
    validations = [seconds for _, seconds in shares]
    return Speed(
        source="measured",
        token=token,
        start=ThreePointEstimate.from_samples(starts, MARGIN) if starts else START_S[config.resources.gpus > 0],
        compile=ThreePointEstimate.from_samples([run.compile for run in runs], MARGIN),
        validation_token=ThreePointEstimate.from_samples(validations, MARGIN)
        if starts
        else token.scaled(1 / 3).multiplied(FORWARD),
        forward_token=token.scaled(1 / 3).multiplied(PROBING),
        probes=_probes(runs),
        has_neighbours=True,
        attempts=len(runs),
    )


def _overhead(run: _TimedRun) -> tuple[float, float] | None:
    """Return (start seconds, validation seconds per token) of a run.

    None if it was resumed from another attempt or its start was not timed. Time outside training and probes is
    attributed to validations, checkpoints included, up to twice the likely forward time. The rest counts as start. The
    second value is 0 without validations.
    """
    timing = run.timed
    if not timing.is_first_attempt or timing.start_s is None:
        return None
    rest = max(0.0, timing.elapsed_s - timing.start_s - timing.curve_end[1] - sum(timing.probes.values()))
    tokens = timing.points * validation_tokens(run.config)
    validating = min(rest, tokens * run.token / 3 * FORWARD.high)
    return timing.start_s + rest - validating, validating / tokens if tokens else 0.0


def validation_tokens(config: CellConfig) -> int:
    """Return the number of tokens of one validation: `eval.validation_tokens` rounded down to whole training rows."""
    return config.eval.validation_tokens // config.train.seq_len * config.train.seq_len


def _probes(runs: Sequence[_TimedRun]) -> dict[tuple[str, int], float]:
    """Return (probe, context length) -> median seconds per token over the runs that measured the pair.

    Probes that a run's config does not request are skipped, and those of a plugin that this process has not loaded.
    """
    samples: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        for (name, length), seconds in run.timed.probes.items():
            probe, section = name.partition(TEXT_SEPARATOR)[0], run.config.eval
            if probe in PROBES and probe in section.probes and (name, length) in requested_of(probe, section):
                tokens = bound(name, run.config).tokens(length)
                samples.setdefault((name, length), []).append(seconds / max(tokens, 1))
    return {key: median(rates) for key, rates in samples.items()}
