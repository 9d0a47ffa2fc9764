"""How numbers, lengths and reasons are printed, and what a column of them is."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext

from ..results import metrics
from ..results.store.records import Key

CLEAN, NEEDLE = ("clean", "nats"), ("needle", "digit_accuracy")
"""(probe, metric) of the loss over whole documents, and of the needle's digits."""
PLUS_MINUS = " ± "
"""Between a mean and its standard deviation."""

CODE_LENGTH = 16


BARE = "1"
"""The unit of a number without one: a ratio, a probability, a test statistic."""


def squared(unit: str) -> str:
    """Return the square of a unit."""
    return unit if unit in ("", BARE) else f"({unit})²" if "/" in unit else f"{unit}²"


@dataclass(frozen=True)
class Column:
    """A column of numbers: where it comes from and how it is printed. `length` is 0 for a number without one."""

    heading: str
    probe: str
    metric: str
    decimals: int
    percent: bool = False
    length: int = 0
    direction: int = 0
    """-1 where less is better, 1 where more is, 0 where neither."""
    unit: str = ""

    @property
    def key(self) -> Key:
        """What it is about, as in the database: (probe, metric, length)."""
        return self.probe, self.metric, self.length


def column_of(
    probe: str, metric: str | metrics.Metric, heading: str = "", *, decimals: int | None = None, length: int = 0
) -> Column:
    """The column of a metric: by its name one of the package's, printed as results/metrics.csv says unless told otherwise."""
    about = metrics.metric(probe, metric) if isinstance(metric, str) else metric
    places = about.decimals if decimals is None else decimals
    return Column(
        heading or about.heading, probe, about.name, places, about.percent, length, about.direction, about.unit
    )


def format_number(value: float, decimals: int, *, percent: bool = False) -> str:
    """The shortest decimal that names the float, rounded half up (0.125 -> 0.13, 2.675 -> 2.68), as people do by hand.

    `percent` multiplies by 100 first, exactly. No sign is left on a zero.
    """
    with localcontext() as context:
        context.prec = 400  # any float in full: nothing is rounded twice
        exact = Decimal(repr(float(value))) * (100 if percent else 1)
        result = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return str(abs(result) if result == 0 else result)


def format_signed(value: float, decimals: int, *, percent: bool = False) -> str:
    """`format_number`, with a plus sign before what is above zero."""
    text = format_number(value, decimals, percent=percent)
    return text if text.startswith("-") or not text.strip("0.") else f"+{text}"


def format_length(length: int) -> str:
    """128 -> 128, 2048 -> 2K, 65536 -> 64K, 1048576 -> 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if length and length % size == 0:
            return f"{length // size}{unit}"
    return str(length)


def reason_code(reason: str) -> str:
    """The word that stands for a number that was not to be had: the reason's code, before its colon."""
    code = reason.split(":", 1)[0].strip()
    if code.startswith(("n/a", "no peak")):
        return "n/a"
    return code if code and len(code) <= CODE_LENGTH else (code.split() or ["n/a"])[0][:CODE_LENGTH]


def format_count(number: float) -> str:
    """A count in three digits: 1536 -> 1.54K, 378220864 -> 378M, 996147200 -> 996M, 1e12 -> 1T."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size * 0.9995:
            return f"{float(f'{number / size:.3g}'):g}{unit}"
    return f"{number:g}"
