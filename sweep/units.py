"""Formatting of amounts for messages."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Return bytes as text in binary units, such as 999 B, 1.0 KiB or 12 GiB.

    One decimal below 9.95, integers above; the next unit starts at 1000.
    """
    value, unit = float(count), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if value < 9.95 and unit else f"{value:.0f} {UNITS[unit]}"


def amount(number: float) -> str:
    """Return a number of tokens as text: 1,234 below a million, then 5.6M, then 7.8B."""
    for limit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:,.0f}"
