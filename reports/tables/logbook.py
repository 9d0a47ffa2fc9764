"""Tables about the attempts themselves: which did not finish, and where the numbers of the others come from."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime

from ...results.store.records import Attempt, Provenance
from ...results.store.store import Store
from ..data import Entry, Table, gather
from ..stats.audit import homogeneity
from .layout import Line, assemble, sweep_note

SHORT = 12  # letters of a commit or a fingerprint
PACKAGES = ("torch", "triton", "fla-core", "numpy")


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment is not None else "-"


def failures(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Every attempt of the sweep's cells that failed, diverged or was interrupted, oldest first, with its cause."""
    data = gather(store, sweep, revision=revision)
    cells = {cell.cell_id: cell for cell in data.cells}
    lines = []
    for attempt in store.attempts_of(cells):
        if attempt.state in ("failed", "diverged", "interrupted"):
            lines.append(_failure(attempt, cells[attempt.cell_id].slug, data.standing(cells[attempt.cell_id])))
    count = f"{len(lines)} attempts did not finish" if lines else "Every attempt that ended finished"
    headings = ("Cell", "Attempt", "State", "Class", "Cell now", "Started (UTC)", "Host", "Step", "Exit", "Cause")
    title = f"Failures, sweep {data.sweep}, revision {data.revision}"
    sources = store.sources([int(line.about["attempt_id"]) for line in lines])
    return assemble(data, "failures", title, headings, lines, notes=[sweep_note(data), f"{count}."], sources=sources)


def _failure(attempt: Attempt, slug: str, now: str) -> Line:
    step = f"{attempt.step}/{attempt.steps_total}" if attempt.steps_total else str(attempt.step)
    words = (
        slug,
        f"{attempt.number} ({attempt.kind})",
        attempt.state,
        attempt.failure or "-",
        now,
        _moment(attempt.started_at),
        attempt.host,
        step,
        "-" if attempt.exit_code is None else str(attempt.exit_code),
        attempt.cause or "-",
    )
    about = {
        "cell": attempt.cell_id,
        "attempt_id": attempt.id,
        "state": attempt.state,
        "failure": attempt.failure,
        "cause": attempt.cause,
    }
    return Line(
        words=words,
        origins=((attempt.cell_id, attempt.id),),
        about=about | {"traceback": attempt.traceback, "exit_code": attempt.exit_code},
    )


def _origin(one: Provenance) -> tuple[str, ...]:
    commit = (one.git_commit or "-")[:SHORT] + (" with changes" if one.git_dirty else "")
    software = ", ".join(f"{name} {one.packages[name]}" for name in PACKAGES if name in one.packages) or "-"
    kernels = ", ".join(f"{name}: {path}" for name, path in sorted(one.kernels.items())) or "-"
    return (
        commit,
        one.gpu_name or one.device or "-",
        one.driver or "-",
        one.dtype or "-",
        one.python or "-",
        software,
        kernels,
        one.tokenizer or "-",
        f"{one.corpus} {one.corpus_fingerprint[:SHORT]}".strip() or "-",
    )


def provenance(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Where the numbers come from: a row for every combination of code, machine and software, with its cells."""
    data = gather(store, sweep, revision=revision)
    pairs = {(key[0], value.attempt_id) for key, value in data.values.items()}
    known = store.provenances({attempt for _, attempt in pairs})
    groups: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for cell, attempt in sorted(pairs, key=lambda pair: pair[1]):
        if attempt in known:
            groups[_origin(known[attempt])].append((cell, attempt))
    lines = []
    for words, found in groups.items():
        origins = tuple(found)
        count = len({cell for cell, _ in found})
        entries = (
            Entry(text=str(count), heading="Cells", value=float(count), origins=origins),
            Entry(text=str(len(found)), heading="Attempts", value=float(len(found)), origins=origins),
        )
        lines.append(Line(words=words, entries=entries))
    audit = homogeneity(store, data.sweep, revision=data.revision)
    notes = [sweep_note(data), *(f"{line}." for line in audit or ["Nothing differs between the cells but their axes"])]
    headings = ("Commit", "GPU", "Driver", "Precision", "Python", "Software", "Kernels", "Tokenizer", "Corpus")
    title = f"Provenance, sweep {data.sweep}, revision {data.revision}"
    return assemble(data, "provenance", title, headings, lines, numbers=("Cells", "Attempts"), notes=notes)
