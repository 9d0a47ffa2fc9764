"""Amounts in words for people."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes for people: two digits below ten, whole numbers above."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if value < 9.95 and unit else f"{value:.0f} {UNITS[unit]}"


def amount(number: float) -> str:
    """Tokens for people: 1,234 or 5.6M or 7.8B."""
    for limit, letter in ((1e9, "B"), (1e6, "M")):
        if number >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:,.0f}"
