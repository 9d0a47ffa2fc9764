"""Text formats of numbers, context lengths and reasons, and the description of a column of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import cache

from ..results import metrics
from ..results.store.records import MeasurementKey

CLEAN, NEEDLE = ("clean", "nats"), ("needle", "digit_accuracy")
"""(probe, metric) of the loss over whole documents, and of the needle's digit accuracy."""
PLUS_MINUS = " ± "
"""Text between a mean and its standard deviation."""

CODE_LENGTH = 16
"""Largest length of the text in place of a missing number."""


BARE = "1"
"""Unit of a dimensionless number: a ratio, a probability, a test statistic."""


def squared(unit: str) -> str:
    """Return the square of a unit: "nats" -> "nats²", "tokens/s" -> "(tokens/s)²"; no unit and "1" stay as they are."""
    return unit if unit in ("", BARE) else f"({unit})²" if "/" in unit else f"{unit}²"


@dataclass(frozen=True)
class Column:
    """A column of numbers: probe, metric and format.

    `heading` is the printed heading, `decimals` the printed decimals (of percent where `percent`).
    """

    heading: str
    probe: str
    metric: str
    decimals: int
    percent: bool = False
    """True if values are stored as fractions and printed in percent."""
    length: int = 0
    """Context length in tokens; 0 for a number without one, -1 for a length that is not known yet."""
    direction: int = 0
    """-1 where less is better, 1 where more is, 0 where neither is."""
    unit: str = ""
    """Unit of the stored values; "" or "1" without one."""

    @property
    def key(self) -> MeasurementKey:
        """Key of the numbers in the database: (probe, metric, length)."""
        return self.probe, self.metric, self.length


def column_of(
    probe: str, metric: str | metrics.Metric, heading: str = "", *, decimals: int | None = None, length: int = 0
) -> Column:
    """Return the column of a metric; a metric name that is not registered gives one with default format.

    Args:
        probe: Name of the probe.
        metric: Metric, or the name of one of the package's.
        heading: Heading; empty for the metric's own.
        decimals: Printed decimals; None for those of the metric (results/metrics.csv for the package's).
        length: Context length in tokens; 0 for none.
    """
    metric_info = metrics.metric(probe, metric) if isinstance(metric, str) else metric
    num_decimals = metric_info.decimals if decimals is None else decimals
    return Column(
        heading or metric_info.heading,
        probe,
        metric_info.name,
        num_decimals,
        metric_info.percent,
        length,
        metric_info.direction,
        metric_info.unit,
    )


EXACT = Context(prec=400, rounding=ROUND_HALF_UP)  # enough digits for any float, so that nothing is rounded twice
HUNDRED = Decimal(100)


@cache
def _last_digit(decimals: int) -> Decimal:
    return Decimal(1).scaleb(-decimals)


def format_number(value: float, decimals: int, *, percent: bool = False) -> str:
    """Return a number with fixed decimals, rounded half up from its shortest decimal form (0.125 -> 0.13).

    Halves are rounded away from zero. A zero has no sign.

    Args:
        value: A finite number.
        decimals: Digits after the point, at least 0.
        percent: Multiply by 100 first, exactly; no "%" is added.
    """
    exact = Decimal(repr(float(value)))
    exact = EXACT.multiply(exact, HUNDRED) if percent else exact
    result = exact.quantize(_last_digit(decimals), context=EXACT)
    return str(abs(result) if result == 0 else result)


def format_signed(value: float, decimals: int, *, percent: bool = False) -> str:
    """Return a number like `format_number`, with a plus sign if it is above zero as printed.

    It has fixed decimals, rounded half away from zero; with `percent` it is multiplied by 100 first. A printed zero has
    no sign.
    """
    text = format_number(value, decimals, percent=percent)
    return text if text.startswith("-") or not text.strip("0.") else f"+{text}"


def format_length(length: int) -> str:
    """Return a context length in tokens as text: 128 -> 128, 2048 -> 2K, 65536 -> 64K, 1048576 -> 1M.

    Units are powers of 1024, used only for exact multiples: 3000 -> 3000.
    """
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def reason_code(reason: str) -> str:
    """Return the text in place of a missing number: the code before the colon of its reason, at most 16 characters.

    A longer code is shortened to its first word. Codes that begin with "n/a" or "no peak", and an empty one, give
    "n/a".
    """
    code = reason.split(":", 1)[0].strip()
    if code.startswith(("n/a", "no peak")):
        return "n/a"
    return code if code and len(code) <= CODE_LENGTH else (code.split() or ["n/a"])[0][:CODE_LENGTH]


def format_count(number: float) -> str:
    """Return a count with three significant digits: 1536 -> 1.54K, 378220864 -> 378M, 1e12 -> 1T.

    Units are powers of 1000. A number below 1000 has up to six significant digits.
    """
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size * 0.9995:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
