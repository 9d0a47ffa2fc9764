"""Labels and looks of the lines of the needle panels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..figures.canvas.base import axes_of_lines, line_groups
from ..figures.canvas.drawing import level_label
from ..render import style
from ..sweep_data import SweepData


def line_fields(data: SweepData) -> dict[str, dict[str, Any]]:
    """Return name, label and look of every line by its text in the payload: what the page adds points to."""
    groups = line_groups(data)
    labels, looks = _line_labels(data, groups), _line_looks(data, groups)
    return {line: {"name": line, "label": labels[line], "look": looks[line]} for line in labels}


def _line_labels(data: SweepData, groups: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the label of every line, such as "with memory, no window", by its text in the payload."""
    axes = axes_of_lines(data)
    labels = {}
    for group in groups.values():
        levels = (group["first"], group["second"])
        parts = [level_label(level, axis) for axis, level in zip(axes, levels, strict=False)]
        labels[group["line"]] = ", ".join(parts) or group["line"]
    return labels


def _line_looks(data: SweepData, groups: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Return {"dash": widths of on and off, "open": bool, "mark": index} by line.

    As in the figures, dash and fill show the memory and the marker the window. Where other axes distinguish the lines,
    their levels take dashes and markers in their order.
    """
    axes = axes_of_lines(data)
    looks = {}
    for group in groups.values():
        levels = dict(zip(axes, (group["first"], group["second"]), strict=False))
        first, second = [
            tables.get(level, sorted(data.levels(axis)).index(level)) if axis in ("memory", "window") else list(data.levels(axis)).index(level)
            for axis, level in levels.items()
            for tables in ({"memory": style.MEMORY_DASHES, "window": style.WINDOW_MARKERS}.get(axis, {}),)
        ][:2] + [0] * (2 - len(levels))  # fmt: skip
        dash = style.DASHES[first % len(style.DASHES)]
        looks[group["line"]] = {
            "dash": [] if dash == "-" else [2 * width for width in dash[1]],
            "open": first % 2 == 1,
            "mark": second % 3,
        }
    return looks
