"""Failure classes of attempts, each with its meaning and the retry policy of a launch.

The column `attempt.failure` holds their names. Retries, the validation of bundles and docs/reference/failures.md read this
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
    """The policy in words, for docs/reference/failures.md."""
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
        reaction="resumes from its checkpoint, without limit while it gains steps between deaths",
        tries=None,
    ),
    "node_lost": FailureClass(
        meaning="its node was lost (cluster)", reaction="resumes on another node, without limit", tries=None
    ),
    "infrastructure": FailureClass(
        meaning="full or failing disk, ECC or NCCL error, lost GPU, unreachable database",
        reaction="three tries, 5 and 10 s apart",
        tries=3,
        wait_s=5.0,
    ),
    "host_oom": FailureClass(
        meaning="killed because memory ran out", reaction="one more try, alone on the machine", tries=2, alone=True
    ),
    "cuda_oom": FailureClass(
        meaning="CUDA out of memory",
        reaction="one more try with half the micro-batch and twice the accumulation if `resources.on_cuda_oom: halve`, "
        "recorded as a deviation; otherwise none",
        tries=2,
        smaller=True,
    ),
    "diverged": FailureClass(meaning="a loss that is not finite", reaction="none: divergence is a result"),
    "code": FailureClass(
        meaning="any other exception; a crash of the interpreter is `infrastructure`",
        reaction="none; three cells with the same error stop the sweep",
    ),
    "hang": FailureClass(
        meaning="no progress for `resources.hang_minutes`",
        reaction="killed, after writing the stacks of its threads to the log; three tries",
        tries=3,
    ),
    "pruned": FailureClass(
        meaning="a study ended the trial early",
        reaction="none: not a failure; a factorial grid with that cell resumes it",
    ),
}
