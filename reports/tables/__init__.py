"""Tables of the appendix, built from the database: each is a function in the file of its family.

`make_table("6", store)` builds one, `render.render(table, "tex")` writes it. Tables are known by number (as the
paper's first version counts; the second version's numbers are v2:1 to v2:8) or by name. A new table is a function of
store and data in a file of this package, such as table5, and a line in TABLES.

Only reports/ imports it. Start at complete.py, Table 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...results.exchange.installed_parts import SpecRegistry, running_part
from ..report_spec import ReportSpec, check_spec

if TYPE_CHECKING:
    from ...results.store.store import Store
    from ..table import Table

LOSSES = ("clean", "junk", "needle")
TABLES: SpecRegistry[ReportSpec] = SpecRegistry("tables", {
    "1": ReportSpec("paper_tables:table1", "attention alone, over context lengths", probes=LOSSES),
    "2": ReportSpec("paper_tables:table2", "effect of memory over context lengths", probes=LOSSES),
    "3": ReportSpec("paper_tables:table3", "window and distractor on top of memory", probes=LOSSES),
    "4": ReportSpec("paper_tables:table4", "training throughput", number="v2:6", takes=(), probes=("throughput",)),
    "5": ReportSpec("paper_tables:table5", "regularizer modes", number="v2:7", takes=(), needs_audit_note=False),
    "6": ReportSpec("complete:table6", "complete results", number="v2:8", takes=("lengths", "seeds", "orphans")),
    "open-weight": ReportSpec(
        "open_weight:open_weight_table",
        "comparison with open-weight models, bits per token",
        number="v2:5",
        probes=LOSSES,
        needs_all_cells=True,
    ),
    "budgets": ReportSpec(
        "open_weight:training_budgets_table",
        "training budgets",
        number="v2:4",
        takes=(),
        needs_audit_note=False,
        needs_all_cells=True,
    ),
    "budget": ReportSpec(
        "run_records:predicted_hours_table",
        "predicted and actual GPU-hours (core-hours on the CPU)",
        takes=(),
        needs_audit_note=False,
        needs_all_cells=True,
    ),
    "flipflop": ReportSpec("task_tables:flipflop_table", "the flip-flop task", takes=(), probes=("flipflop",)),
    "mqar": ReportSpec("task_tables:associative_recall_table", "associative recall", takes=(), probes=("mqar",)),
    "mad": ReportSpec("task_tables:mad_table", "MAD's six synthetic tasks and their mean", takes=(), probes=("mad",)),
    "extrapolation": ReportSpec(
        "task_tables:extrapolation_table", "perplexity over context lengths", probes=("extrapolation",)
    ),
    "downstream": ReportSpec(
        "task_tables:downstream_table", "downstream tasks", takes=(), probes=("downstream",)
    ),
    "effects": ReportSpec(
        "effects:effects_table", "effect of each factor, by matched pairs", takes=("lengths", "all_rows")
    ),
    "interactions": ReportSpec(
        "effects:interactions_table", "two-way and three-way interactions", takes=("lengths", "all_rows")
    ),
    "contrasts": ReportSpec("effects:contrasts_table", "contrasts declared by the grid", needs_all_cells=True),
    "power": ReportSpec("power:power_table", "required sample size and detectable difference"),
    "items": ReportSpec("items:items_table", "effects tested per document, row and trial"),
    "anova": ReportSpec("anova:anova_table", "type-III analysis of variance"),
    "needle-model": ReportSpec("anova:needle_model_table", "binomial model of needle accuracy", probes=("needle",)),
    "pareto": ReportSpec("pareto:pareto_table", "quality against speed", probes=("throughput",)),
    "study": ReportSpec(
        "study:study_table",
        "best trials of a study and their cost",
        takes=("all_rows",),
        needs_audit_note=False,
        study=True,
        needs_all_cells=True,
    ),
    "failures": ReportSpec(
        "run_records:failures_table", "attempts that did not finish", takes=(), needs_audit_note=False
    ),
    "provenance": ReportSpec(
        "run_records:provenance_table",
        "code, software and hardware behind the numbers",
        takes=(),
        needs_audit_note=False,
    ),
    "claims": ReportSpec("compare:claims_table", "check of the papers' claims"),
    "compare": ReportSpec(
        "compare:compare_table",
        "measured and published numbers compared",
        takes=("lengths", "reference", "table"),
        needs_all_cells=True,
    ),
}, check_spec)  # fmt: skip
"""Specification by number or name: the function, what the table shows, its options, and whether it compares
numbers.
"""


SECOND_VERSION = dict(
    sorted(
        [
            *((f"v2:{n}", str(n)) for n in (1, 2, 3)),
            *((line.number, name) for name, line in TABLES.own.items() if line.number),
        ]
    )
)
"""Name in TABLES by number in the paper's second version; its first three tables are those of the first version."""


def table_name(word: str) -> str:
    """Return the key in TABLES for a name in any case, or for a number of the paper's second version such as "v2:6".

    An unknown word is returned unchanged; no error is raised.
    """
    lower = word.lower()
    return SECOND_VERSION.get(lower, lower if lower in TABLES else word)


def make_table(number: str | int, store: Store, sweep: str | None = None, **options: Any) -> Table:
    """Return a table of a sweep, with the cautions of the homogeneity audit above it where it compares numbers.

    Args:
        number: Number or name of the table, in any case: "6", "effects", or "v2:8" as the second version counts.
        store: The database.
        sweep: Name of the sweep; None: the one launched last.
        options: Options of the table's function, such as `seeds` or `all_rows`; they are passed on unfiltered
            (`ReportSpec.select_options` drops those that a table does not take). In addition `revision` (None: the
            newest), `lengths` (context lengths in tokens to show beyond those of the launch; for table 6 also a mapping
            of lengths by probe that replaces them) and `only` (filters such as "recipe=intended"; cells must pass all
            of them).

    Raises:
        ReportError: The name is unknown, `lengths` are given for a table without context lengths, `only` for one that
            needs all cells of the sweep, or the table's function raises it.
        TypeError: The table's function does not take an option, even if it is None or False.
        InstalledPartError: The table is one of an installed package, and fails.
        SweepUnknown, StoreError: The sweep cannot be read.
    """
    # imported late: the help of the command line needs TABLES alone, not the modules that read the database
    from ...results.console.text import choices_hint
    from .. import cell_filter
    from ..stats.audit import audit_differences
    from ..sweep_data import ReportError, load_sweep_data
    from ..table import Table

    name = table_name(str(number))
    if name not in TABLES:
        second = f"v2:{name}"
        there = (
            f"; table {number} of the paper's second version is {second}, here {SECOND_VERSION[second]}"
            if second in SECOND_VERSION
            else ""
        )
        raise ReportError(f"unknown table {number}{there}; {choices_hint(name, [*TABLES, *SECOND_VERSION])}")
    line = TABLES[name]
    lengths, revision = options.pop("lengths", None), options.pop("revision", None)
    if "lengths" not in line.takes and lengths:
        raise ReportError(f"table {name} has no context lengths; remove --length")
    only = options.pop("only", None) or ()
    if only and line.needs_all_cells:
        raise ReportError(f"table {name} needs all cells of a sweep; remove --only")
    if isinstance(lengths, Mapping):
        # lengths by probe are an option of the complete results, not extra lengths of the data
        options, lengths = {**options, "lengths": lengths}, None
    with cell_filter.filtered_cells(store.revision(sweep, revision).sweep, only):
        data = load_sweep_data(store, sweep, revision=revision, orphans=options.get("orphans", False), lengths=lengths)
        with running_part("tables", name, line.package):
            table = line.load(__package__)(store, data, **options)
            if not isinstance(table, Table):
                raise TypeError(f"it returned a {type(table).__name__}, not a Table")
        audit = (
            audit_differences(store, data.sweep, revision=data.revision, lengths=data.extra_lengths_option)
            if line.needs_audit_note
            else ()
        )
    return replace(table, above=(*table.above, f"Before comparing: {'; '.join(audit)}.")) if audit else table
