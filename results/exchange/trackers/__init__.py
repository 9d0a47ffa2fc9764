"""Exporters to experiment trackers, one file each, and the registry that lists them.

`export` writes files, nothing is sent; live.py follows a sweep that runs and sends its news.

Imported by sweep/commands. Imports the rest of results/exchange; the package of a tracker is imported only for an
export. Start at EXPORTERS and runs.py.
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
    """A module of this folder that writes a sweep for one tracker.

    An exporter to a folder has `runs(store, sweep, folder, out)`, which returns the function that writes one run below
    `folder`, later renamed to `out`, and `follow(store, sweep, target)`, which returns the receiver of news
    (runs.LiveTarget). An exporter with an `ending` has `export(store, sweep, out)`, which writes one file and returns a
    count.
    """

    module: str
    tracker: str = ""
    """Display name of the program."""
    ending: str = ""
    """Suffix of the one file; empty for an exporter that fills a folder with one run per cell."""
    counts: str = "cells"
    """Plural noun of the exported objects."""

    def load(self) -> Any:
        """Import and return the module.

        Raises:
            PackageMissing: the tracker's package is not installed; the message says how to install it.
        """
        try:
            return importlib.import_module(f".{self.module}", __name__)
        except ModuleNotFoundError as error:
            from ...errors import PackageMissing

            raise PackageMissing(error.name or self.module) from error

    def export(self, store: Store, sweep: str, out: Path) -> int:
        """Write a sweep to a new folder or file, and return the number of exported cells or trials.

        Blocks until all runs are written; the target appears when it is complete.

        Args:
            store: database.
            sweep: name of the sweep.
            out: folder or (with an `ending`) file, which must not exist.

        Raises:
            PackageMissing: the tracker's package is not installed.
            StoreError: the target exists or cannot be written.
            SweepUnknown: there is no such sweep.
        """
        module = self.load()
        if self.ending:
            return int(module.export(store, sweep, out))
        from ...console.output_files import atomic_folder
        from .runs import tracker_runs

        count = 0
        with atomic_folder(out) as folder:
            write = module.runs(store, sweep, folder, out)
            for run in tracker_runs(store, sweep):
                write(run)
                count += 1
        return count


EXPORTERS: Mapping[str, Exporter] = {
    "tensorboard": Exporter("tensorboard", "TensorBoard"),
    "wandb": Exporter("wandb", "Weights & Biases"),
    "mlflow": Exporter("mlflow", "MLflow"),
    "trackio": Exporter("trackio", "Trackio"),
    "optuna": Exporter("optuna", ending=".db", counts="trials"),
}
"""Exporters by the value of --to."""
