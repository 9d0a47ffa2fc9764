"""The table `budgets`: what was trained for how long, of the open-weight models and of the sweep."""

from __future__ import annotations

from collections.abc import Iterable

from ...results import paper
from ...results.store.store import Store
from ..number_format import large, length_name, rounded
from ..sweep_data import ReportError, SweepData, gather
from ..table import Table
from ..table_builder import Line, assemble, sweep_note
from .external_models import MARK, External, externals
from .plain_cells import titled
from .printed_discrepancies import facts_of

ZETTA = 1e21


def budgets(store: Store, sweep: str | None = None, *, revision: int | None = None) -> Table:
    """Training budgets of the open-weight models as printed, and of the sweep's own: 6 x parameters x tokens FLOPs.

    A ZF is 1e21 floating-point operations.
    """
    data = gather(store, sweep, revision=revision)
    if paper.is_published(data.sweep) and data.sweep not in (paper.SWEEPS[1], paper.OPEN_WEIGHT):
        raise ReportError(f"{data.sweep} has no table of budgets; ask for --sweep {paper.SWEEPS[1]}")
    other_store = paper.with_published(store, paper.OPEN_WEIGHT)
    other = gather(other_store, paper.OPEN_WEIGHT)
    printed = {row["model"] for row in paper.rows("budgets")}
    lines = []
    for cell in other.cells:
        facts = facts_of(other_store, cell.cell_id)
        if facts["model"] in printed:
            words = tuple(facts[name] for name in ("model", "params", "train_tokens", "native_ctx", "train_flops"))
            lines.append(Line(words=words, cells=[cell], about=facts))
    lines += map(_external_budget, found := externals(store, data))
    if not paper.is_published(data.sweep):
        lines.append(_own_budget(store, data))
    title = titled("budgets", "Training budgets", data)
    notes = [sweep_note(data), "Training FLOPs: 6 x parameters x tokens; ZF: 1e21."]
    if found:
        notes.append(
            f"{MARK.strip()}: measured here; parameters counted, context as its config says, the rest as printed."
        )
    headings = ("Model", "Params", "Train tokens", "Native context", "Train FLOPs")
    return assemble(data, "budgets", title, headings, lines, notes=notes)


def _external_budget(one: External) -> Line:
    context = length_name(one.context) if one.context else "-"
    printed = [one.budget.get(name, "-") for name in ("train_tokens", "train_flops")]
    return Line(words=(one.label, one.params, printed[0], context, printed[1]), cells=[one.cell], about=one.about)


def _range(texts: Iterable[str], unit: str = "") -> str:
    """One text, or the first and the last of several; a shared unit is printed once."""
    found = list(dict.fromkeys(texts))
    return (f"{found[0]}–{found[-1]}" if len(found) > 1 else found[0] if found else "-") + (unit if found else "")


def _own_budget(store: Store, data: SweepData) -> Line:
    sizes = {key[0]: value.value for key, value in data.values.items() if key[1:3] == ("throughput", "parameters")}
    known = [(size, cell.tokens_total) for cell in data.cells if (size := sizes.get(cell.cell_id)) is not None]
    known.sort(key=lambda pair: pair[0] * pair[1])
    contexts = {store.cell(cell.cell_id).config.get("train", {}).get("seq_len") for cell in data.cells[:1]}
    flops = [rounded(6 * size * tokens / ZETTA, 4) for size, tokens in known]
    if known and not float(flops[-1]):
        flops = [f"{6 * size * tokens / ZETTA:.2e}" for size, tokens in known]
    words = (
        f"sweep {data.sweep}",
        _range(large(size) for size in sorted(size for size, _ in known)),
        _range(large(tokens) for tokens in sorted({cell.tokens_total for cell in data.cells})),
        _range(length_name(length) for length in contexts if length),
        _range(flops, " ZF"),
    )
    return Line(words=words, cells=list(data.cells), about={"model": words[0]})
