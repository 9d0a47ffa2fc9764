"""The shipped grids, their bases and the JSON Schema of a grid file."""

from pathlib import Path

GRIDS = Path(__file__).resolve().parent
