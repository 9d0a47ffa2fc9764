"""Old names of the public Python API, which stay for one version with a DeprecationWarning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

RENAMED: dict[str, dict[str, str]] = {
    "kernels.attention.scored": {"Span": "QueryBlock"},
    "model.bases": {"InBlocks": "QueryBlockMixer"},
    "reports.figures.canvas.base": {"Collected": "FigureData", "Look": "FigureOptions"},
    "reports.report_spec": {"Listed": "ReportSpec"},
    "reports.result_columns": {"speed_of": "speed_column"},
    "reports.stats.significance.paired_tests": {"summaries": "paired_difference_tests"},
    "reports.table_builder": {"Line": "TableRow", "assemble": "build_table", "entry": "measured_entry"},
    "sweep.executors.registry": {"Kind": "ExecutorSpec"},
    "sweep.probes.subject": {"Network": "CellSubject"},
}
"""Old name -> name of today, by module of the package. Each of these modules takes its `__getattr__` from `old_names`.

docs/reference/deprecations.md lists them.
"""

REMOVED_IN = "0.3"
"""Release that no longer has the old names."""


def old_names(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, which finds its renamed objects by their old names.

    Args:
        module: The module's `__name__`.

    Returns:
        A function of a name. It warns with DeprecationWarning and returns the object of today, or raises AttributeError
        for a name that the module never had.
    """
    package, _, path = module.partition(".")

    def find(name: str) -> Any:
        """Return the object of today for an old name, with a warning. Raises AttributeError for any other name."""
        if (today := RENAMED[path].get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now {today}; the old name goes in {REMOVED_IN}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(f"{package}.{path}"), today)

    return find
