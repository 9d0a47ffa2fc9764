"""How the level of an axis reads as a word, in a grid, on the command line and in a report alike."""

from __future__ import annotations

SWITCHES = {"true": "on", "yes": "on", "on": "on", "false": "off", "no": "off", "off": "off"}


def level_word(level: object) -> str:
    """YAML's true/false and yes/no read as on/off, in any case; any other scalar as its text."""
    text = str(level)
    return SWITCHES.get(text.lower(), text)
