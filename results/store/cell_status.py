"""What a cell still lacks: the word that `status`, the planner and the tables show for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from .records import CellState

Standing = Literal[
    "new", "running", "done", "failed", "diverged", "interrupted", "pruned", "needs-eval", "weights gone"
]
Request = tuple[str, int]
"""(probe, context length; 0 when the probe is not about a length)."""


def missing(state: CellState, requested: Iterable[Request]) -> list[Request]:
    """Requested (probe, length) pairs that have neither a value nor a recorded reason, in the order asked."""
    have = {(probe, length) for probe, _, length in state.measured}
    return [request for request in requested if request not in have]


def standing(state: CellState, requested: Iterable[Request]) -> Standing:
    """Done means trained, with a value or a recorded reason at every requested (probe, length).

    A trained cell that lacks a measurement needs an evaluation; without kept weights it is `weights gone`. Those of a model
    from elsewhere are kept by others.
    """
    if state.state == "running" or state.trained_attempt_id is None:
        return state.state
    if not missing(state, requested):
        return "done"
    return "needs-eval" if state.weights or state.kind == "external" else "weights gone"


def requests_of(options: object) -> list[Request]:
    """The requested pairs that a launch stored with its revision."""
    found = options.get("requested", []) if isinstance(options, dict) else []
    return [(str(probe), int(length)) for probe, length in found]
