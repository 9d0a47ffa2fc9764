"""Job of an attempt, stored as a file in its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoints.file_names import JOB as JOB_FILE


@dataclass(frozen=True, kw_only=True)
class Job:
    """Job of an attempt; a frozen copy is stored in its folder as job.json.

    Addresses are full ones or relative to the runs folder (see checkpoints/storage.py). `attempt` is the attempt's id,
    `fence` the fencing token of its lease, `cell` the cell's id and `slug` its readable name. `kind` is "train",
    "evaluate" (stored weights) or "external" (an open-weight model). `folder` is the attempt's folder, `config` the
    cell's config as JSON. `commit` and `dirty` describe the git checkout; None if unknown.
    """

    attempt: int
    fence: int
    cell: str
    slug: str
    kind: str
    folder: str
    config: dict[str, Any]
    missing: list[tuple[str, int]]
    """(probe, length) pairs still to be measured."""
    resume: list[tuple[int, str]]
    """Earlier attempts whose checkpoints may be resumed, newest first: (attempt id, address of their location)."""
    weights: str | None = None
    """Address of the stored weights to load, for kind `evaluate`; None otherwise."""
    weights_sha256: str | None = None
    """Recorded SHA-256 of the weights, hex; None if none was recorded."""
    commit: str | None = None
    dirty: bool | None = None
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Last point of the curve of each earlier attempt that finished its training, by attempt id."""

    def write(self, runs: Path) -> Path:
        """Write job.json atomically into the attempt's folder, which is created, and return that folder.

        An existing file is replaced. `runs` is the folder that addresses are relative to.

        Raises:
            OSError: it cannot be written.
        """
        folder = runs / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        fields = asdict(self)
        # older code, which `--code kept` runs, does not know these fields, so empty ones are left out
        for name in ("ends", "weights_sha256"):
            if not fields[name]:
                del fields[name]
        aside = folder / f"{JOB_FILE}.part"
        aside.write_text(json.dumps(fields, indent=1))
        aside.replace(folder / JOB_FILE)
        return folder

    @classmethod
    def read(cls, folder: Path) -> Job:
        """Return the job of an attempt's folder, read from its job.json.

        Raises:
            OSError: the file cannot be read.
            ValueError, KeyError, TypeError: it holds no job of this version.
        """
        data = json.loads((folder / JOB_FILE).read_text())
        data["missing"] = [(name, length) for name, length in data["missing"]]
        data["resume"] = [(attempt, path) for attempt, path in data["resume"]]
        return cls(**data)
