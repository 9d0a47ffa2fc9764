"""A line in the list of tables or of figures. It imports none of them: the lists stand in the help of the command line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..renamed import old_names

CURVE_X_COLUMNS = {"tokens": "tokens", "time": "wall_s"}
"""What `against` names -> the column of a curve that is the x axis."""


@dataclass(frozen=True)
class ReportSpec:
    """A table (`at`: module:function) or figure (`at`: module), what it shows in a few words, and what is asked about it.

    `number` is a figure's in the paper, and a table's in the paper's second version where it has another there. `takes` names the options of the function that not every one has. `compares` says
    whether measured numbers stand side by side, so that what differs between their cells is told above them. `whole`: some cells
    alone would make it wrong, so that it takes no --only. `of` names the
    probes that it is about: where a sweep has something, but nothing of these, --all leaves it out. `study`: it is about studies,
    and --all of another sweep does not speak of it.
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
        """The function or the module, imported when something is made of it."""
        module, _, function = self.at.partition(":")
        found = importlib.import_module(f".{module}", package)
        return getattr(found, function) if function else found

    def options(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the wanted options that it takes and that say anything."""
        return {name: value for name, value in wanted.items() if name in self.takes and value}


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
