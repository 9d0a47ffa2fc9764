"""Bytes, tokens and durations as short text for people."""

from __future__ import annotations

BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
TOKEN_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))
"""Value and letter of the units of token counts, largest first; they are powers of 1000."""


def format_bytes(count: float) -> str:
    """Return bytes as text in binary units, such as 999 B, 1.0 KiB or 12 GiB.

    One decimal below 9.95, integers above; the next unit starts at 1000.
    """
    value, unit = float(count), 0
    while value >= 1000 and unit < len(BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {BYTE_UNITS[unit]}" if value < 9.95 and unit else f"{value:.0f} {BYTE_UNITS[unit]}"


def format_tokens(tokens: float) -> str:
    """Return a number of tokens as text: 950, 12.3K, 4.56M, 1.20B.

    Units are powers of 1000; three significant digits from 1000 on (999,600 gives 1000K).
    """
    for size, unit in TOKEN_UNITS:
        if tokens >= size:
            value = tokens / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{unit}"
    return f"{tokens:.0f}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text: 5 s, 12 min, 3.4 h, 2.1 days.

    Seconds are used below two minutes, minutes below two hours, hours below two days.
    """
    if seconds >= 48 * 3600:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
