"""The table `claims`: the sentences of the paper, and of its rivals', against the numbers of a sweep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ...results.store.store import Store
from ..stats.claims.paper_claims import SILENT, Facts
from ..stats.claims.rival_claims import sentences
from ..stats.significance.paired_tests import ALPHA
from ..sweep_data import Lengths, gather
from ..table import Table
from ..table_builder import Line, assemble, sweep_note
from .plain_cells import titled

ABOUT = (
    "Every verdict is worked out from the numbers of this sweep. 64K stands for its longest context length. Weak: of the test of "
    f"signs and Student's t one alone is below {ALPHA}; not shown: neither. Differs: the sweep has another number. Not asked: "
    "neither a cell that is compared nor the mean of a side answers more of the needle's digits than always the same digit does by more "
    "than chance (5% over all cells, and over all means). Needle in %, losses in nats per token."
)


def claims_table(
    store: Store, sweep: str | None = None, *, revision: int | None = None, lengths: Lengths = None
) -> Table:
    """The sentences of the paper, each with a verdict and the numbers that decide it; of what a sweep has no cell for, that."""
    data = gather(store, sweep, revision=revision, lengths=lengths)
    lines = []
    counts: Counter[str] = Counter()
    asked = sentences(Facts(data))
    for claim in asked:
        facts = Facts(data)
        answer = claim.asked_of(facts)
        silent = answer.verdict == SILENT
        counts["cannot be said" if silent else answer.verdict] += 1
        about = {"claim": claim.name, "verdict": answer.verdict, "numbers": dict(answer.numbers)}
        origins = () if silent else tuple(facts.read)
        words = (claim.sentence, answer.verdict, answer.told)
        lines.append(Line(words=words, origins=origins, about=about))
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    notes = [sweep_note(data), f"{len(asked)} sentences: {told}.", ABOUT]
    title = titled("claims", "Sentences of the paper against the numbers", data)
    made = assemble(data, "claims", title, ("Sentence", "Verdict", "Numbers"), lines, notes=notes)
    return replace(made, paged=True)
