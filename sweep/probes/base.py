"""What a probe is: everything that a plan, an attempt and a report want to know of one kind of measurement, in one class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...model.config import Config
from ...results import metrics
from ...results.metrics import Metric
from ...results.store.records import Example, Measurement
from ..config import CellConfig, EvalConfig

if TYPE_CHECKING:
    from ..data.corpora import Corpus

Result = tuple[list[Measurement], list[Example]]
WHO = "{who}"
"""Stands in the sentence of `Probe.lack` for the probes that lack the text, with their verb."""


class ProbeConfig(Config):
    """Settings of a probe; add fields with `knob`. They are written under eval.settings.NAME and never enter an id."""


class Probe(ABC):
    """One kind of measurement; an instance is the probe with the settings of one cell.

    Plans ask it without loading torch, so a file of the package imports torch in `run` or below it, not at its top.
    """

    Config: ClassVar[type[Config]] = ProbeConfig
    metrics: ClassVar[tuple[Metric, ...]]
    """Every metric that `run` gives, the one that speaks for the others first."""
    more_of_others: ClassVar[tuple[Metric, ...]] = ()
    """What it gives besides of a model with a tokenizer of its own."""
    by_length: ClassVar[bool] = False
    """Measured at every context length of the cell, or once (length 0)."""
    of_any: ClassVar[bool] = False
    """It asks for losses and answers alone, so that it measures whatever gives them (`Subject`), a model from elsewhere too;
    else it measures networks of ours (`Network`)."""
    settings: Any
    """The cell's own, a `Config`."""

    def __init__(self, name: str, config: CellConfig) -> None:
        """Raises pydantic's ValidationError when a setting of the probe is wrong."""
        self.name, self.config = name, config
        self.settings = self.Config.model_validate(config.eval.settings.get(name, {}))

    @classmethod
    def settled(cls, settings: Any, config: EvalConfig) -> Any:
        """The settings as a launch writes them down; a probe whose defaults follow from the grid's section fills them in."""
        return settings

    # --- known beforehand -----------------------------------------------------------------------------------------

    @abstractmethod
    def tokens(self, length: int) -> int:
        """About how many tokens go through the network for one length, at least 1: what the probe costs."""

    def longest(self, corpus: Corpus) -> int | None:
        """The longest context length that the text allows, in tokens, 0 for none; None where the text sets no limit."""
        return None

    def validation_need(self, length: int) -> int:
        """Return the tokens of the validation split without which `lack` says that there are too few."""
        return 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """What the text lacks for that length and which setting asks for less, with WHO for the probe; None: nothing."""
        longest = self.longest(corpus)
        if longest is None or length <= longest:
            return None
        return f"the text, which {WHO}, allows lengths of {longest} tokens at most: lower eval.lengths"

    def inapplicable(self) -> str | None:
        """Why no network of this config can ever be measured, as the end of "cell ... "; None: it can."""
        return None

    def chance(self, metric: Metric) -> float | None:
        """What a trivial answer scores in this cell; the default is the same in every cell."""
        return metric.chance

    def description(self, metric: str) -> dict[str, Any] | None:
        """What is stored beside a number of the metric, since a report loads no probe: what results/metrics.py cannot know."""
        declared = {item.name: item for item in (*self.metrics, *self.more_of_others)}.get(metric)
        if declared is None:
            return None
        facts: dict[str, Any] = {}
        if metrics.known(self.name, metric) is None:
            is_main = declared is self.metrics[0]
            facts = metrics.metric_description(
                replace(declared, heading=declared.heading or (self.name if is_main else ""))
            )
        chance = self.chance(declared)
        if chance is not None and chance != declared.chance:
            facts["chance"] = chance
        return facts or None

    # --- measuring ------------------------------------------------------------------------------------------------

    @abstractmethod
    def run(self, subject: Any, lengths: Iterable[int]) -> Iterator[Result]:
        """What was measured at each length, always at full context, one result a length.

        The model is in evaluation mode, gradients are off, and it is left as it was found.
        """

    def value(self, metric: str, value: float, length: int = 0, **more: Any) -> Measurement:
        """A number in its metric's unit; `more` are n, low and high. Raises KeyError for a metric that is not declared."""
        return Measurement(
            probe=self.name, metric=metric, length=length, value=value, unit=self.metric(metric).unit, **more
        )

    def missing(self, reason: str, length: int = 0, metric: str | None = None) -> Measurement:
        """The row that says why a number is missing; without a metric, the main one."""
        declared = self.metrics[0] if metric is None else self.metric(metric)
        return Measurement(
            probe=self.name, metric=declared.name, length=length, value=None, unit=declared.unit, n=0, reason=reason
        )

    def example(self, metric: str, value: float, length: int = 0, *, item: int, position: int = 0) -> Example:
        """The outcome of one item. Raises KeyError for a metric that is not declared."""
        name = self.metric(metric).name
        return Example(probe=self.name, metric=name, length=length, item=item, position=position, value=value)

    @classmethod
    def metric(cls, name: str) -> Metric:
        """The declared metric; KeyError when there is none."""
        return {metric.name: metric for metric in (*cls.metrics, *cls.more_of_others)}[name]


class LengthwiseProbe(Probe):
    """A probe whose lengths are measured one after the other: a subclass defines `run_at`."""

    names_every_missing: ClassVar[bool] = False
    """Whether a reason stands in place of every metric, or of the main one alone."""

    def run(self, subject: Any, lengths: Iterable[int]) -> Iterator[Result]:
        """Yield what `run_at` gives, and its reasons as missing numbers."""
        for length in lengths:
            measured = self.run_at(subject, length)
            if isinstance(measured, str):
                metrics = self.metrics if self.names_every_missing else self.metrics[:1]
                measured = [self.missing(measured, length, metric.name) for metric in metrics], []
            yield measured

    @abstractmethod
    def run_at(self, subject: Any, length: int) -> Result | str:
        """Return the numbers and examples of one length, or the reason why there are none."""


class DocumentProbe(LengthwiseProbe):
    """A probe over lengths that reads the first L tokens of each of `eval.documents` held-out documents."""

    by_length = True
    beyond: ClassVar[int] = 0
    """Tokens of a document that it reads after the L."""

    def tokens(self, length: int) -> int:
        """A row a document."""
        return self.config.eval.documents * length

    def longest(self, corpus: Corpus) -> int:
        """That of the shortest of the documents; 0 where there are fewer than asked for."""
        n_documents = self.config.eval.documents
        documents = corpus.heldout[:n_documents]
        return max(0, min(map(len, documents)) - self.beyond) if len(documents) == n_documents else 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Held-out documents of more than `length` tokens."""
        if corpus.computed:
            return f"it has no long documents, which {WHO}: leave them out of eval.probes"
        n_documents = self.config.eval.documents
        n_long = sum(len(document) > length for document in corpus.heldout[:n_documents])
        if n_long >= n_documents:
            return None
        return (
            f"of the first {n_documents} held-out documents, which {WHO}, {'only ' if n_long else ''}{n_long or 'none'} "
            f"{'has' if n_long == 1 else 'have'} {length + 1} tokens (it holds {len(corpus.heldout)}): "
            "lower eval.documents or eval.lengths, or lend longer ones with data.heldout"
        )


@dataclass(frozen=True)
class Prompt:
    """Token ids of one trial and where its answer stands."""

    tokens: np.ndarray
    """Whole sequence; the model reads all but the last token."""
    scored: np.ndarray
    """Positions in `tokens` of the digit-bearing tokens of the answer."""
