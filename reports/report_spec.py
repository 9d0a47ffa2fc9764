"""Registry entry of a table or figure.

It imports none of them, since the help of the command line lists them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..renamed import old_names
from ..results.exchange.installed_parts import import_target, load_target

CURVE_X_COLUMNS = {"tokens": "tokens", "time": "wall_s"}
"""Column of a training curve that is the x axis, by the value of `--against`."""


@dataclass(frozen=True)
class ReportSpec:
    """Registry entry of a table or figure."""

    at: str
    """Import path below its package: module:function of a table, module of a figure."""
    shows: str
    """Short description for lists and help."""
    number: str = ""
    """Number of a figure in the paper, or of a table in the paper's second version if that differs."""
    takes: tuple[str, ...] = ("lengths",)
    """Names of the optional options that it accepts."""
    needs_audit_note: bool = True
    """True if it compares measured numbers, so that differences between their cells are printed above them."""
    probes: tuple[str, ...] = ()
    """Probes it is about; --all skips it for a sweep that has numbers, but none of these probes."""
    study: bool = False
    """True if it is about studies, so that --all skips it silently for other sweeps."""
    needs_all_cells: bool = False
    """True if it needs all cells, so that --only is refused."""
    package: str = ""
    """Absolute package that `at` is relative to; empty: the package of tables or figures of this program."""

    def load(self, package: str) -> Any:
        """Import and return the function of a table, or the module of a figure.

        Args:
            package: Absolute name of the package that `at` is relative to, unless the entry names its own.

        Raises:
            ImportError: There is no such module.
            AttributeError: The module has no such function.
            InstalledPartError: One of both, or another error, in an installed package.
        """
        return import_target(self.package, self.at) if self.package else load_target(package, self.at)

    def select_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the options, by name, that it accepts and whose value is not empty (false, 0, None, "")."""
        return {name: value for name, value in options.items() if name in self.takes and value}


def check_spec(name: str, spec: Any) -> ReportSpec:
    """Return the specification of an installed table or figure.

    Raises:
        TypeError: It is no ReportSpec with a package of its own.
    """
    if not isinstance(spec, ReportSpec) or not spec.package:
        raise TypeError(f"must be a ReportSpec with its package, got {spec!r:.80}")
    return spec


if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
