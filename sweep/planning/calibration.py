"""What a calibration found: seconds of steps of cells on this kind of machine, in a file of the runs folder."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ...results.console.output_files import write

FILE = "calibration.json"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How fast one cell, and every one that is alike, went. Seconds."""

    like: str
    """As likeness.Likeness tells it."""
    device: str
    """As price.Place names it."""
    slug: str
    """The cell that was timed."""
    step_s: float
    """Of one optimizer step."""
    low_s: float
    high_s: float
    """The quickest and the slowest."""
    start_s: float
    """Imports, and building the network."""
    compile_s: float
    """What the first two steps took beyond others: compiling, and capturing."""
    validation_token_s: float
    """Of a token, forward, as a validation does it."""


def read(runs: Path) -> list[Calibration]:
    """All that was found so far; none without a file, and none of one that is not ours."""
    try:
        found = json.loads((runs / FILE).read_text())
    except (OSError, ValueError):
        return []
    names = {field.name: field.type for field in fields(Calibration)}
    known = []
    for one in found if isinstance(found, list) else []:
        if not isinstance(one, dict) or set(one) != set(names):
            continue
        texts = all(isinstance(one[name], str) for name in ("like", "device", "slug"))
        rest = all(type(one[name]) in (int, float) and one[name] >= 0 for name in names if name.endswith("_s"))
        if texts and rest and one["step_s"] > 0:
            known.append(Calibration(**one))
    return known


def keep(runs: Path, new: Iterable[Calibration]) -> None:
    """Adds these to the file; a newer one takes the place of an older one of the same cells on the same machine."""
    every = {(one.device, one.like): one for one in (*read(runs), *new)}
    write(runs / FILE, json.dumps([asdict(one) for one in every.values()], indent=1) + "\n")
