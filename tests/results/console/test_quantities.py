"""Bytes, tokens and durations at the borders of their units."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from atma_sweep.results.console.quantities import format_bytes, format_duration, format_tokens

GIB = 2**30


@pytest.mark.parametrize(("format_amount", "number", "text"), [
    (format_bytes, 0, "0 B"), (format_bytes, 999, "999 B"), (format_bytes, 1000, "1.0 KiB"),
    (format_bytes, 1024 * 10, "10 KiB"), (format_bytes, int(9.94 * 2**20), "9.9 MiB"),
    (format_bytes, int(9.96 * 2**20), "10 MiB"), (format_bytes, 999 * GIB, "999 GiB"),
    (format_bytes, 1000 * GIB, "1.0 TiB"), (format_bytes, 5000 * 2**50, "5000 PiB"),
    (format_tokens, 0, "0"), (format_tokens, 950, "950"), (format_tokens, 12_340, "12.3K"),
    (format_tokens, 4_560_000, "4.56M"), (format_tokens, 1.2e9, "1.20B"), (format_tokens, 119.5e9, "120B"),
    (format_duration, 0, "0 s"), (format_duration, 119.4, "119 s"), (format_duration, 120, "2 min"),
    (format_duration, 7199, "120 min"), (format_duration, 7200, "2.0 h"), (format_duration, 77_400, "21.5 h"),
    (format_duration, 172_800, "2.0 days"),
])  # fmt: skip
def test_amount_text(format_amount: Callable[[float], str], number: float, text: str) -> None:
    assert format_amount(number) == text
