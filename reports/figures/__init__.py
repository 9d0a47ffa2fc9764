"""Figures of the appendix, built from the database: each collects a tidy frame and draws it, in a file of its own.

`make_figure("needle", store)` collects, `files.rendered(figure_data, "svg")` draws. By number: 1 needle accuracy, 2a
count map, 2b state norm. A new figure is a file of this package with `collect` and `draw` as in needle.py, and a line
in FIGURES.

Only reports/ imports it. Start at needle.py, the shortest complete figure; canvas/ holds what figures share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...results.exchange.installed_parts import SpecRegistry, running_part
from ..report_spec import ReportSpec, check_spec

if TYPE_CHECKING:
    from ...results.store.store import Store
    from ..sweep_data import ExtraLengths
    from .canvas.base import FigureData

LINES, CELLS = ("lengths", "highlight"), ("highlight",)
FIGURES: SpecRegistry[ReportSpec] = SpecRegistry("figures", {
    "needle": ReportSpec("needle", "needle accuracy over context length", number="1", takes=LINES),
    "count-map": ReportSpec("count_map", "output magnitude of m equally weighted keys in polar attention", number="2a", takes=()),
    "state-norm": ReportSpec("state_norm", "norm of the memory state over context length", number="2b"),
    "length": ReportSpec("length", "clean and junk loss over context length", takes=LINES),
    "position-nll": ReportSpec("probes.position_nll", "loss by position in the document", takes=LINES),
    "texts": ReportSpec("probes.texts", "loss and needle accuracy on further long texts", takes=LINES),
    "passkey": ReportSpec("probes.passkey", "passkey accuracy by depth and context length", takes=LINES),
    "retention": ReportSpec("probes.retention", "half-life of gated state in mixers and memories", takes=CELLS),
    "gate-dynamics": ReportSpec("probes.gate_dynamics", "retention of gates by position, channel and token", takes=CELLS),
    "evictable-keys": ReportSpec("gates.evictable_keys", "share of keys of which gates leave less than a threshold, by length", takes=CELLS),
    "attention-map": ReportSpec("probes.attention_map", "attention maps of a short text", takes=CELLS),
    "extrapolation": ReportSpec("probes.extrapolation", "perplexity by window length", takes=LINES),
    "memory-recall": ReportSpec("probes.memory_recall", "recall of key-value pairs by memories and networks", takes=CELLS),
    "downstream": ReportSpec("probes.downstream", "scores of downstream tasks", takes=CELLS, probes=("downstream",)),
    "recall-state": ReportSpec("probes.recall_state", "associative recall by bytes of state, a line per mixer", takes=CELLS),
    "loss": ReportSpec("loss", "validation and training loss over tokens or time", takes=("by", "log", "against", "compare", "highlight")),
    "response": ReportSpec("response", "response to an axis with numeric levels", takes=("lengths", "by", "highlight")),
    "effects": ReportSpec("comparisons.effects", "effect of each factor, with intervals"),
    "interactions": ReportSpec("comparisons.interactions", "interactions of two factors, with intervals"),
    "power": ReportSpec("comparisons.power", "detectable difference by sample size"),
    "seeds": ReportSpec("comparisons.seeds", "run-to-run variation between replicates"),
    "items": ReportSpec("comparisons.items", "needle accuracy by trial"),
    "pareto": ReportSpec("pareto", "quality against training speed or time", takes=LINES),
    "timeline": ReportSpec("timeline", "attempts over time, by machine", takes=()),
    "history": ReportSpec("studies.history", "trials of a study and the best so far", takes=(), study=True),
    "importance": ReportSpec("studies.importance", "importance of each setting of a study", takes=("evaluator",), study=True),
    "slices": ReportSpec("studies.slices", "objective of a study over each setting", takes=(), study=True),
    "contours": ReportSpec("studies.contours", "objective of a study over pairs of settings", takes=(), study=True),
    "parallel": ReportSpec("studies.parallel", "parallel coordinates of the trials of a study", takes=(), study=True),
    "front": ReportSpec("studies.front", "Pareto front of a study with several objectives", takes=(), study=True),
}, check_spec)  # fmt: skip
"""Specification by name: the file, what the figure shows, its number in the paper, and the options that it takes."""


def figure_name(name: str) -> str:
    """Return the key in FIGURES for a name, in any case, or number (as in the paper) of a figure.

    Raises:
        ReportError: There is no such figure.
    """
    # imported late: the help of the command line needs FIGURES alone, not the modules that read the database
    from ...results.console.text import choices_hint
    from ..sweep_data import ReportError

    numbers = {line.number: figure for figure, line in FIGURES.items() if line.number}
    key = numbers.get(name.lower(), name.lower())
    if key not in FIGURES:
        raise ReportError(f"unknown figure {name}; {choices_hint(key, [*numbers, *FIGURES])}")
    return key


def make_figure(
    name: str,
    store: Store,
    sweep: str | None = None,
    *,
    revision: int | None = None,
    lengths: ExtraLengths = None,
    options: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
) -> FigureData:
    """Return the data of a figure of a sweep, without drawing it.

    Args:
        name: Name or number of the figure.
        store: The database.
        sweep: Name of the sweep; None: the one launched last.
        revision: Revision of the sweep; None: the newest.
        lengths: Context lengths to show in addition to those of the launch.
        options: Options that only some figures take (by, log, against, compare, evaluator), as their `collect` says.
            None and other false values count as not given.
        only: Filters such as "recipe=intended"; cells must pass all of them.

    Raises:
        ReportError: The name is unknown, the figure does not take an option, lengths or filters, a filter is not valid,
            or the data cannot give the figure.
        SweepUnknown, StoreError: The sweep cannot be read.
        InstalledPartError: The figure is one of an installed package, and fails.
    """
    from ...results.paper import is_published
    from .. import cell_filter
    from ..sweep_data import ReportError, load_sweep_data
    from .canvas.base import FigureData

    figure = figure_name(name)
    line = FIGURES[figure]
    if lengths and "lengths" not in line.takes:
        raise ReportError(f"figure {figure} has no context lengths; remove --length")
    set_options = {option: value for option, value in (options or {}).items() if value}
    for option in set_options:
        if option not in line.takes:
            having = [name for name, spec in FIGURES.items() if option in spec.takes]
            takers = f"figures that do: {', '.join(having)}" if having else "no figure does"
            raise ReportError(f"figure {figure} takes no --{option}; {takers}")
    if only and line.study:
        raise ReportError(f"figure {figure} needs all trials of a study; remove --only")
    try:
        with cell_filter.filtered_cells(store.revision(sweep, revision).sweep, only):
            data = load_sweep_data(store, sweep, revision=revision, lengths=lengths)
            with running_part("figures", figure, line.package):
                figure_data = line.load(__package__).collect(store, data, **set_options)
                if not isinstance(figure_data, FigureData):
                    raise TypeError(f"collect returned a {type(figure_data).__name__}, not FigureData")
    except ReportError as error:
        if sweep is None or not is_published(sweep) or isinstance(error, cell_filter.CellFilterError):
            raise
        # a published sweep cannot be launched or evaluated, so the advice after the semicolon does not apply
        raise ReportError(f"{str(error).partition(';')[0]}; a published sweep has printed numbers only") from error
    return figure_data
