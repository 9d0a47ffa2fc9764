"""An executor whose attempts only say that they were made: what a supervisor and its sources decide, without any training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atma_sweep.results.store.recorder import DatabaseRecorder
from atma_sweep.results.store.records import Attempt, AttemptState, CurvePoint, Measurement
from atma_sweep.results.store.store import Store
from atma_sweep.sweep.attempt.job import Job
from atma_sweep.sweep.config import Resources

Loss = Callable[[Mapping[str, Any], int], float]
"""From a cell's config and its step to the validation loss there."""


class Killed(BaseException):
    """Ends whoever waits, as a kill would: nothing is cleaned up."""


class Machine:
    """Room for `room` attempts, each of which makes a step whenever it is waited for, and a validation with it.

    An attempt that was stopped goes on where it stood. After `lives` waits it dies with everything on it.
    """

    name, writes_directly = "fake", True

    def __init__(
        self,
        store: Store,
        room: int,
        *,
        steps: int = 3,
        loss: Loss = lambda config, step: 1.0,
        lives: int | None = None,
    ) -> None:
        self.store, self.room, self.last, self.loss, self.lives = store, room, steps, loss, lives
        self.running: dict[int, tuple[int, Mapping[str, Any]]] = {}
        self.stopped: set[int] = set()
        self.most = 0

    def fits(self, resources: Resources) -> bool:
        return len(self.running) < self.room

    def start(self, launch: Any) -> None:
        folder: Path = launch.runs / launch.folder
        job = Job.read(folder)
        done = max((self.store.attempt(earlier).step for earlier, _ in job.resume), default=0)
        for earlier, _ in job.resume:
            DatabaseRecorder(self.store, launch.attempt, job.fence).inherit_curve(earlier, done)
        self.running[launch.attempt] = done, job.config
        self.most = max(self.most, len(self.running))

    def wait(self, seconds: float) -> list[tuple[int, int]]:
        if self.lives is not None:
            self.lives -= 1
            if self.lives < 0:
                raise Killed
        return [(key, code) for key in list(self.running) if (code := self._step(key)) is not None]

    def _step(self, key: int) -> int | None:
        fence, (step, config) = self.store.attempt(key).fence, self.running[key]
        if key in self.stopped:
            return self._end(key, 143, "interrupted", "stopped on request")
        step += 1
        self.running[key] = step, config
        try:
            loss, writes = self.loss(config, step), DatabaseRecorder(self.store, key, fence)
        except ValueError as error:
            return self._end(key, 1, "failed", str(error), "code")
        if math.isnan(loss):
            return self._end(key, 0, "diverged", f"loss is NaN at step {step}", "diverged")
        writes.curve([CurvePoint(step=step, tokens=step, wall_s=1.0 * step, train_loss=loss, val_loss=loss)])
        writes.progress(step, self.last, phase="training")
        if step < self.last:
            return None
        writes.measurements([Measurement(probe="val", metric="val_loss", value=loss, unit="nats/token")])
        return self._end(key, 0, "done")

    def _end(
        self, key: int, code: int, state: AttemptState, cause: str | None = None, failure: str | None = None
    ) -> int:
        self.store.finish_attempt(key, self.store.attempt(key).fence, state, cause=cause, failure=failure)
        del self.running[key]
        return code

    def stop(self, attempt: Attempt) -> bool:
        self.stopped.add(attempt.id)
        return True

    def failure(self) -> None:
        return None


class Quiet:
    """A listener that hears nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None
