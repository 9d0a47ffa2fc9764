"""Downstream tasks: questions of lm-evaluation-harness as a probe (docs/how-to/evaluate-downstream-tasks.md).

The tasks of a grid or an evaluation name the metrics, so only a few of these are declared in results/metrics.csv.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from ...model.bounds import MAX_COUNT, MAX_SHOTS
from ...model.config import Int, knob
from ...results import metrics
from ...results.errors import PackageMissing
from ...results.metrics import SAMPLES
from .base import Probe, ProbeConfig, Result

if TYPE_CHECKING:
    from .subject import Subject

TOKENS_PER_TASK = 100_000
"""Assumed tokens of a task, for estimates of cost."""
MODULE = "lm_eval"
"""Package of lm-evaluation-harness."""


class DownstreamConfig(ProbeConfig):
    """Settings of the probe downstream."""

    tasks: tuple[str, ...] = knob((), "Tasks, groups or tags of lm-evaluation-harness, by name.")
    include_path: str | None = knob(
        None,
        "Absolute path of a folder with further task files (YAML); relative paths of data start in it; null: none.",
    )
    shots: Int | None = knob(None, "Solved examples before each question; null: as the task says.", ge=0, le=MAX_SHOTS)
    limit: Int | None = knob(None, "Number of questions of each task, the first ones; null: all.", ge=1, le=MAX_COUNT)
    samples: bool = knob(
        False, "Keep what the model was asked and answered, question by question, in a file per task (JSON Lines)."
    )


def load_harness() -> ModuleType:
    """Import and return the module that measures tasks (`harness`).

    Raises:
        PackageMissing: lm-evaluation-harness is not installed.
    """
    try:
        from . import harness
    except ModuleNotFoundError as error:
        raise PackageMissing(error.name or MODULE) from error
    return harness


class Downstream(Probe):
    """Scores of the tasks in `settings.tasks`, by lm-evaluation-harness.

    The network reads each question as a document, with the attention window of training.
    """

    Config = DownstreamConfig
    metrics = metrics.metrics_of_probe("downstream")[:1]
    of_any = True
    packages: ClassVar[tuple[str, ...]] = (MODULE,)

    def tokens(self, length: int) -> int:
        """Return a fixed number of tokens per task, because questions are only known once they are loaded."""
        return TOKENS_PER_TASK * max(1, len(self.settings.tasks))

    def run(self, subject: Subject, lengths: Iterable[int]) -> Iterator[Result]:
        """Yield the measurements of all tasks for each length, without examples; lengths have no effect.

        The first measurement is the number of tasks. A task that cannot be measured has a reason instead of its value.

        Raises:
            PackageMissing: lm-evaluation-harness is not installed.
        """
        for _ in lengths:
            if not self.settings.tasks:
                yield [self.missing("n/a: no tasks; list some in eval.settings.downstream.tasks")], []
                continue
            options = self.settings.model_dump(include={"include_path", "shots", "limit"})
            folder = subject.folder / SAMPLES if subject.folder is not None and self.settings.samples else None
            scores = load_harness().measure_tasks(
                subject, self.name, self.settings.tasks, samples_folder=folder, **options
            )
            n_measured = sum(score.value is not None and not score.metric.endswith("_stderr") for score in scores)
            reason = next((score.reason for score in scores if score.reason), "n/a: no task has a number")
            total = self.value("tasks", float(len(self.settings.tasks))) if n_measured else self.missing(reason)
            yield [total, *scores], []
