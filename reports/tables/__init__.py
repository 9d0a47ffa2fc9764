"""The tables of the appendix, from the database: each is a function in a file of its family.

`make_table("6", store)` makes one, `render.render(table, "tex")` writes it. By number (as the paper's first version
counts; the second version's numbers are v2:1 to v2:8) or by name. A new table is a function of store and data in a file here, as table5, and
a line in TABLES.

Only reports/ imports it. Start at complete.py, Table 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..report_spec import ReportSpec

if TYPE_CHECKING:
    from ...results.store.store import Store
    from ..table import Table

LOSSES = ("clean", "junk", "needle")
TABLES: dict[str, ReportSpec] = {
    "1": ReportSpec("paper_tables:table1", "attention alone, over context lengths", of=LOSSES),
    "2": ReportSpec("paper_tables:table2", "what memory adds, over context lengths", of=LOSSES),
    "3": ReportSpec("paper_tables:table3", "window and distractor on top of memory", of=LOSSES),
    "4": ReportSpec("paper_tables:table4", "training throughput", number="v2:6", takes=(), of=("throughput",)),
    "5": ReportSpec("paper_tables:table5", "regularizer modes", number="v2:7", takes=(), compares=False),
    "6": ReportSpec("complete:table6", "complete results", number="v2:8", takes=("lengths", "seeds", "orphans")),
    "open-weight": ReportSpec(
        "open_weight:open_weight", "beside open-weight models, bits per token", number="v2:5", of=LOSSES, whole=True
    ),
    "budgets": ReportSpec(
        "open_weight:budgets", "training budgets", number="v2:4", takes=(), compares=False, whole=True
    ),
    "budget": ReportSpec(
        "run_records:budget", "predicted hours against those that it took", takes=(), compares=False, whole=True
    ),
    "flipflop": ReportSpec("task_tables:flipflop", "the flip-flop task", takes=(), of=("flipflop",)),
    "mqar": ReportSpec("task_tables:mqar", "associative recall", takes=(), of=("mqar",)),
    "extrapolation": ReportSpec("task_tables:extrapolation", "perplexity over context lengths", of=("extrapolation",)),
    "downstream": ReportSpec(
        "task_tables:downstream", "four questionnaires and their average", takes=(), of=("downstream",)
    ),
    "effects": ReportSpec(
        "effects:effects_table", "effect of every level, by matched pairs", takes=("lengths", "all_rows")
    ),
    "interactions": ReportSpec(
        "effects:interactions_table", "two-way and three-way interactions", takes=("lengths", "all_rows")
    ),
    "contrasts": ReportSpec("effects:contrasts_table", "the contrasts that the grid declares", whole=True),
    "power": ReportSpec("power:power_table", "pairs that a difference takes to be seen"),
    "items": ReportSpec("items:items_table", "effects by document, row and trial"),
    "anova": ReportSpec("anova:anova_table", "type-III analysis of variance"),
    "needle-model": ReportSpec("anova:needle_model_table", "binomial model of the needle, in trials", of=("needle",)),
    "pareto": ReportSpec("pareto:pareto_table", "quality against speed", of=("throughput",)),
    "study": ReportSpec(
        "study:study_table",
        "best trials of a study, and what they took",
        takes=("all_rows",),
        compares=False,
        study=True,
        whole=True,
    ),
    "failures": ReportSpec("run_records:failures", "attempts that did not finish", takes=(), compares=False),
    "provenance": ReportSpec("run_records:provenance", "where the numbers come from", takes=(), compares=False),
    "claims": ReportSpec("compare:claims_table", "sentences of the paper against the numbers"),
    "compare": ReportSpec(
        "compare:compare_table", "measured beside published", takes=("lengths", "reference", "table"), whole=True
    ),
}
"""By number or name: the function, what the table shows, the options that it takes, and whether it compares numbers."""


SECOND_VERSION = dict(
    sorted(
        [
            *((f"v2:{n}", str(n)) for n in (1, 2, 3)),
            *((line.number, name) for name, line in TABLES.items() if line.number),
        ]
    )
)
"""By number in the paper's second version, whose first three tables are those of the first: the name here."""


def table_name(word: str) -> str:
    """Return the name of a table by that name or by its number in the paper's second version; an unknown word as it is."""
    lower = word.lower()
    return SECOND_VERSION.get(lower, lower if lower in TABLES else word)


def make_table(number: str | int, store: Store, sweep: str | None = None, **options: Any) -> Table:
    """The table of that number or name; options as its function takes them.

    `lengths` adds context lengths to those that the launch asked for; `only`, filters such as "recipe=intended", keeps the cells
    that all of them let through. Raises ReportError for an unknown name, for lengths where none play a part, and for `only`
    where all cells do.
    """
    # with what reads the database only now: TABLES stands in the help of the command line
    from ...results.console.text import choices_hint
    from .. import cell_filter
    from ..stats.audit import homogeneity
    from ..sweep_data import ReportError, load_sweep_data

    name = table_name(str(number))
    if name not in TABLES:
        second = f"v2:{name}"
        there = (
            f"; in the paper's second version it is {second}, here {SECOND_VERSION[second]}"
            if second in SECOND_VERSION
            else ""
        )
        raise ReportError(f"there is no table {number}{there}; {choices_hint(name, [*TABLES, *SECOND_VERSION])}")
    line = TABLES[name]
    lengths, revision = options.pop("lengths", None), options.pop("revision", None)
    if "lengths" not in line.takes and lengths:
        raise ReportError(f"table {name} is not about context lengths; leave --length out")
    only = options.pop("only", None) or ()
    if only and line.whole:
        raise ReportError(f"table {name} is about all cells of a sweep together; leave --only out")
    if isinstance(lengths, Mapping):
        # lengths by probe, which the complete results take, are none besides
        options, lengths = {**options, "lengths": lengths}, None
    with cell_filter.only(store.revision(sweep, revision).sweep, only):
        data = load_sweep_data(store, sweep, revision=revision, orphans=options.get("orphans", False), lengths=lengths)
        made: Table = line.load(__package__)(store, data, **options)
        audit = homogeneity(store, data.sweep, revision=data.revision, lengths=data.beyond) if line.compares else ()
    return replace(made, above=(*made.above, f"Before comparing: {'; '.join(audit)}.")) if audit else made
