"""Base classes of probes: one class holds what plans, attempts and reports need to know of one kind of measurement."""

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
PROBE_PLACEHOLDER = "{who}"
"""Placeholder in the text of `Probe.lack` for the names of the probes concerned, with their verb."""


class ProbeConfig(Config):
    """Settings of a probe; add fields with `knob`. They are written under eval.settings.NAME and never enter an id."""


class Probe(ABC):
    """A kind of measurement; an instance is bound to the settings of one cell.

    Plans use it without loading torch, so a file of the package imports torch in `run` or below it, not at its top.
    """

    Config: ClassVar[type[Config]] = ProbeConfig
    """Class of the settings."""
    metrics: ClassVar[tuple[Metric, ...]]
    """Metrics that `run` returns, the main one first."""
    more_of_others: ClassVar[tuple[Metric, ...]] = ()
    """Further metrics for a model with a tokenizer of its own."""
    by_length: ClassVar[bool] = False
    """True if measured at every context length of the cell; False if measured once, with length 0."""
    of_any: ClassVar[bool] = False
    """True if the probe works on every `Subject`, external models included, because it uses losses and answers alone.

    False if it needs a `CellSubject`.
    """
    divided: ClassVar[bool] = False
    """True if every rank of an attempt may run the probe at the same time, because it reads text only by the subject's
    `losses`, `answers` and `right_answers` or by `subject.ranks.map`, which divide the work; False: rank 0 runs it.
    """
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules that the probe imports beyond those of every attempt; a launch without them is refused."""
    reads_texts: ClassVar[bool] = False
    """True if the probe is measured on each of `eval.texts` too."""
    settings: Any
    """Settings in the cell, an instance of `Config`."""
    text: str
    """Name of the further text (`eval.texts`) that is read; empty for the held-out documents of the corpus."""

    def __init__(self, name: str, config: CellConfig) -> None:
        """Bind the probe to a cell.

        Args:
            name: Registered name of the probe; on a further text followed by a colon and the name of the text.
            config: Config of the cell.

        Raises:
            ValidationError: A setting of the probe is invalid (pydantic).
        """
        self.name, self.config = name, config
        registered, _, self.text = name.partition(metrics.TEXT_SEPARATOR)
        self.settings = self.Config.model_validate(config.eval.settings.get(registered, {}))

    @classmethod
    def settled(cls, settings: Any, config: EvalConfig) -> Any:
        """Return the settings as a launch stores them; unchanged by default.

        A probe whose defaults follow from other settings of the section overrides this to fill them in.

        Args:
            settings: Valid settings of the probe, an instance of `Config`.
            config: Section eval of the cell.
        """
        return settings

    # --- before measuring -----------------------------------------------------------------------------------------

    @abstractmethod
    def tokens(self, length: int) -> int:
        """Return the approximate number of tokens that go through the network for one length, at least 1.

        It estimates the cost.
        """

    def longest(self, corpus: Corpus) -> int | None:
        """Return the longest context length in tokens that the corpus allows, 0 if none; None if it sets no limit."""
        return None

    def validation_need(self, length: int) -> int:
        """Return the minimum number of tokens in the validation split for this length."""
        return 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return what the corpus lacks for `length` and which setting to lower, as text; None if it suffices.

        `{who}` (PROBE_PLACEHOLDER) in the text stands for the names of the probes.

        Args:
            corpus: Corpus of the cell.
            length: Context length in tokens; 0 for a probe without lengths.
        """
        longest = self.longest(corpus)
        if longest is None or length <= longest:
            return None
        return f"the text, which {PROBE_PLACEHOLDER}, allows lengths of at most {longest} tokens: lower eval.lengths"

    def inapplicable(self) -> str | None:
        """Return why the probe can never measure a network of this config, or None, the default.

        The text completes a sentence that starts with "cell ...".
        """
        return None

    def chance(self, metric: Metric) -> float | None:
        """Return the score of a trivial answer in this cell, in the metric's unit; None if the metric has none.

        The default is the metric's own.
        """
        return metric.chance

    def description(self, metric: str) -> dict[str, Any] | None:
        """Return the facts that are stored next to a number of the metric, because reports load no probe.

        Args:
            metric: Name of a metric.

        Returns:
            For a metric that results/metrics.py does not list, its fields that differ from the defaults of `Metric`,
            without name and unit; a main metric without a heading gets the probe's name as that. For any metric also
            "chance", where `chance` differs from the declared one. None if there is nothing to store or the metric is
            not declared.
        """
        declared = {item.name: item for item in (*self.metrics, *self.more_of_others)}.get(metric)
        if declared is None:
            return None
        facts: dict[str, Any] = {}
        if metrics.builtin_metric(self.name, metric) is None:
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
        """Measure the subject and yield (measurements, examples) for each length, in order.

        The model is in evaluation mode and gradients are off. The measurement uses the full context unless the probe
        says otherwise, and leaves the model unchanged.

        Args:
            subject: A `Subject`, or a `CellSubject` unless `of_any` is set.
            lengths: Context lengths in tokens; 0 for a probe without lengths.
        """

    def value(self, metric: str, value: float, length: int = 0, **more: Any) -> Measurement:
        """Return a measurement of this probe, in the unit of its metric; nothing is stored.

        Args:
            metric: Name of a declared metric.
            value: The number.
            length: Context length in tokens; 0 for none.
            more: Further fields of `Measurement`: n (number of observations), low and high (confidence interval).

        Raises:
            KeyError: The metric is not declared.
        """
        return Measurement(
            probe=self.name, metric=metric, length=length, value=value, unit=self.metric(metric).unit, **more
        )

    def missing(self, reason: str, length: int = 0, metric: str | None = None) -> Measurement:
        """Return a measurement without a value (None, with n = 0) that states the reason.

        Args:
            reason: Reason, which starts with its class, such as "n/a: ...".
            length: Context length in tokens; 0 for none.
            metric: Name of a declared metric; None: the main one.

        Raises:
            KeyError: The metric is not declared.
        """
        declared = self.metrics[0] if metric is None else self.metric(metric)
        return Measurement(
            probe=self.name, metric=declared.name, length=length, value=None, unit=declared.unit, n=0, reason=reason
        )

    def example(self, metric: str, value: float, length: int = 0, *, item: int, position: int = 0) -> Example:
        """Return the outcome of one item as a record; nothing is stored.

        Args:
            metric: Name of a declared metric.
            value: The number.
            length: Context length in tokens; 0 for none.
            item: Index of the item, such as a document or trial.
            position: Index within the item.

        Raises:
            KeyError: The metric is not declared.
        """
        name = self.metric(metric).name
        return Example(probe=self.name, metric=name, length=length, item=item, position=position, value=value)

    @classmethod
    def metric(cls, name: str) -> Metric:
        """Return the declared metric of that name. Raises KeyError if there is none."""
        return {metric.name: metric for metric in (*cls.metrics, *cls.more_of_others)}[name]


class LengthwiseProbe(Probe):
    """Base class of probes that measure one length after the other; a subclass defines `run_at`."""

    names_every_missing: ClassVar[bool] = False
    """True if a reason replaces every metric; False if it replaces the main one alone."""

    def run(self, subject: Any, lengths: Iterable[int]) -> Iterator[Result]:
        """Yield the result of `run_at` for each length, measured when it is taken.

        A reason becomes measurements without a value and without examples: one of the main metric, or one of every
        metric in `metrics` with `names_every_missing`.
        """
        for length in lengths:
            measured = self.run_at(subject, length)
            if isinstance(measured, str):
                metrics = self.metrics if self.names_every_missing else self.metrics[:1]
                measured = [self.missing(measured, length, metric.name) for metric in metrics], []
            yield measured

    @abstractmethod
    def run_at(self, subject: Any, length: int) -> Result | str:
        """Return (measurements, examples) of one length, or the reason why there are none."""


class DocumentProbe(LengthwiseProbe):
    """Base class of probes that read the first L tokens of each of `eval.documents` held-out documents."""

    by_length = True
    beyond: ClassVar[int] = 0
    """Number of tokens that the probe reads after the first L of a document."""

    def tokens(self, length: int) -> int:
        """Return the tokens of one row per document."""
        return self.config.eval.documents * length

    def longest(self, corpus: Corpus) -> int | None:
        """Return the length that the shortest of the first `eval.documents` held-out documents allows.

        It is the document's number of tokens less `beyond`; 0 if there are fewer documents. None for a further text,
        whose documents are read by the evaluation alone.
        """
        if self.text:
            return None
        n_documents = self.config.eval.documents
        documents = corpus.heldout[:n_documents]
        return max(0, min(map(len, documents)) - self.beyond) if len(documents) == n_documents else 0

    def lack(self, corpus: Corpus, length: int) -> str | None:
        """Return a message if fewer than `eval.documents` held-out documents exceed `length` tokens, else None.

        Only the first `eval.documents` documents count. A computed corpus has none, which gives a message of its own.
        None for a further text.
        """
        if self.text:
            return None
        if corpus.computed:
            return f"it has no long documents, which {PROBE_PLACEHOLDER}: remove these probes from eval.probes"
        n_documents = self.config.eval.documents
        n_long = sum(len(document) > length for document in corpus.heldout[:n_documents])
        if n_long >= n_documents:
            return None
        return (
            f"of the first {n_documents} held-out documents, which {PROBE_PLACEHOLDER}, {'only ' if n_long else ''}{n_long or 'none'} "
            f"{'has' if n_long == 1 else 'have'} {length + 1} tokens (it holds {len(corpus.heldout)}): "
            "lower eval.documents or eval.lengths, or provide longer documents with data.heldout"
        )


@dataclass(frozen=True)
class Sampling:
    """Choice of the tokens that continue a text: the most probable ones, unless a temperature is set."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Prompt:
    """Token ids of one question, with the positions of its answer."""

    tokens: np.ndarray
    """Complete sequence, one-dimensional; the model reads all but the last token."""
    scored: np.ndarray
    """Positions in `tokens` of the scored tokens of the answer, such as those with digits."""
