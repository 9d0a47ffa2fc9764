"""What a running attempt writes with, whether it reaches the database or leaves a file for somebody who does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .records import AttemptState, CurvePoint, Example, Measurement, Phase, Provenance


class AttemptWriter(Protocol):
    """Writes for one attempt, from the process that runs it.

    Writing the same thing twice changes nothing, and a value written later under the same key replaces the earlier one.
    An attempt that was finished, reaped or taken over writes nothing more but events: LostLease is raised, by whoever
    writes into the database; so a Recorder raises it at the call, and a journal's Reader when it applies the line.
    Numbers that are not finite become NULL. Strings lose what a database cannot hold. Times are the database's own.
    """

    def set_process(self, pid: int, started: float, *, host: str | None = None, space: str | None = None) -> None:
        """Names the process that runs the attempt, as an Owner has it; without `host` that of the attempt stays."""

    def heartbeat(self) -> None:
        """Says that the attempt lives."""

    def settle(self) -> None:
        """Returns when all that was written so far would survive a power cut.

        To be called before a checkpoint is written, or its curve could have a hole that no one notices; and so before
        older checkpoints go, those of an earlier attempt included, which would be the only ones that the database knows.
        """

    def provenance(self, provenance: Provenance) -> None:
        """Where the numbers come from; once, before the first of them."""

    def neighbours(self) -> None:
        """Counts the attempts that were on this one's GPU since it started, into its provenance; without a GPU nothing.

        Those that come later are counted when it is called again, so call it last of all, too.
        """

    def progress(
        self,
        step: int,
        steps_total: int | None = None,
        loss: float | None = None,
        tokens_per_s: float | None = None,
        phase: Phase | None = None,
    ) -> None:
        """How far the attempt is: `loss` in nats per token. None leaves a column as it is; a NaN loss clears it."""

    def curve(self, points: Sequence[CurvePoint]) -> None:
        """Points of the training curve."""

    def inherit_curve(self, from_attempt: int, up_to_step: int) -> None:
        """Copies the curve of the attempt that this one resumes, and its samples, up to and including the step of the checkpoint.

        What this attempt already has stays.
        """

    def last_point(self) -> CurvePoint | None:
        """The point of this attempt's curve with the highest step; None without any, or where it is not known here."""

    def measurements(self, measurements: Sequence[Measurement]) -> None:
        """Numbers of a probe. A NaN or infinite value is stored as NULL with the reason `nan: ...` or `inf: ...`."""

    def examples(self, examples: Sequence[Example]) -> None:
        """Outcomes item by item."""

    def checkpoint(self, path: str) -> None:
        """Names the newest checkpoint that can be resumed from: a path relative to the runs folder, or a full address.

        Durable when this returns, so that those of earlier attempts may go.
        """

    def event(self, kind: str, message: str) -> None:
        """Notes something about the attempt for people; also after it has finished."""

    def finish(
        self,
        state: AttemptState,
        *,
        cause: str | None = None,
        traceback: str | None = None,
        exit_code: int | None = None,
        weights: str | None = None,
        failure: str | None = None,
    ) -> None:
        """Ends the attempt, durably; from then on it is read-only. None leaves a column as it is.

        Raises ValueError for the state `running`.
        """
