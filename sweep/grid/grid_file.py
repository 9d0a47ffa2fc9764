"""Keys of a grid file, each declared once with its type, limits and description.

Reading, error messages, the JSON Schema (`grids/schema.json`) and editor hints follow from these models. Checks that
need several sections at once, such as the levels of a contrast, are in the module of that section.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from ...grids import GRIDS
from ...model.bounds import MAX_INT64
from ...results import metrics
from ...results.contrasts import AVERAGE_LENGTH
from ...results.designs import regular_fractions
from ...results.designs.design_option import METHODS
from ...results.metrics import TEXT_SEPARATOR, TRAINING_SOURCES, Metric
from ...results.names import NAME, NAME_RULE, PUBLISHED_PREFIX, normalized_level
from ...results.stopping.stopping_rule import (
    DEFAULT_FIRST_SEEDS,
    DEFAULT_MAX_SEEDS,
    MAX_SEEDS,
    OBRIEN_FLEMING,
    SPENDINGS,
)
from ...results.studies.search import Direction, Interval, LevelChoice, Pruner, Range, Sampler, Search
from ..probes import PROBES
from . import settings
from .settings import AXES, level_text, unknown_level
from .yaml_document import key_error

NUMBER = r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?([eE][-+]?[0-9]+)?$"
SWITCH = "^([Oo][Nn]|[Oo][Ff][Ff]|[Yy][Ee][Ss]|[Nn][Oo]|[Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])$"
SCALAR = {"type": ["string", "number", "boolean", "null"]}
BASE_KEYS = ("description", "extends", "set", "resources")
"""Keys that a base may have; a base defines no cells itself."""
MOST_TRIALS = 10_000
SAMPLERS, PRUNERS, DIRECTIONS = get_args(Sampler), get_args(Pruner), get_args(Direction)
SEARCHED = ("model", "train")
"""Sections of a config whose settings a study may vary; all trials share the text."""
PRUNER_METRIC = "val.val_loss"
"""Metric whose curve a pruner reads."""
NOT_PRUNED = (
    "a factorial grid cannot be pruned: pruning by validation loss would have stopped the cells with the best retrieval of the published "
    "sweep (docs/explanation/designs.md, Why a factorial grid is not pruned); remove pruner"
)
OF_FACTORIALS = ("axes", "levels", "exclude", "include", "design", "contrasts", "stop", "tune")
"""Keys that apply only to factorial grids."""
RESOLUTIONS = {name: number for number, name in enumerate(regular_fractions.ROMAN) if number > 2}
SIZES = ("fraction", "runs", "resolution")
MODELS = {"main": 1, "two-way": 2}
"""Name -> largest number of axes whose interactions are estimated, besides those that declared contrasts need."""


def find_file(name: str | Path, relative_to: Path | None = None, folder: str = "") -> Path | None:
    """Return the path of a grid or base; None if there is no such file.

    It is searched in `relative_to` first, then among the shipped ones; in each, as NAME, NAME.yaml and, for a name
    without a folder, FOLDER/NAME.yaml. An empty name gives None. The path is not made absolute.

    Args:
        name: File name or path, with or without ".yaml".
        relative_to: Folder to search first; None for the working folder.
        folder: Subfolder in which plain names are looked up too, such as "base".
    """
    target = Path(name)
    if not target.name:
        return None
    # A name with a folder in it means that folder, never a shipped file that happens to have the same name.
    short = [Path(folder) / f"{target.name}.yaml"] if target.parent == Path() else []
    for root in (relative_to or Path(), GRIDS):
        for candidate in (target, target.with_name(target.name + ".yaml"), *short):
            path = root / candidate
            # unlike Path.is_file, returns False for a name that is too long
            if os.path.isfile(path):
                return path
    return None


def shipped(folder: str = "") -> list[str]:
    """Return the sorted names of the shipped grids, or of the bases with folder="base"."""
    return sorted(path.stem for path in (GRIDS / folder).glob("*.yaml"))


# --- numbers that a cell is measured by -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """A number of a cell: probe, metric and length (tokens; 0 for no length, None for the average over all lengths)."""

    probe: str
    metric: Metric
    length: int | None

    @property
    def text(self) -> str:
        """Full name, such as needle.digit_accuracy@65536 or val.val_loss."""
        length = AVERAGE_LENGTH if self.length is None else str(self.length)
        return f"{self.probe}.{self.metric.name}" + (f"@{length}" if self.length != 0 else "")


def check_measured(probe: str, metric: str, length: int | None, requests: Collection[tuple[str, int]]) -> None:
    """Raise PydanticCustomError if no cell produces the number.

    Refused are a probe that is not requested, and a length at which it is not. A name that is neither requested nor a
    probe (a training source) passes.

    Args:
        probe: Name of a probe or a training source.
        metric: Name of its metric, for the error alone.
        length: Context length in tokens; None for an average, which needs no particular length.
        requests: The (probe, length) pairs at which cells are evaluated.
    """
    lengths = sorted(at for name, at in requests if name == probe)
    if not lengths and probe.partition(TEXT_SEPARATOR)[0] in PROBES:
        probes = [*sorted({name for name, _ in requests}), *TRAINING_SOURCES]
        raise key_error(f"no cell runs the probe {probe} (eval.probes)", allowed=probes, word=probe)
    if lengths and length is not None and length not in lengths:
        names = [f"{probe}.{metric}" + (f"@{at}" if at else "") for at in lengths]
        raise key_error(f"no cell is evaluated at {probe}.{metric}@{length} (eval.lengths)", allowed=names)


def measure(text: object, *, short: bool = True, average: bool = False, where: Sequence[str] = ()) -> Measure:
    """Return the number that a text names: `needle@65536` is the probe's first metric, `val_loss` a unique one.

    A probe that is evaluated by length needs `@LENGTH`, any other number must not have it (its length is 0).

    Args:
        text: As the file writes it: probe, metric or probe.metric, then @LENGTH in tokens or @avg where allowed.
        short: True if a probe or a metric alone is enough; False requires probe.metric.
        average: True if `@avg` may stand for a context length; the length is then None.
        where: Keys below the one that is being read, for the error.

    Raises:
        PydanticCustomError: For a text that names no number, or several, with the allowed names.
    """
    if not isinstance(text, str) or not (short or "." in text.partition("@")[0]):
        must = "must name a metric, such as val_loss or needle@65536"
        raise key_error(f"{must if short else 'must read probe.metric or probe.metric@length'}, got {text!r}", *where)
    name, at, length = text.partition("@")
    probe, metric = _resolve_metric(name, where)
    full = f"{probe}.{metric.name}"
    base = probe.partition(TEXT_SEPARATOR)[0]
    if (base in PROBES and PROBES.load(base).by_length) != bool(at):
        more = f", or {full}@{AVERAGE_LENGTH}" if average else ""
        needs = f"takes no context length; write {full}" if at else f"needs a context length; write {full}@65536{more}"
        raise key_error(needs, *where)
    if at and average and length == AVERAGE_LENGTH:
        return Measure(probe, metric, None)
    if at and (not length.isdecimal() or not 0 < int(length) < 2**63):
        more = f" or {AVERAGE_LENGTH}" if average else ""
        raise key_error(f"the context length must be a whole number{more}, got {length!r}", *where)
    return Measure(probe, metric, int(length) if at else 0)


def _resolve_metric(name: str, where: Sequence[str]) -> tuple[str, Metric]:
    """Return (probe, metric) of a name without a context length.

    The name is a probe or training source (its first metric), a metric that only one of them has, or probe.metric.

    Raises:
        PydanticCustomError: For an unknown name, or a metric that several probes have; at the keys `where`.
    """
    sources = [*PROBES, *TRAINING_SOURCES]
    # a text of eval.texts, as in clean:code
    probe, dot, metric = name.partition(".")
    if not dot and name.partition(TEXT_SEPARATOR)[0] in sources:
        return name, own_metrics(name)[0]
    if not dot:
        probes = [probe_name for probe_name, metric_name in metrics.METRICS if metric_name == name]
        if len(probes) > 1:
            among = [f"{of}.{name}" for of in probes]
            raise key_error(f"several probes have a metric {name!r}; name one of them", *where, allowed=among)
        if not probes:
            among = [*sources, "val_loss", "tokens_per_s"]
            raise key_error(f"no probe or metric {name!r}", *where, allowed=among, word=name)
        probe, metric = probes[0], name
    if probe.partition(TEXT_SEPARATOR)[0] not in sources:
        raise key_error(f"no probe {probe!r}", *where, allowed=sources, word=probe)
    own = {metric_of_probe.name: metric_of_probe for metric_of_probe in own_metrics(probe)}
    if metric not in own:
        raise key_error(f"the probe {probe} has no metric {metric!r}", *where, allowed=own, word=metric)
    return probe, own[metric]


def own_metrics(probe: str) -> Sequence[Metric]:
    """Return the metrics of a probe or of a training source, the main one first."""
    return metrics.metrics_of_probe(probe) or tuple(PROBES.load(probe).metrics)


# --- types of values --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """Validator with the JSON Schema of the values that it accepts; replaces pydantic's check of a field."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.schema)


def integer(minimum: int, maximum: int = MAX_INT64, limits: str = "") -> Checked:
    """Return a check for integers from `minimum` to `maximum`, both included; booleans, floats and text are refused.

    Args:
        minimum: Smallest allowed value.
        maximum: Largest allowed value.
        limits: Description of the range in the error message; "" for "from MINIMUM to MAXIMUM".
    """
    limits = limits or f"from {minimum}" + (f" to {maximum}" if maximum < MAX_INT64 else "")

    def check(value: Any) -> int:
        """Return the value. Raises PydanticCustomError for a bool, a non-integer, and a value out of range."""
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise key_error(f"must be a whole number {limits}, got {value!r}")
        return value

    highest = {"maximum": maximum} if maximum < MAX_INT64 else {}
    return Checked(check, {"type": "integer", "minimum": minimum, **highest})


def number_of(value: Any, must: str, *, above: float = -math.inf) -> float:
    """Return a finite number: an int or float unchanged, text as a float.

    Args:
        value: Number or text.
        must: Beginning of the error message; the value follows.
        above: Exclusive lower bound.

    Raises:
        PydanticCustomError: For a bool, None, text that is no number, infinity, NaN, and a value not above the bound.
    """
    number = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = float(value)
    if isinstance(number, bool) or not isinstance(number, int | float) or not above < number < math.inf:
        raise key_error(f"{must}, got {value!r}")
    return number


def number(must: str, *, above: float = -math.inf) -> Checked:
    """Return a check for finite numbers above a bound, which also accepts numbers as text, and null as None.

    Ints stay ints, text becomes a float.

    Args:
        must: Beginning of the error message.
        above: Exclusive lower bound; by default there is none.
    """
    schema = {"type": ["number", "string"], "pattern": NUMBER}
    return Checked(
        lambda value: None if value is None else number_of(value, must, above=above),
        schema if above == -math.inf else schema | {"exclusiveMinimum": above},
    )


def choice(key: str, values: Iterable[str], *, null: bool = False, default: str | None = None) -> Checked:
    """Return a check for one of some words; the accepted value is returned as text.

    Args:
        key: Name of the key, for the error message.
        values: Allowed words, case-sensitive.
        null: True if null is allowed and gives `default`.
        default: Value that null gives; if set, null is allowed too, but not in the JSON Schema.
    """
    allowed = tuple(values)

    def check(value: Any) -> str | None:
        """Return the word, or `default` for null. Raises PydanticCustomError for any other value."""
        if value is None and (null or default):
            return default
        if value not in allowed:
            raise key_error(f"no {key} {value!r}", allowed=allowed, word=str(value))
        return str(value)

    return Checked(check, {"enum": [*allowed, None] if null else [*allowed]})


def _switch(value: Any) -> bool:
    if normalized_level(value) not in ("on", "off"):
        raise key_error(f"must be true or false, got {value!r}")
    return normalized_level(value) == "on"


def _levels_by_axis(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise key_error(f"must map axes to a level, got {value!r}")
    return dict(value)


def _rule(value: Any) -> dict[str, list[Any]]:
    if not isinstance(value, dict) or not value:
        raise key_error(f"must map axes to levels, got {value!r}")
    return {name: level if isinstance(level, list) else [level] for name, level in value.items()}


def _seeds(value: Any) -> Sequence[int]:
    """Return the seeds: range(n) for a count n, or the list itself.

    Raises:
        PydanticCustomError: For a count below 1, an empty list, a repeated seed, and anything but integers from 0 up.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise key_error(f"must be at least 1, got {value}")
        return range(value)
    numbers = isinstance(value, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in value)
    if not numbers or not value or len(set(value)) < len(value):
        raise key_error(f"must be a count or a list of different whole numbers, got {value!r}")
    return list(value)


def _fraction(value: Any) -> Fraction:
    """Return a share between 0 and 1, both excluded, from a number or text such as "1/4" or "0.25".

    The denominator is limited to 1,000,000 unless that would make the share 0 or 1. Raises PydanticCustomError for
    anything else, booleans included.
    """
    try:
        share = Fraction(0) if isinstance(value, bool) else Fraction(str(value).replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise key_error(f"must be a fraction between 0 and 1, such as 1/4, got {value!r}")
    rounded = share.limit_denominator(1_000_000)
    return rounded if 0 < rounded < 1 else share


def _resolution(value: Any) -> int:
    """Return the resolution of a fractional design, an integer of 3 or more, from its roman or arabic spelling."""
    number = RESOLUTIONS.get(str(value).upper(), value)
    if isinstance(number, bool) or not isinstance(number, int) or number < 3:
        raise key_error(
            f"must be III (main effects not aliased with each other), IV, V or higher, got {value!r}",
            allowed=RESOLUTIONS,
        )
    return number


def _objectives(value: Any) -> dict[str, Direction]:
    """Return objective -> "minimize" or "maximize", in the order written.

    Keys are full names such as "val.val_loss" or "needle.digit_accuracy@65536". Without a direction, a metric's own one
    is taken.

    Args:
        value: A name, a list of names, or a mapping from names to directions (None for the metric's own).

    Raises:
        PydanticCustomError: For an unknown metric, a repeated one, or one without any direction.
    """
    names = list(value) if isinstance(value, list | Mapping) else [value]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise key_error(f"must be a metric such as val_loss, or map metrics to minimize or maximize, got {value!r}")
    directions: dict[str, Any] = dict(value) if isinstance(value, Mapping) else dict.fromkeys(names)
    objectives: dict[str, Direction] = {}
    for name, direction in directions.items():
        where = (name,) if isinstance(value, Mapping) else ()
        target = measure(name, where=where)
        if target.text in objectives:
            raise key_error(f"{target.text} is given twice; keep one of them", *where)
        if direction is None and target.metric.direction:
            direction = "minimize" if target.metric.direction < 0 else "maximize"
        if direction not in DIRECTIONS:
            problem = f"no direction {direction!r}" if direction is not None else "this metric has no default direction"
            raise key_error(f"{problem}; write objective: {{{target.text}: minimize}} or maximize", *where)
        objectives[target.text] = direction
    return objectives


def _range(value: Any) -> IntervalKeys | list[Any]:
    if not isinstance(value, Mapping | list):
        raise key_error(f"must be {{low: .., high: ..}} or a list of levels, got {value!r}")
    return value if isinstance(value, list) else IntervalKeys.model_validate(value)


def _choice_of(path: str, levels: Sequence[Any]) -> LevelChoice:
    """Return the range of a list of levels of `path`, in the order written.

    Levels of a built-in axis become text, others stay as written.

    Raises:
        PydanticCustomError: For fewer than two levels, equal ones, unknown levels of a built-in axis, and values that
            are not single.
    """
    names = [level_text(path, level) for level in levels]
    if len(set(names)) < max(2, len(names)):
        raise key_error("needs two or more different levels; put a setting with a single value into set", path)
    if path in AXES:
        allowed = AXES[path].levels()
        for word in names:
            if word not in allowed:
                problem, choices = unknown_level(word, allowed)
                raise key_error(problem, path, allowed=choices, word=word)
        return LevelChoice(tuple(names))
    if not all(level is None or isinstance(level, bool | int | float | str) for level in levels):
        raise key_error(f"levels must be single values, got {levels!r}", path)
    return LevelChoice(tuple(levels))


Scalar = Annotated[Any, WithJsonSchema(SCALAR)]
AxisName = Annotated[Any, WithJsonSchema({"type": "string"})]
LevelsByAxis = Annotated[dict[str, Any], Checked(_levels_by_axis, {"type": "object", "additionalProperties": SCALAR})]
LEVELS = {"anyOf": [SCALAR, {"type": "array", "items": SCALAR}]}
Rule = Annotated[
    dict[str, list[Any]], Checked(_rule, {"type": "object", "minProperties": 1, "additionalProperties": LEVELS})
]
"""Axis -> levels."""
SEED = {"type": "integer", "minimum": 0}
SEEDS = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "minItems": 1, "uniqueItems": True, "items": SEED}]}  # fmt: skip
Seeds = Annotated[Sequence[int], Checked(_seeds, SEEDS)]
Switch = Annotated[bool, Checked(_switch, {"type": ["boolean", "string"], "pattern": SWITCH})]
Width = Annotated[
    float | None, WithJsonSchema({"type": ["number", "string"], "pattern": NUMBER, "exclusiveMinimum": 0})
]
FullMeasure = Annotated[
    Measure,
    Checked(
        lambda text: measure(text, short=False, average=True),
        {"type": "string", "pattern": r"^[a-z][a-z0-9_]*\.[^@]+(@([0-9]+|avg))?$"},
    ),
]
ShortMeasure = Annotated[
    Measure,
    Checked(
        lambda text: measure(text, average=True), {"type": "string", "pattern": r"^[a-z][a-z0-9_.]*(@([0-9]+|avg))?$"}
    ),
]
Margin = Annotated[
    float | None, number("must be a number above 0, in the unit of the measure (0.05 is 5 points)", above=0)
]
Share = Annotated[
    Fraction | None, Checked(_fraction, {"type": ["string", "number"], "pattern": r"^\s*[0-9.]+(\s*/\s*[0-9]+)?\s*$"})
]
Resolution = Annotated[
    int | None,
    Checked(_resolution, {"type": ["string", "integer"], "enum": [*RESOLUTIONS, *range(3, len(RESOLUTIONS) + 3)]}),
]
OBJECTIVES = [
    {"type": "string"},
    {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string"}},
    {"type": "object", "minProperties": 1, "additionalProperties": {"enum": list(DIRECTIONS)}},
]
Objectives = Annotated[dict[str, Direction], Checked(_objectives, {"anyOf": OBJECTIVES})]
SamplerName = Annotated[Sampler, choice("sampler", SAMPLERS, default="tpe")]
PrunerName = Annotated[Pruner | None, choice("pruner", PRUNERS, null=True)]
Trials = Annotated[int, integer(1, MOST_TRIALS)]
SeedCount = Annotated[int, integer(2, MAX_SEEDS)]


def _optional(**more: Any) -> Any:
    """Return a field that may be left out but not be null in the JSON Schema."""
    return Field(None, **more)


# --- sections ---------------------------------------------------------------------------------------------------------


class Section(BaseModel):
    """A mapping of keys, each with its description below it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    must: ClassVar[str] = "must be a mapping"
    needs: ClassVar[str] = ""
    lacking: ClassVar[tuple[Any, ...]] = (None,)

    @model_validator(mode="before")
    @classmethod
    def _has_its_keys(cls, value: Any) -> Any:
        """Return the mapping unchanged; raise PydanticCustomError if it is no mapping or its keys do not fit.

        Refused are unknown keys and missing required keys. A required key with a value of `lacking` counts as missing.
        """
        if not isinstance(value, Mapping):
            raise key_error(f"{cls.must}, got {value!r}")
        for name in value:
            if name not in cls.model_fields:
                raise key_error("no such key", name, allowed=cls.model_fields, word=name)
        for name, field in cls.model_fields.items():
            if field.is_required() and value.get(name) in cls.lacking:
                raise key_error(f"lacks {name}; {cls.needs}")
        return value


class ContrastKeys(Section):
    """An item of the grid's `contrasts`."""

    must = "must map measure, axis, level and more"
    needs = "a contrast needs measure, axis, level"
    measure: FullMeasure
    """Metric to compare: probe.metric, probe.metric@LENGTH, or probe.metric@avg for the length-weighted average."""
    axis: AxisName
    """An axis of this grid."""
    level: Scalar
    """Level to compare with the reference."""
    reference: Scalar = None
    """Reference level; by default off or baseline, else the first level of the axis."""
    within: LevelsByAxis = {}
    """Axis mapped to a level: use only cells with these levels."""
    margin: Margin = None
    """Equivalence margin: differences below it do not matter. In the measure's own unit (0.05 of an accuracy is 5 points)."""


class StopKeys(Section):
    """The grid's `stop`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["ci"]}, {"required": ["sure"]}]})
    needs = "stop needs contrast, metric, and ci or sure"
    contrast: AxisName
    """Axis of this grid whose levels are compared."""
    level: Scalar = None
    """Level to compare with the reference; required if the axis has more than two levels."""
    reference: Scalar = None
    """Reference level; by default off or baseline, else the first level of the axis."""
    within: LevelsByAxis = {}
    """Axis mapped to a level: use only cells with these levels."""
    metric: ShortMeasure
    """Metric to compare: probe.metric, probe.metric@LENGTH or probe.metric@avg; needle@65536 is the probe's main metric."""
    ci: Width = None
    """Stop when the interval is at most this wide, from end to end, in the unit of the tables: points for a share, nats for a loss."""
    sure: Switch = False
    """Stop also when the interval excludes zero."""
    min_seeds: SeedCount = _optional(
        description=f"Seeds at the first look; by default {DEFAULT_FIRST_SEEDS}, or the number of the grid's seeds if larger."
    )
    max_seeds: SeedCount = Field(
        DEFAULT_MAX_SEEDS, description=f"Seeds at the last look; by default {DEFAULT_MAX_SEEDS}."
    )
    wave: Annotated[int, integer(1, MAX_SEEDS)] = 1
    """Seeds added between two looks."""
    spending: Annotated[str, choice("spending", SPENDINGS)] = OBRIEN_FLEMING
    """Spending of the 5% significance level over the looks: little at first (obrien-fleming), or about equal (pocock)."""

    @field_validator("ci", mode="before")
    @classmethod
    def _is_a_width(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the interval width as a number above 0, in points for a percentage, else in the metric's unit.

        Unchanged if `metric` itself is not valid. Raises PydanticCustomError for anything else.
        """
        target = info.data.get("metric")
        if target is None:
            return value
        unit = "points" if target.metric.percent else target.metric.unit
        return number_of(value, f"must be an interval width in {unit}, above 0", above=0)

    @model_validator(mode="after")
    def _has_an_end(self) -> StopKeys:
        if self.ci is None and not self.sure:
            raise key_error("needs a stopping criterion: ci (the largest interval width) or sure: true")
        return self


class DesignKeys(Section):
    """The grid's `design`."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [name]} for name in SIZES]})
    fraction: Share = None
    """Fraction of the combinations, such as 1/4: a regular fraction if one separates the main effects, else d-optimal."""
    runs: Annotated[int | None, integer(1, limits="of combinations, at least 1")] = None
    """Number of combinations, d-optimal; a larger design contains the smaller ones."""
    resolution: Resolution = None
    """Smallest regular fraction of this resolution: III separates main effects from each other, IV also from two-axis interactions, V also two-axis interactions from each other."""
    method: Annotated[str | None, choice("method", METHODS)] = None
    """regular: defined by products of two-level axes; d-optimal: the most informative cells."""
    model: Annotated[str, choice("model", MODELS)] = "main"
    """Effects to estimate: main effects, or also two-axis interactions (two-way); in both cases those that contrasts need."""

    @model_validator(mode="after")
    def _has_a_size(self) -> DesignKeys:
        if sum(name in self.model_fields_set for name in SIZES) != 1:
            raise key_error(f"must have exactly one of {', '.join(SIZES)}")
        return self


class IntervalKeys(Section):
    """Range of numbers in `search` or `tune`."""

    needs = "a range needs low and high"
    low: Annotated[float, number("must be a number")]
    high: Annotated[float, number("must be a number")]
    log: StrictBool = False
    step: Annotated[float | None, number("must be a number")] = None

    @model_validator(mode="after")
    def _is_a_range(self) -> IntervalKeys:
        """Return the section; raise PydanticCustomError for ends that are out of order and steps that do not fit.

        low must be below high, and above 0 with `log`. A step must be above 0 and at most high - low, without `log`.
        """
        low, high, step = self.low, self.high, self.step
        if low >= high:
            raise key_error(f"low must be below high, got {low:g} and {high:g}")
        if self.log and low <= 0:
            raise key_error(f"log needs low above 0, got {low:g}", "low")
        if step is not None and self.log:
            raise key_error("cannot be combined with log; remove one of them", "step")
        if step is not None and not 0 < step <= high - low:
            raise key_error(f"must be above 0 and at most high - low, got {step:g}", "step")
        return self

    def interval(self, path: str) -> Interval:
        """Return the range of the setting `path`: ends and step as integers for an integer setting, else as floats.

        Raises PydanticCustomError for a fractional end or step of an integer setting.
        """
        kind = int if settings.is_integer_setting(path) else float
        ends = {name: end for name, end in self if name != "log" and end is not None}
        for name, end in ends.items():
            if end != kind(end):
                raise key_error(f"{path} takes whole numbers, got {end:g}", path, name)
        return Interval(**{name: kind(end) for name, end in ends.items()}, log=self.log)


class SearchKeys(Section):
    """The grid's `search`."""

    needs = "a study needs objective and ranges"
    lacking = (None, False, "", [], {})
    sampler: SamplerName = "tpe"
    """Method that proposes trials: tpe (the default), random, cmaes (numbers only), nsga2 (several objectives)."""
    trials: Trials = 20
    """Total number of trials; raise it later to continue the same study."""
    objective: Objectives
    """Metric to optimize, such as val_loss or needle@65536; for several, map each to minimize or maximize."""
    ranges: dict[str, Annotated[Any, Checked(_range, {})]]
    """Settings of model or train, or axes, to vary, each mapped to {low, high, log, step} or a list of levels."""
    pruner: PrunerName = None
    """Rule that stops trials with a poor validation loss: asha, median or hyperband; without it all trials finish."""
    seed: Annotated[int, integer(0)] = 0
    """Seed of the sampler's random numbers."""
    startup: Trials = _optional()
    """Random trials before tpe or cmaes begins."""
    population: Annotated[int, integer(2, MOST_TRIALS)] = _optional()
    """Trials per generation of cmaes or nsga2."""

    @field_validator("ranges", mode="before")
    @classmethod
    def _are_of_settings(cls, value: Any) -> Any:
        """Return the ranges unchanged; raise PydanticCustomError for keys that cannot be searched.

        Keys must be a built-in axis, with a list of levels, or the path of a setting of the section model or train.
        """
        if not isinstance(value, Mapping):
            raise key_error(f"must map each setting to a range, got {value!r}")
        for path, levels in value.items():
            if path in AXES:
                if isinstance(levels, Mapping):
                    raise key_error(
                        "has named levels, not numbers; give a list of levels", path, allowed=AXES[path].levels()
                    )
                continue
            if (unknown := settings.path_problem(path)) is not None:
                problem, allowed, word = unknown
                raise key_error(problem, path, allowed=[*allowed, *(AXES if "." not in path else ())], word=word)
            if path.partition(".")[0] not in SEARCHED:
                raise key_error("cannot be searched; only settings of model and train can", path)
        return value

    @field_validator("ranges")
    @classmethod
    def _as_ranges(cls, value: dict[str, Any]) -> dict[str, Range]:
        return {
            path: ends.interval(path) if isinstance(ends, IntervalKeys) else _choice_of(path, ends)
            for path, ends in value.items()
        }

    @model_validator(mode="after")
    def _agree(self) -> SearchKeys:
        """Return the section; raise PydanticCustomError for a sampler, its options or a pruner that do not suit it.

        cmaes needs two or more intervals and a single objective. A pruner needs the validation loss, minimized, as the
        only objective. `startup` is for tpe and cmaes alone, `population` for cmaes and nsga2.
        """
        numbers, objectives = sum(isinstance(ends, Interval) for ends in self.ranges.values()), [*self.objective]
        if self.sampler == "cmaes" and numbers < 2:
            problem = (
                f"cmaes needs two or more ranges with low and high, got {numbers}; use tpe, or give more such ranges"
            )
            raise key_error(problem, "sampler")
        if self.sampler == "cmaes" and len(objectives) > 1:
            raise key_error("cmaes supports a single objective; use tpe or nsga2 for several", "sampler")
        if self.pruner is not None and len(objectives) > 1:
            raise key_error("a pruner needs a single objective; remove pruner", "pruner")
        if self.pruner is not None and self.objective != {PRUNER_METRIC: "minimize"}:
            problem = f"a pruner compares validation losses during training, but the objective is {objectives[0]}; remove pruner, or use the objective val_loss"
            raise key_error(problem, "pruner")
        for name, samplers in (("startup", ("tpe", "cmaes")), ("population", ("cmaes", "nsga2"))):
            if name in self.model_fields_set and self.sampler not in samplers:
                raise key_error(
                    f"applies only to the samplers {' and '.join(samplers)}; the sampler is {self.sampler}", name
                )
        return self

    def search(self) -> Search:
        """Return the study that the section declares.

        Its options hold `startup` and `population` only if the file sets them.
        """
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("startup", "population") if name in self.model_fields_set
        }
        return Search(self.ranges, self.objective, self.sampler, self.trials, self.pruner, self.seed, options)


class TuneKeys(SearchKeys):
    """The grid's `tune`."""

    model_config = ConfigDict(json_schema_extra={"required": ["per", "objective", "ranges"]})
    per: AxisName = None
    """Axis of this grid; each of its levels gets its own study."""
    trials: Trials = 20
    """Number of trials per level."""
    at: LevelsByAxis = {}
    """Levels of other axes during the studies; by default those of the base."""

    @model_validator(mode="before")
    @classmethod
    def _is_not_pruned(cls, value: Any) -> Any:
        """Return the mapping of `tune` unchanged; raise PydanticCustomError if it has a key `pruner` that is not None.

        Every level must get the same compute, so that no pruner may stop one early; "none" is refused, too.
        """
        if isinstance(value, Mapping) and value.get("pruner") is not None:
            problem = f"tune gives every level the same compute, which a pruner would change; {NOT_PRUNED}"
            raise key_error(problem, "pruner")
        return value

    @model_validator(mode="after")
    def _has_a_single_objective(self) -> TuneKeys:
        if len(self.objective) > 1:
            raise key_error("tune needs a single objective, because it selects one setting", "objective")
        return self


class GridFile(Section):
    """A grid file; a base has the keys BASE_KEYS alone."""

    name: str = Field("", description=f"Name of the sweep in the database: {NAME_RULE}; not {PUBLISHED_PREFIX}..., which is reserved for the paper's numbers.", json_schema_extra={"pattern": f"^(?!{PUBLISHED_PREFIX}){NAME.pattern}$"})  # fmt: skip
    description: str = ""
    extends: str = Field("", description=f"Base: {', '.join(shipped('base'))}, or your own file next to the grid.")
    axes: dict[str, Any] = {}
    """Factors and their levels; cells are all combinations, with the last axis varying fastest."""
    levels: dict[str, Any] = {}
    """Additional settings of a level: axis, level, settings."""
    exclude: list[Rule] = []
    """Drops the cells that match all keys of a rule; seed is a key too, such as seed: [3, 4]."""
    include: list[Rule] = []
    """Combinations to add after exclude."""
    seeds: Seeds = Field(1, validate_default=True)
    """Number of seeds (3 means 0, 1, 2), or a list of seeds."""
    set: dict[str, Any] = {}
    """Settings of every cell; they override those of the base."""
    resources: dict[str, Any] = {}
    plugins: list[Annotated[Any, WithJsonSchema({"type": "string"})]] = []
    """Python files next to the grid that register mixers, memories, position schemes, regularizers, corpora or probes."""
    contrasts: list[ContrastKeys] = []
    """Confirmatory comparisons, tested and corrected as one family; everything else is exploratory."""
    design: DesignKeys = _optional()
    """Part of the combinations to launch; seeds and include apply on top. By default all combinations."""
    stop: StopKeys = _optional()
    """Adds seeds to the cells of this contrast until its interval is narrow enough (docs/how-to/add-seeds.md)."""
    search: SearchKeys = _optional()
    """Study instead of a factorial: each trial is a cell, proposed from the results of earlier trials."""
    tune: TuneKeys = _optional()
    """Studies before the factorial, one per level of an axis; the cells use the best settings of their level."""

    @model_validator(mode="before")
    @classmethod
    def _suits_its_cells(cls, value: Any) -> Any:
        """Return the keys unchanged; in a study, without empty `design`, `stop` and `tune`.

        Raises PydanticCustomError for a pruner at the top level or in a grid with axes, and for a non-empty axes,
        levels, exclude, include, design, contrasts, stop or tune in a study.
        """
        search = value.get("search")
        if "pruner" in value:
            raise key_error(NOT_PRUNED, "pruner")
        if isinstance(search, Mapping) and search.get("pruner") is not None and value.get("axes"):
            raise key_error(NOT_PRUNED, "search", "pruner")
        if "search" not in value:
            return value
        for name in OF_FACTORIALS:
            if value.get(name):
                problem = "applies only to a factorial grid and cannot be combined with search; put what varies into search.ranges"
                raise key_error(problem, name)
        return {name: keys for name, keys in value.items() if keys or name not in ("design", "stop", "tune")}
