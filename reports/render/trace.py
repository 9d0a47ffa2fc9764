"""Trace of a table or figure: its content, its form in a file, and the comparison of two traces.

Builders call `attempts_by_cell`, `attempts_by_source` and `shown_beyond`, renderers the rest; `report --check` reads
it back.
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
    """Return the ascending ids of the attempts by cell id, cells in the order of their first pair.

    Args:
        origins: (cell, attempt) pairs of the numbers; an attempt of None adds the cell without an attempt.
    """
    cells: dict[str, set[int]] = {}
    for cell, attempt in origins:
        cells.setdefault(cell, set()).update(() if attempt is None else (attempt,))
    return {cell: sorted(attempts) for cell, attempts in cells.items()}


def attempts_by_source(attempts: Iterable[int], sources: Mapping[int, CodeAndGpu]) -> list[dict[str, Any]]:
    """Return the attempts grouped by the commit and the GPU that they ran on.

    Args:
        attempts: Ids; repetitions are allowed.
        sources: Commit and GPU by attempt id; attempts without an entry form a group of unknown ones.

    Returns:
        Dictionaries with the keys commit, dirty, gpu and attempts (sorted ids), in the order of their lowest attempt.
    """
    groups: dict[CodeAndGpu, list[int]] = {}
    for attempt in sorted(set(attempts)):
        groups.setdefault(sources.get(attempt, CodeAndGpu()), []).append(attempt)
    return [
        {"commit": source.commit, "dirty": source.dirty, "gpu": source.gpu, "attempts": attempt_ids}
        for source, attempt_ids in groups.items()
    ]


def shown_beyond(data: SweepData) -> dict[str, Any]:
    """Return the extra context lengths of a report as a trace records them: {"lengths": ...}, or {} without any.

    The value is "all" or the list of lengths, in tokens, that were requested in addition to those of the launch.
    """
    return {"lengths": "all" if data.everything else list(data.also)} if data.extra_lengths_option else {}


def differences(trace: Mapping[str, Any], fresh: Mapping[str, Any]) -> list[str]:
    """Return one line for every cell of a file's trace whose attempts differ from those of a fresh trace.

    A cell that the fresh trace lacks differs. Cells that only the fresh trace has are not reported. A trace without
    cells gives no lines.

    Args:
        trace: Trace of the file.
        fresh: Trace of the table or figure as built now.
    """
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
    """Return the trace as one line of JSON that contains nothing that could end an HTML comment."""
    text = json.dumps(table.trace, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def parse_trace_comment(written: str) -> Any:
    """Return the trace of the last comment that carries one; None where none does.

    Raises:
        ValueError: The comment is not JSON.
    """
    traces = LINE.findall(written)
    return json.loads(traces[-1]) if traces else None


def sources_text(table: Table) -> str:
    """Return the sentence that summarizes the trace: number, lowest and highest id, commits and GPUs of attempts.

    Without attempts it says that there are none.
    """
    sources = table.trace.get("sources", ())
    attempts = [attempt for source in sources for attempt in source["attempts"]]
    if not attempts:
        return "Trace: this table is not based on any attempt."
    source_texts = []
    for source in sources:
        changed = " with changes" if source["dirty"] else ""
        commit = f"commit {source['commit'][:12]}{changed}" if source["commit"] else "commit not recorded"
        source_texts.append(" on ".join(filter(None, (commit, source["gpu"]))))
    several = f"{counted(len(attempts), 'attempt')}, {min(attempts)} to {max(attempts)}"
    which = several if len(attempts) > 1 else f"attempt {attempts[0]}"
    return f"Trace: {which} ({'; '.join(dict.fromkeys(source_texts))})."
