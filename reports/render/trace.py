"""The trace of a table, as its renderings carry it."""

from __future__ import annotations

import json
import re
from typing import Any

from ...results.console.text import counted
from ..table import Table

TRACE = "atma-sweep-trace:"
LINE = re.compile(rf"^(?:%|<!--) {TRACE} (?P<json>.*?)(?: -->)?$", re.MULTILINE)


def trace_text(table: Table) -> str:
    """The trace as JSON in one line that holds nothing a comment of HTML could end at."""
    text = json.dumps(table.trace, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("--", "-\\u002d")


def trace_in_comment(written: str) -> Any:
    """The trace in the last comment that has one, None without any. Raises ValueError where it is no JSON."""
    found = LINE.findall(written)
    return json.loads(found[-1]) if found else None


def sources_in_words(table: Table) -> str:
    """The trace in a few words, for people."""
    sources = table.trace.get("sources", ())
    attempts = [attempt for source in sources for attempt in source["attempts"]]
    if not attempts:
        return "Trace: no attempt stands behind this table."
    told = []
    for source in sources:
        commit = (
            f"commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}" if source["commit"] else ""
        )
        told.append(" on ".join(word for word in (commit or "no commit recorded", source["gpu"]) if word))
    which = (
        f"{counted(len(attempts), 'attempt')}, {min(attempts)} to {max(attempts)}"
        if len(attempts) > 1
        else f"attempt {attempts[0]}"
    )
    return f"Trace: {which} ({'; '.join(dict.fromkeys(told))})."
