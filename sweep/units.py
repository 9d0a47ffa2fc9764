"""Amounts in words for people."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes for people: two digits below ten, whole numbers above."""
    value, unit = float(count), 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if value < 9.95 and unit else f"{value:.0f} {UNITS[unit]}"
