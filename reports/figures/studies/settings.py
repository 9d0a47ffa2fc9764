"""Settings of a study as axes, and helpers that its figures share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ....results.studies.optuna_study import Trial
from ...stats.study_data import Objective, Study, is_same_level, level_text, range_text
from ..canvas import drawing
from ..canvas.base import Axes, Figure
from ..canvas.distance_scale import DistanceScale, distance_scale
from ..canvas.line_drawing import robust_range
from ..canvas.scales import Scale, short_numbers, tick_label

SETTING_NAMES = {
    "attn_type": "mixer",
    "reg_mode": "regularizer",
    "n_layers": "layers",
    "d_model": "model width",
    "seq_len": "row length",
    "batch_tokens": "batch, tokens",
    "clip": "gradient clip",
}
"""Names of settings on axes by their short display name; others have spaces for underscores."""
SPELLINGS = {"lr": "learning rate", "muon": "Muon", "adam": "Adam", "eps": "epsilon"}
"""Words of the names of settings that are spelled otherwise on an axis."""
RING: dict[str, Any] = {"linestyle": "none", "marker": "o", "markerfacecolor": "none", "markeredgecolor": drawing.INK}
"""Style of the ring around a trial that none beats."""
RING_SIZE = 7.5  # points in the style `paper`, diameter of a ring in figures and keys
MAX_LABEL_CHARS = 34  # characters per line of an upright label
FULL_SIZE_TRIALS = 80
"""Number of trials beyond which markers shrink as the number grows."""
CROWDED = 0.5
"""Share of the range of values, from the best on, in which half of them lie for an axis of distances."""
MAX_STEP_TICKS = 6
"""Largest number of integers, or steps, of a range that all have a tick."""


def scale_of(study: Study, path: str) -> Scale:
    """Return the axis of a setting.

    A setting with a range has a numeric axis over the search range, extended to the values that trials of an earlier
    search had. It is logarithmic if the range is. Every number that the range permits (integers, or steps) has a tick
    if there are at most six; otherwise the ticks are round numbers. Any other setting has an axis of levels, in the
    order of `Study.levels`, as texts.
    """
    from ....results.studies.search import Interval

    search_range = study.search.ranges[path]
    if not isinstance(search_range, Interval):
        levels = map(level_text, study.levels(path))
        return Scale(levels=tuple(drawing.level_label(level) if path == "attn_type" else level for level in levels))
    tried = [value for trial in study.trials if (value := _number(trial.params.get(path))) is not None]
    tried = [value for value in tried if value > 0] if search_range.log else tried
    low, high = min([search_range.low, *tried]), max([search_range.high, *tried])
    step, last = search_range.step or 1, search_range.last_step
    # a continuous range has no steps, and many of them have no tick each
    steps = range(last + 1) if last is not None and last < MAX_STEP_TICKS else ()
    at = tuple(float(search_range.low + index * step) for index in steps)
    return Scale(low, high, log=search_range.log, integers_only=search_range.is_integer, at=at)


def setting_label(name: str) -> str:
    """Return the label of a setting by its short display name, such as "Muon learning rate" for muon_lr.

    The path of a name that several settings share keeps its dots.
    """
    spelled = " ".join(SPELLINGS.get(word, word) for word in name.split("_"))
    return SETTING_NAMES.get(name, name if "." in name else spelled)


def axis_position(study: Study, path: str, params: Mapping[str, Any]) -> float:
    """Return the position of a trial on the axis of a setting, in units of `scale_of` (not as a share of the axis).

    It is the number itself for a setting with a range. For a setting of levels, even numeric ones, it is the index of
    the level in `study.levels(path)`, which has levels of earlier trials too.

    Args:
        study: The study.
        path: Dotted path of the setting, a key of `study.search.ranges`.
        params: Settings of the trial by path.

    Returns:
        The position; NaN if the trial lacks the setting, or a setting with a range has no finite number.

    Raises:
        StopIteration: The level is not in `study.levels(path)`, so the trial is not one of the study.
    """
    from ....results.studies.search import Interval

    if path not in params:
        return math.nan
    if isinstance(study.search.ranges[path], Interval):
        number = _number(params[path])
        return math.nan if number is None else number
    return next(float(i) for i, level in enumerate(study.levels(path)) if is_same_level(level, params[path]))


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def value_range(values: Sequence[float], objective: Objective) -> tuple[float, float]:
    """Return a (low, high) range of the values that a few outliers do not flatten, with a margin.

    The better half of the values is always inside. Worse values beyond 1.5 times the interquartile range from the
    quartiles (or a little more) may lie outside.

    Args:
        values: Displayed values of the trials; at least one.
        objective: Objective of which only the sign is read.
    """
    ranked = sorted(values, key=lambda value: -objective.sign * value)
    low, high = robust_range(values, ranked[: max(1, (len(ranked) + 1) // 2)])
    return low, high


def distance_from_best(values: Sequence[float], sign: int) -> DistanceScale | None:
    """Return an axis that is logarithmic in the distance from the best value; None where values are not crowded at it.

    They are crowded if half of them lie in the better half of the range.

    Args:
        values: Displayed values of the trials; at least one.
        sign: 1 if more is better, else -1.
    """
    best, worst = (max(values), min(values)) if sign > 0 else (min(values), max(values))
    if abs(statistics.median(values) - best) > CROWDED * abs(worst - best):
        return None
    return distance_scale(values, best, -sign)


def distance_ticks(scale: DistanceScale, most: int = 4) -> dict[float, str]:
    """Return the tick labels of `distance_from_best`: the best value, and at most `most` distances as +0.1 or −0.1."""
    ticks = scale.ticks(lambda _, step: f"{'+' if step > 0 else '−'}{tick_label(abs(step))}", f"{scale.end:.4g}")
    distant = [tick for tick in ticks if tick != scale.end]
    return {tick: ticks[tick] for tick in [*distant[:: -(-len(distant) // most) or 1], scale.end]}


def distance_note(sign: int) -> str:
    """Return the sentence on an axis of `distance_from_best`."""
    return f"Axis of the value: logarithmic in the distance from the best ({'−' if sign > 0 else '+'})."


def colours(objective_sign: int, name: str = drawing.HEAT_MAP) -> Any:
    """Return the matplotlib colour map in which darker is better, reversed where more is better.

    Args:
        objective_sign: 1 if more is better, else -1.
        name: Colour map from dark to light.
    """
    from matplotlib import colormaps

    return colormaps[f"{name}_r" if objective_sign > 0 else name]


def ring_key() -> Any:
    """Return the legend handle of a ring around a mark, as large as it is drawn."""
    return drawing.key(markersize=drawing.line_width(RING_SIZE), **RING)


def colour_bar(
    figure: Figure,
    axes: Sequence[Axes],
    norm: Any,
    colour_map: Any,
    label: str,
    extend: str = "neither",
    ticks: Sequence[float] | None = None,
) -> None:
    """Draw a colour bar with about four ticks at the right of these axes, long enough for its label.

    Args:
        figure: The figure.
        axes: Panels that give up space for the bar.
        norm: Matplotlib normalization of the values.
        colour_map: Matplotlib colour map.
        label: Label of the bar; wrapped by `wrap_vertical_label`.
        extend: Ends of the bar with an arrow, beyond which values have its colour: "neither", "min" or "max".
        ticks: Values of the ticks; None: about four round numbers.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.ticker import FixedLocator, MaxNLocator

    layout = {"pad": 0.02, "aspect": 13 * figure.get_figheight(), "fraction": 0.06, "extend": extend}
    bar = drawing.colour_bar(figure, axes, ScalarMappable(norm, colour_map), wrap_vertical_label(label), **layout)
    bar.locator = MaxNLocator(4) if ticks is None else FixedLocator(list(ticks))
    bar.minorticks_off()
    bar.update_ticks()
    short_numbers(bar.ax.yaxis)


def wrap_vertical_label(label: str) -> str:
    """Return the label of an upright axis with line breaks; unchanged if it has no " (".

    The text in the last brackets becomes a line of its own. A rest of more than 34 characters is broken at its last
    comma too, which is dropped.
    """
    text, bracket, better = label.rpartition(" (")
    if len(text) > MAX_LABEL_CHARS:
        text = "\n".join(part for part in (text.rpartition(", ")[0], text.rpartition(", ")[2]) if part)
    return f"{text}\n({better}" if bracket else label


def marker_scale(count: int) -> float:
    """Return the factor for the size of markers and lines: 1 up to 80 trials, then falling to 0.35.

    In between it is the square root of 80 / `count`.
    """
    return max(0.35, min(1.0, (FULL_SIZE_TRIALS / max(1, count)) ** 0.5))


def ring_label(study: Study) -> str:
    """Return the legend label of a ring: "best trial", or "Pareto front" with several objectives."""
    return "best trial" if len(study.objectives) == 1 else "Pareto front"


def level_share(number: int) -> float:
    """Return the offset of a trial's marker from its level, from -0.5 to 0.5 of the width over which marks are spread.

    It depends on the trial's number alone, so that it is the same in every drawing.
    """
    return (number * 0.6180339887498949 + 0.5) % 1 - 0.5


def settings_text(study: Study, trial: Trial) -> str:
    """Return the number and the settings of a trial as text, such as "#6 Muon learning rate 0.0497, layers 4"."""
    texts = []
    for path, value in trial.params.items():
        name = (
            drawing.level_label(str(value))
            if path == "attn_type"
            else f"{value:.3g}"
            if isinstance(value, float)
            else level_text(value)
        )
        texts.append(name if path == "attn_type" else f"{setting_label(study.names.get(path, path))} {name}")
    return f"#{trial.number} {', '.join(texts)}"


def search_space_text(study: Study) -> str:
    """Return the newest searched range of each setting, named as on axes, such as "weight decay (0 to 0.2)"."""
    ranges = []
    for path in study.search.ranges:
        span = range_text(study.search, path)
        if path == "attn_type":
            span = f"({', '.join(drawing.level_label(level) for level in span.strip('()').split(', '))})"
        ranges.append(f"{setting_label(study.names.get(path, path))} {span}")
    return "; ".join(ranges)


def trial_row(study: Study, trial: Trial) -> dict[str, Any]:
    """Return the columns that every frame of trials begins with: number, cell, attempt."""
    return {"number": trial.number, "cell": trial.cell, "attempt": study.attempt(trial)}


def objective_with_direction(direction: str) -> Objective:
    """Return an objective without a name, for functions that need nothing but its direction."""
    return Objective(index=0, name="", direction=direction)


def padded_range(low: float, high: float, part: float = 0.08) -> tuple[float, float]:
    """Return (low, high) extended at both ends by the share `part` of its length.

    A range of length 0 is extended by 5 % of its absolute value, or by 1 at zero.
    """
    more = part * (high - low) or 0.05 * abs(high) or 1.0
    return low - more, high + more
