"""The table `provenance`: the code, machine and software that the numbers come from."""

from __future__ import annotations

from collections import defaultdict

from ...results.store.records import Provenance
from ...results.store.store import Store
from ..stats.audit import homogeneity
from ..sweep_data import gather, provenances_of_attempts
from ..table import Entry, Table
from ..table_builder import Line, assemble, sweep_note

SHORT = 12  # letters of a commit or a fingerprint
PACKAGES = ("torch", "triton", "fla-core", "numpy")


def provenance(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Where the numbers come from: a row for every combination of code, machine and software, with its cells."""
    data = gather(store, sweep, revision=revision)
    pairs = {(key[0], value.attempt_id) for key, value in data.shown.items()}
    known = provenances_of_attempts(store, {attempt for _, attempt in pairs})
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
