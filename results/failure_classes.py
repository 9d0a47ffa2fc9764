"""Failure classes of attempts, each with its meaning and the retry policy of a launch.

The column `attempt.failure` holds their names. Retries, the validation of bundles and docs/robustness.md read this
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Failure = Literal[
    "preempted", "node_lost", "infrastructure", "host_oom", "cuda_oom", "diverged", "code", "hang", "pruned"
]
PREEMPTED: Failure = "preempted"
"""Class of an attempt whose process is gone without a report."""
PRUNED: Failure = "pruned"
"""Class of an attempt that a study ended early; also the state of its cell."""


@dataclass(frozen=True, kw_only=True)
class FailureClass:
    """A failure class and its retry policy."""

    meaning: str
    reaction: str
    """The policy in words, for docs/robustness.md."""
    tries: int | None = 1
    """Maximum number of attempts of a cell within one launch; None for no limit."""
    alone: bool = False
    """True if the next try runs alone on the machine."""
    smaller: bool = False
    """True if the next try halves the micro-batch, provided that the cell allows it."""
    wait_s: float = 0.0
    """Seconds before the second try; doubled for each further one."""


FAILURES: Mapping[Failure, FailureClass] = {
    "preempted": FailureClass(
        meaning="killed from outside",
        reaction="goes on from its checkpoint, without end as long as it gains steps between deaths",
        tries=None,
    ),
    "node_lost": FailureClass(
        meaning="its node is away (a cluster)", reaction="goes on elsewhere, without end", tries=None
    ),
    "infrastructure": FailureClass(
        meaning="full or failing disk, ECC, NCCL, a GPU that is gone, a database that is away",
        reaction="three tries, 5 and 10 s apart",
        tries=3,
        wait_s=5.0,
    ),
    "host_oom": FailureClass(
        meaning="killed for want of memory", reaction="once more, with the machine to itself", tries=2, alone=True
    ),
    "cuda_oom": FailureClass(
        meaning="CUDA out of memory",
        reaction="once more with half the micro-batch and twice the accumulation if `resources.on_cuda_oom: halve`, "
        "marked as a deviation; else none",
        tries=2,
        smaller=True,
    ),
    "diverged": FailureClass(meaning="a loss that is not finite", reaction="none: it is a result"),
    "code": FailureClass(
        meaning="any other exception, a crash of the interpreter aside (`infrastructure`)",
        reaction="none; three cells that fail alike stop the sweep",
    ),
    "hang": FailureClass(
        meaning="nothing new for `resources.hang_minutes`",
        reaction="its threads' stacks into the log, killed, three tries",
        tries=3,
    ),
    "pruned": FailureClass(
        meaning="a [study](studies.md) ended the trial early",
        reaction="none: no failure; an ordinary grid with that cell has it go on",
    ),
}
