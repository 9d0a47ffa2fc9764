"""Numbers of things in words."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return the number and its noun, the noun in the plural unless the number is 1: `1 cell`, `1,200 cells`.

    Args:
        number: How many there are; thousands are set apart by commas.
        noun: What is counted, in the singular.
        plural: Its plural, for a noun that does more than take an s.
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
