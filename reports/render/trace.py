"""The trace of a table or figure: what it is made of, how a file carries it, and where two differ.

Builders call `attempts_by_cell`, `attempts_by_source` and `shown_beyond`, renderers the rest; `report --check` reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...results.console.text import counted
from ...results.store.records import CodeAndGpu
from ..sweep_data import SweepData
from ..table import Table

TRACE = "atma-sweep-trace:"
LINE = re.compile(rf"^(?:%|<!--) {TRACE} (?P<json>.*?)(?: -->)?$", re.MULTILINE)


def attempts_by_cell(origins: Iterable[tuple[str, int | None]]) -> dict[str, list[int]]:
    """Return the attempts of every cell that numbers come from, sorted; of a cell without a number none."""
    cells: dict[str, set[int]] = {}
    for cell, attempt in origins:
        cells.setdefault(cell, set()).update(() if attempt is None else (attempt,))
    return {cell: sorted(attempts) for cell, attempts in cells.items()}


def attempts_by_source(attempts: Iterable[int], sources: Mapping[int, CodeAndGpu]) -> list[dict[str, Any]]:
    """Return the attempts by the commit and the GPU that they ran on."""
    groups: dict[CodeAndGpu, list[int]] = {}
    for attempt in sorted(set(attempts)):
        groups.setdefault(sources.get(attempt, CodeAndGpu()), []).append(attempt)
    return [
        {"commit": source.commit, "dirty": source.dirty, "gpu": source.gpu, "attempts": found}
        for source, found in groups.items()
    ]


def shown_beyond(data: SweepData) -> dict[str, Any]:
    """Return the context lengths that are shown besides those of the launch, as a trace names them; nothing where there are none."""
    return {"lengths": "all" if data.everything else list(data.also)} if data.beyond else {}


def differences(trace: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Return a line for every cell whose numbers come from other attempts in a file than in the database now."""
    if "cells" not in trace:
        return []
    mine = json.loads(json.dumps(fresh))
    lines = []
    for cell in dict.fromkeys([*trace["cells"], *mine["cells"]]):
        was, now = trace["cells"].get(cell), mine["cells"].get(cell)
        if was is not None and was != now:
            in_file, in_database = _attempts(was), _attempts(now)
            lines.append(f"cell {cell}: the file's numbers come from {in_file}, the database's from {in_database}")
    return lines


def _attempts(attempts: Sequence[int] | None) -> str:
    return f"attempts {', '.join(map(str, attempts))}" if attempts else "no attempt"


def trace_text(table: Table) -> str:
    """The trace as JSON in one line that holds nothing a comment of HTML could end at."""
    text = json.dumps(table.trace, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def parse_trace_comment(written: str) -> Any:
    """The trace in the last comment that has one, None without any. Raises ValueError where it is no JSON."""
    found = LINE.findall(written)
    return json.loads(found[-1]) if found else None


def sources_text(table: Table) -> str:
    """The trace in a few words, for people."""
    sources = table.trace.get("sources", ())
    attempts = [attempt for source in sources for attempt in source["attempts"]]
    if not attempts:
        return "Trace: no attempt stands behind this table."
    told = []
    for source in sources:
        changed = " with changes" if source["dirty"] else ""
        commit = f"commit {source['commit'][:12]}{changed}" if source["commit"] else "no commit recorded"
        told.append(" on ".join(filter(None, (commit, source["gpu"]))))
    several = f"{counted(len(attempts), 'attempt')}, {min(attempts)} to {max(attempts)}"
    which = several if len(attempts) > 1 else f"attempt {attempts[0]}"
    return f"Trace: {which} ({'; '.join(dict.fromkeys(told))})."
