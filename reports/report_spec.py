"""Registry entry of a table or figure. It imports none of them, since the help of the command line lists them all."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..renamed import old_names

CURVE_X_COLUMNS = {"tokens": "tokens", "time": "wall_s"}
"""Column of a training curve that is the x axis, by the value of `--against`."""


@dataclass(frozen=True)
class ReportSpec:
    """Registry entry of a table or figure.

    `at` is the import path: module:function of a table, module of a figure. `shows` is a short description. `number` is
    the number of a figure in the paper, or of a table in the paper's second version if that differs. `takes` names the
    accepted optional options. `study` is True if it is about studies, and is then skipped by --all for other sweeps.
    Further fields say if measured numbers are compared, so that differences between their cells are printed above them;
    if all cells are needed, so that --only is refused; and the probes it is about, without any of which --all skips it.
    """

    at: str
    shows: str
    number: str = ""
    takes: tuple[str, ...] = ("lengths",)
    compares: bool = True
    of: tuple[str, ...] = ()
    study: bool = False
    whole: bool = False

    def load(self, package: str) -> Any:
        """Import and return the function of a table, or the module of a figure.

        Args:
            package: Package that `at` is relative to.
        """
        module, _, function = self.at.partition(":")
        imported = importlib.import_module(f".{module}", package)
        return getattr(imported, function) if function else imported

    def select_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the options that it accepts and whose value is not empty."""
        return {name: value for name, value in options.items() if name in self.takes and value}
