"""Exporters to experiment trackers, one file each, and the registry that lists them. Nothing is sent anywhere.

Imported by: sweep/commands. Imports the rest of results/exchange; a tracker's own package is imported when something is written.
Start at EXPORTERS and runs.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...store.store import Store


@dataclass(frozen=True)
class Exporter:
    """A file of this folder that writes a sweep for one tracker.

    An exporter to a folder has `runs(store, sweep, folder, out)`, which returns the function that writes one Run below
    `folder`, later renamed to `out`. One with an `ending` has `export(store, sweep, out)`, which writes one file and returns a count.
    """

    module: str
    tracker: str = ""
    """Name of the program, for people."""
    package: str = ""
    """What pip is to install where its import fails."""
    ending: str = ""
    """Of the one file; empty where a folder is filled, one run a cell."""
    counts: str = "cells"
    """Noun of what is counted."""

    def load(self) -> Any:
        """Import the module. Raises StoreError where the tracker's package is missing."""
        try:
            return importlib.import_module(f".{self.module}", __name__)
        except ImportError as error:
            from ...errors import StoreError

            raise StoreError(
                f"{self.tracker} files need a package ({error}); install it with: pip install '{self.package}'"
            ) from error

    def export(self, store: Store, sweep: str, out: Path) -> int:
        """Write a sweep to a new folder, or a new file of that ending; return how many cells or trials.

        Raises StoreError: something is there already, it cannot be written, or the tracker's package is missing.
        """
        module = self.load()
        if self.ending:
            return int(module.export(store, sweep, out))
        from ...console.output_files import atomic_folder
        from .runs import runs_of

        count = 0
        with atomic_folder(out) as folder:
            write = module.runs(store, sweep, folder, out)
            for run in runs_of(store, sweep):
                write(run)
                count += 1
        return count


EXPORTERS: Mapping[str, Exporter] = {
    "tensorboard": Exporter("tensorboard", "TensorBoard", "tensorboard>=2.18"),
    "wandb": Exporter("wandb", "Weights & Biases", "wandb>=0.22"),
    "mlflow": Exporter("mlflow", "MLflow", "mlflow-skinny>=3.10"),
    "optuna": Exporter("optuna", ending=".db", counts="trials"),
}
"""By the word of --to."""
