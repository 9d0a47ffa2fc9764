"""What an attempt is asked to do, as a file in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

JOB_FILE = "job.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What an attempt is asked to do; a frozen copy lies in its folder as job.json.

    Addresses are full ones or relative to the runs folder (see checkpoints/storage.py).
    """

    attempt: int
    fence: int
    cell: str
    slug: str
    kind: str
    folder: str
    config: dict[str, Any]
    missing: list[tuple[str, int]]
    """(probe, length) still to be measured."""
    resume: list[tuple[int, str]]
    """Earlier attempts whose checkpoints may be continued, newest first: (attempt id, address of their place)."""
    weights: str | None = None
    """Address of the kept weights, for kind `evaluate`."""
    weights_sha256: str | None = None
    """Their recorded SHA-256, hex; None where none was recorded."""
    commit: str | None = None
    dirty: bool | None = None
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of earlier attempts that were trained to the end, by id: the last point of the curve."""

    def write(self, runs: Path) -> Path:
        """Writes job.json into the attempt's folder, whole or not at all, and returns the folder. Raises OSError."""
        folder = runs / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        fields = asdict(self)
        # older code, which `--code kept` runs, need not know of what is empty
        for name in ("ends", "weights_sha256"):
            if not fields[name]:
                del fields[name]
        aside = folder / f"{JOB_FILE}.part"
        aside.write_text(json.dumps(fields, indent=1))
        aside.replace(folder / JOB_FILE)
        return folder

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Reads job.json of an attempt's folder."""
        data = json.loads((folder / JOB_FILE).read_text())
        data["missing"] = [(name, length) for name, length in data["missing"]]
        data["resume"] = [(attempt, path) for attempt, path in data["resume"]]
        return cls(**data)
