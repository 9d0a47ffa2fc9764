"""A difference and a price in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .cost_estimate import PARTS, Bill
from .difference import Change, GridDifference
from .speed_model import ThreePointEstimate

WORDS = {"needs-eval": "needs evaluation", "weights gone": "weights gone"}
MOST_LINES = 12
"""Of one kind, unless everything is asked for."""


def describe(difference: GridDifference, *, every: bool) -> Iterator[str]:
    """Groups of cells with their counts, the cells of each with `every`, then what changed."""
    for word, some in difference.groups.items():
        notes = {one.note for one in some} if word != "excluded" else set(difference.rules)
        note = "; ".join(sorted(notes - {""})) if len(notes) <= 3 else ""
        yield f"  {WORDS.get(word, word):<16} {len(some) if word != 'excluded' else sum(difference.rules.values()):>6}  {note}".rstrip()
        if every:
            yield from (f"    {one.id or '-':<12}  {one.slug}" + (f"  {one.note}" if one.note else "") for one in some)
    if difference.revision is None:
        yield "never launched before"
        return
    changes = [*difference.changes, *((f"{key} (by a base or a default)", a, b) for key, a, b in difference.inherited)]
    if not changes and not difference.axes:
        yield f"nothing changed since revision {difference.revision}"
        return
    yield f"changed since revision {difference.revision}:"
    yield from (f"  {sentence}" for sentence in difference.axes)
    shown = changes if every else changes[:MOST_LINES]
    yield from (f"  {key}: {_value(old)} -> {_value(new)}" for key, old, new in shown)
    if len(shown) < len(changes):
        yield f"  and {len(changes) - len(shown)} more, which --list shows"


def _value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"[{', '.join(map(_value, value))}]" if isinstance(value, list) else str(value)


def difference_json(difference: GridDifference) -> dict[str, Any]:
    """The same by names."""
    return {
        "groups": {word: [vars(one) for one in some] for word, some in difference.groups.items()},
        "excluded_by": dict(difference.rules),
        "revision": difference.revision,
        "changes": [_as_row(one, "grid") for one in difference.changes]
        + [_as_row(one, "inherited") for one in difference.inherited],
        "axes": list(difference.axes),
    }


def _as_row(one: Change, source: str) -> dict[str, object]:
    return {"key": one[0], "old": one[1], "new": one[2], "from": source}


# --- the price ----------------------------------------------------------------------------------------------------------


def short(bill: Bill) -> str:
    """One line: hours, end, source. Nothing to do costs nothing."""
    if not bill.groups:
        return "price: nothing is to do"
    finish = bill.finish
    times = f"{duration(finish.likely)} ({duration(finish.low)} to {duration(finish.high)})"
    money = f", {_amount(bill.money)} at {bill.rate:g} an hour" if bill.money is not None else ""
    return (
        f"price: {_amount(bill.hours)} {bill.unit}, through in {times} on {_where(bill)}{money}; "
        f"{_sources(bill.sources)}"
    )


def priced(bill: Bill, *, every: bool) -> Iterator[str]:
    """The whole price: by part, by what is alike, and what is taken for granted."""
    yield short(bill)
    if not bill.groups:
        return
    parts = ", ".join(f"{part} {_number(bill.parts[part].likely)}" for part in PARTS if bill.parts[part].high)
    yield f"  of these {bill.unit}: {parts}"
    if bill.kwh is not None:
        how = (
            "what a board takes at most, an assumption; --watts says another"
            if bill.assumed_watts
            else "as --watts says"
        )
        yield f"  energy: {_amount(bill.kwh)} kWh at {bill.watts:g} W a GPU ({how})"
    elif bill.unit == "core-hours":
        yield "  energy: not known of a CPU"
    else:
        yield f"  energy: not known of {bill.place}; --watts says what one takes"
    shown = bill.groups if every else bill.groups[:MOST_LINES]
    yield f"  {'hours':>10}  {'attempts':>8}  {'tokens/s':>10}  {'source':<10}  like"
    for group in shown:
        yield (
            f"  {_number(group.hours.likely):>10}  {group.attempts:>8}  {group.tokens_per_s:>10,.0f}  {group.source:<10}  "
            f"{group.slug}{'' if group.kind == 'train' else ' (evaluation)'}"
        )
    if len(shown) < len(bill.groups):
        yield f"  and {len(bill.groups) - len(shown)} more, which --list shows"
    for why in dict.fromkeys(group.silent for group in bill.groups if group.silent):
        yield f"  the price is too low where {why}; --calibrate times it"
    if "FLOPs" in bill.sources:
        yield (
            "  from FLOPs: the time is as likely too high as too low, by a factor of up to several; --calibrate times a few "
            "steps of each kind of cell on this machine"
        )


def _where(bill: Bill) -> str:
    if not bill.gpus:
        return bill.place
    return f"{bill.gpus} x {bill.place}" + (f" ({bill.how})" if bill.how else "")


def _sources(sources: Mapping[str, int]) -> str:
    words = {"measured": "as measured", "calibrated": "as calibrated", "FLOPs": "from FLOPs"}
    return ", ".join(f"{count} {words[word]}" for word, count in sources.items())


def _amount(span: ThreePointEstimate | None) -> str:
    assert span is not None
    return f"{_number(span.likely)} ({_number(span.low)} to {_number(span.high)})"


def _number(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"


def duration(seconds: float) -> str:
    """For people: 45 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
