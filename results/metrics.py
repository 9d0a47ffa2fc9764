"""What every metric is: its unit, which direction is better, its words, and what a trivial answer scores.

Tables, figures and the dashboard ask here and nowhere else. METRICS has those of the probes that databases hold without a
description; of any other, one of a plugin for example, the description stands in the database beside the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

Better = Literal["lower", "higher", "neither"]
DIRECTIONS: Mapping[Better, int] = {"lower": -1, "neither": 0, "higher": 1}
IN_WORDS: Mapping[Better, str] = {"lower": "Less is better.", "neither": "", "higher": "More is better."}
SHARE = "fraction"
"""The unit of a number between 0 and 1 that is printed in percent."""
UNKNOWN = "Recorded by the probe {probe}, which says no more of it than its name and unit."
SPREAD = "_sd"
"""End of a metric's name: the sample standard deviation between the `n` runs whose mean is the number of the name without it.
Papers print such pairs; a sweep of one's own has its runs instead."""
PEAK_MEMORY = "peak_memory"
"""A metric that every probe over lengths has."""


@dataclass(frozen=True)
class Metric:
    """One kind of number that a probe gives. Only name and unit must be said."""

    name: str
    unit: str
    """`fraction` for a share, which is printed in percent; 1 for a bare number."""
    better: Better = "neither"
    words: str = ""
    """What it means, in a sentence or two, for a reader who has only the report."""
    heading: str = ""
    """Of its column in the complete results; one that has none stands in no table."""
    decimals: int = 3
    """Of a printed number; of a share in percent."""
    chance: float | None = None
    """What a trivial answer scores, in `unit`; None where there is no such thing, or it depends on the cell."""
    trials: int = 0
    """Of a share of `n` answers that are right: how many of them one trial gives. Trials are independent, so the interval is
    Wilson's over `n / trials`; 1 (or True) where each answer is a trial of its own, 0 for what is no such share."""

    @property
    def direction(self) -> int:
        """-1 where less is better, 1 where more is, 0 where neither."""
        return DIRECTIONS[self.better]

    @property
    def percent(self) -> bool:
        """Whether it is printed in percent."""
        return self.unit == SHARE

    @property
    def chance_text(self) -> str:
        """The chance level as people write it, 10% or 5.545 nats/token; nothing where there is none."""
        if self.chance is None:
            return ""
        return f"{100 * self.chance:.4g}%" if self.percent else f"{self.chance:.4g} {self.unit}"

    @property
    def definition(self) -> str:
        """All of it in words."""
        trivial = f"A trivial answer scores {self.chance_text}." if self.chance is not None else ""
        return " ".join(filter(None, (self.words, IN_WORDS[self.better], trivial)))


def _flip_flops() -> tuple[Metric, ...]:
    """Of the probe flipflop: the same four numbers of each of its three splits."""
    splits = {
        "iid": "like those of training",
        "sparse": "with few writes and reads",
        "dense": "with many writes and reads",
    }
    told = [(split, f"the sequences {words} ({split})") for split, words in splits.items()]
    bits = "every bit that is read is the one that was written last. Interval: 95%, by Wilson over sequences."
    coins = "that fair coins would say without an error, worked out from the reads of these very sequences."
    return (
        *(Metric(f"exact_{split}", SHARE, "higher", f"Flip-flop: share of {which} in which {bits}", f"FF {split}", 2, trials=1) for split, which in told),
        *(Metric(f"error_{split}", SHARE, "lower", f"Flip-flop: share of the bits read in {which} that are said wrong.", chance=0.5) for split, which in told),
        *(Metric(f"reads_{split}", "reads", words=f"Flip-flop: bits that are read in {which}, together.", decimals=0) for split, which in told),
        *(Metric(f"coin_{split}", SHARE, words=f"Flip-flop: share of {which} {coins}") for split, which in told),
    )  # fmt: skip


_LOSS = "nats/token"
_NORM = "frobenius"

OF_TRAINING = ("throughput", "corpus")
"""What stands in place of a probe where a training records a number by itself."""
SAMPLES = "samples"
"""What stands in place of a probe where a training keeps texts that its network wrote."""
METRICS: Mapping[tuple[str, str], Metric] = {
    (probe, metric.name): metric
    for probe, metrics in {
        "val": (
            Metric("val_loss", _LOSS, "lower", "Validation loss: mean cross-entropy over the first tokens of the validation split, in "
                   "rows of the training length, with the attention window that the model was trained with. Where the unit is "
                   "nats/marked token (train.loss_on: marked) the mean is over the targets that the corpus marks.", "Val"),
            Metric("val_loss_full", _LOSS, "lower", "Validation loss as above, with the attention window taken off."),
            Metric("bits", "bits/token", "lower", "Validation loss in bits per token of GPT-2 of the text."),
            Metric("bits_per_byte", "bits/byte", "lower", "Validation loss in bits per byte of the text."),
        ),
        "clean": (
            Metric("nats", _LOSS, "lower", "Clean loss: mean cross-entropy over the first L tokens of each long held-out document, L "
                   "being the context length. The same documents at every length, full attention.", "Clean", 2),
            Metric("bits", "bits/token", "lower", "Clean loss in bits per token, of GPT-2 for a model from elsewhere.", decimals=2),
            Metric("bits_per_byte", "bits/byte", "lower", "Clean loss in bits per byte of the text."),
        ),
        "junk": (
            Metric("nats", _LOSS, "lower", "Junk loss: mean cross-entropy over rows of L tokens of the validation stream, which run "
                   "across the borders of documents, so that most of a long context is of no use. Full attention.", "Junk", 2),
            Metric("bits", "bits/token", "lower", "Junk loss in bits per token, of GPT-2 for a model from elsewhere.", decimals=2),
            Metric("bits_per_byte", "bits/byte", "lower", "Junk loss in bits per byte of the text."),
        ),
        "needle": (
            Metric("digit_accuracy", SHARE, "higher", "Needle: share of digits recalled when a record's key stands again after L tokens "
                   "of other text, each digit judged by the most probable token. A constant answer may score more than a guess (constant_accuracy). "
                   "Interval: 95%, by Wilson over trials.", "Ndl", 1, 0.1, 5),
            Metric("exact_accuracy", SHARE, "higher", "Needle: share of trials in which every digit was right. Interval: 95%, by Wilson.",
                   decimals=1, trials=1),
            Metric("nats", "nats/digit", "lower", "Needle: mean cross-entropy of the digits at their second place."),
            Metric("absent_nats", "nats/digit", "neither", "Needle: cross-entropy of digits that stand nowhere in the context, a "
                   "yardstick for the one above."),
            Metric("constant_accuracy", SHARE, "neither", "Needle: share of digits that the best constant answer gets right, one and "
                   "the same token everywhere, on the very trials that were asked: what a network may score that retrieves nothing.",
                   decimals=1),
            Metric("steps_per_digit", "tokens", words="Needle: tokens that a digit with its space takes; the one that bears the digit "
                   "is scored."),
        ),
        "passkey": (
            Metric("digit_accuracy", SHARE, "higher", "Passkey: share of digits recalled of a value that stands once in a text of L tokens and "
                   "is asked for at its end, over all depths at which it stands. A constant answer may score more than a guess "
                   "(constant_accuracy). Interval: 95%, by Wilson over trials, each asked at every depth.", "Key", 1, 0.1, 25),
            Metric("exact_accuracy", SHARE, "higher", "Passkey: share of answers in which every digit was right, over all depths. Interval: "
                   "95%, by Wilson over trials.", decimals=1, trials=5),
            Metric("nats", "nats/digit", "lower", "Passkey: mean cross-entropy of the digits at the end."),
            Metric("constant_accuracy", SHARE, "neither", "Passkey: share of digits that the best constant answer gets right, on the very "
                   "trials that were asked.", decimals=1),
        ),
        "same_tail": (
            Metric("nats", _LOSS, "lower", "Loss on the same last tokens of each long held-out document, read after L tokens of it: what "
                   "more context is worth, while the text that is scored stays the same. Full attention.", "Tail"),
            Metric("end", "tokens", words="Place of the last token that the loss above scores: lengths compare where it is the same.",
                   decimals=0),
        ),
        "extrapolation": (
            Metric("perplexity", "1", "lower", "Perplexity of a text cut into windows of L tokens side by side: exp of the mean cross-entropy, over the same targets at every L.", "PPL", 2),
            Metric("nats", _LOSS, "lower", "Loss of a text cut into windows of L tokens side by side: mean cross-entropy over the same targets "
                   "at every L, from the start of the validation split. Full attention."),
        ),
        "position_nll": (
            Metric("nats", _LOSS, "lower", "Loss over position: mean cross-entropy over the first L tokens of each long held-out document, "
                   "which is the clean loss; its items are the means over runs of tokens at one place in the document. Full attention."),
            Metric("end_nats", _LOSS, "lower", "Loss over position: mean cross-entropy over the last run of those tokens."),
            Metric("bin", "tokens", words="Loss over position: tokens of one run.", decimals=0),
        ),
        "state_norm": (
            Metric("delta_norm", _NORM, words="State norm: Frobenius norm of the memory's state after L tokens of a long held-out "
                   "document, as the trained network leaves it; mean over documents, layers with a memory and heads."),
            Metric("hebbian_norm", _NORM, words="State norm as above of the same keys, values and gates, written without erasing what "
                   "stood there (Hebbian writes)."),
            Metric("delta_norm_kept", _NORM, words="State norm of the same memory with retention 1: nothing decays, only its writes erase."),
            Metric("hebbian_norm_kept", _NORM, words="State norm of Hebbian writes with retention 1: nothing decays and nothing is erased."),
        ),
        "gates": (
            Metric("retention", SHARE, words="Gates: what a token leaves of what lies before it, in the mixer; geometric mean over tokens, "
                   "heads and channels of all layers that have gates. In threshold relative attention it is what a surviving key leaves."),
            Metric("lowest", SHARE, words="Gates as above: the head, or the channel, that keeps least."),
            Metric("highest", SHARE, words="Gates as above: the head, or the channel, that keeps most."),
            Metric("channels", "channels", words="Gates: how many of them a head of the mixer has.", decimals=0),
            Metric("memory", SHARE, words="Gates: what a token leaves of the memory's state; geometric mean over tokens, heads and layers."),
        ),
        "memory_recall": (
            Metric("share", SHARE, "higher", "Memory recall: random keys and values are written into the memory alone, with the rates that it has on "
                   "the text, and every key is read back; share of answers that lie nearer to their own value than to any other. Mean over "
                   "numbers of pairs, layers and heads.", decimals=1),
            Metric("pairs", "pairs", "higher", "Memory recall: how many random pairs, written into the memory alone, it holds: the number at which "
                   "the share of keys answered rightly, mean over layers and heads, falls to 90%; the largest number tried where it never "
                   "does.", "Holds", 0),
            Metric("context_share", SHARE, "higher", "Recall in context: pairs of tokens stand in a row, then every key again; share of keys "
                   "after which the network, with the window of training, says their value. Mean over numbers of pairs.", "Recall", 1),
            Metric("context_pairs", "pairs", "higher", "Recall in context: the number of pairs at which the share of keys answered rightly falls to "
                   "90%; the largest number tried where it never does.", decimals=1),
            Metric("context_chance", SHARE, words="Recall in context: what one of the row's values gets, taken at random. Mean over numbers of "
                   "pairs.", decimals=1),
        ),
        "attention_map": (
            Metric("keys", "keys", words="Attention maps of a small text: how many keys share the attention of a query, (sum |w|)^2 / sum w^2, mean "
                   "over queries, heads and layers. The maps are its items.", decimals=1),
            Metric("row_sum", "1", words="Attention maps: what the weights of a query add up to, on average. Of a mixer that norms what it reads "
                   "they are divided by their sum."),
        ),
        "count_map": (
            Metric("beta", "1", words="Slope beta of Polar attention's count map, tanh(beta ln(1 + m)) for m keys of one weight: mean "
                   "over all heads of all Polar layers. Training starts it at 0.201."),
            Metric("beta_lowest", "1", words="Count map: the lowest slope among the heads."),
            Metric("beta_highest", "1", words="Count map: the highest slope among the heads."),
        ),
        "flipflop": _flip_flops(),
        "mqar": (
            Metric("accuracy", SHARE, "higher", "Associative recall: share of questions answered with the value that the key was written with, the largest "
                   "logit of the whole vocabulary counting. Interval: 95%, by Wilson over rows.", "MQAR", 1, trials=1),
            Metric("exact", SHARE, "higher", "Associative recall: share of rows without a wrong answer. Interval: 95%, by Wilson over rows.",
                   decimals=1, trials=1),
            Metric("questions", "questions", words="Associative recall: questions asked, together.", decimals=0),
        ),
        "decode": (
            Metric("written_per_s", "tokens/s", "higher", "Writing speed: new tokens a second of all texts that are written at a time, the context "
                   "length behind each, at full context.", "Writes", 0),
            Metric("cache_bytes", "bytes", "lower", "Writing: bytes that are kept of one text of that length, keys and values, memories and the tails of "
                   "convolutions.", decimals=0),
        ),
        "throughput": (
            Metric("tokens_per_s", "tokens/s", "higher", "Training speed over the last validation interval, validation left out.", decimals=0),
            Metric("mfu_paper", SHARE, "higher", "Model FLOPs utilisation by the paper's formula: FLOPs that the formula counts for a "
                   "token, times tokens a second, over the chip's dense peak.", "MFU", 1),
            Metric("mfu", SHARE, "higher", "Model FLOPs utilisation by the FLOPs really done: twice the multiply-adds of every matrix "
                   "product, attention only over the keys that a token may see, three times the forward pass.", decimals=1),
            Metric("mfu_drop", SHARE, words="How much of the model FLOPs utilisation goes when the memory is added.", decimals=1),
            Metric("train_seconds", "s", "lower", "Seconds of training, validation and checkpoints left out.", decimals=0),
            Metric("step_seconds", "s", "lower", "Seconds of one optimizer step.", decimals=2),
            Metric("parameters", "parameters", words="Trained parameters of the model, embeddings included.", decimals=0),
            Metric("skipped_steps", "steps", words="Steps that loss scaling left out, because a gradient left the range of float16.",
                   decimals=0),
        ),
        "corpus": (
            Metric("unigram_entropy", _LOSS, words="Entropy of the training tokens one by one: the loss of a model that knows only how "
                   "often each occurs."),
            Metric("bigram_entropy", _LOSS, words="Entropy of a training token given the one before: the loss of a model that sees one "
                   "token back."),
        ),
    }.items()
    for metric in metrics
}  # fmt: skip
_PEAK = Metric(
    PEAK_MEMORY,
    "bytes",
    "lower",
    "Most memory that the evaluation took: on CUDA what was allocated, weights included; on the CPU the resident memory.",
    decimals=0,
)


def of_probe(probe: str) -> tuple[Metric, ...]:
    """The metrics of METRICS that the probe gives, the main one first."""
    return tuple(metric for (of, _), metric in METRICS.items() if of == probe)


EXTERNAL_ONLY = ("bits", "bits_per_byte", "steps_per_digit")
"""Numbers that only models from elsewhere have, whose tokens are others."""


def by_subject(probe: str) -> tuple[tuple[Metric, ...], tuple[Metric, ...]]:
    """The metrics that the probe gives of every network, and those that it gives only of models from elsewhere."""
    found = of_probe(probe)
    own = tuple(metric for metric in found if metric.name not in EXTERNAL_ONLY)
    return own, tuple(metric for metric in found if metric.name in EXTERNAL_ONLY)


def known(probe: str, name: str) -> Metric | None:
    """What is known of a metric without a database; None for one that is not the package's."""
    if name == PEAK_MEMORY:
        return _PEAK
    base = METRICS.get((probe, name.removesuffix(SPREAD)))
    return spread_of(base) if base is not None and name.endswith(SPREAD) else base


def spread_of(about: Metric) -> Metric:
    """The metric of the standard deviation between runs of a number."""
    words = f"Standard deviation between runs of: {about.words}"
    return Metric(about.name + SPREAD, about.unit, words=words, decimals=about.decimals)


def metric(probe: str, name: str, description: Mapping[str, Any] | None = None, unit: str = "") -> Metric:
    """What is known of a metric.

    `description` and `unit` are those that stand beside a number in the database; a description says what METRICS does
    not know, or knows only for all cells at once. Whoever wrote the database is not trusted: what makes no sense counts
    as not said.
    """
    found = known(probe, name)
    if description is None and found is not None:
        return found
    found = found or Metric(name, unit, words=UNKNOWN.format(probe=probe))
    return replace(found, **{field: value for field, value in (description or {}).items() if _sensible(field, value)})


def described(metric: Metric) -> dict[str, Any]:
    """The description of a metric as JSON, without what is as in every other and without name and unit, which stand beside it."""
    plain = Metric(metric.name, metric.unit)
    return {name: value for name, value in asdict(metric).items() if value != getattr(plain, name)}


MOST_ANSWERS = 1_000_000
_TYPES = {"words": str, "heading": str, "decimals": int}


def _sensible(name: str, value: Any) -> bool:
    if name == "better":
        return isinstance(value, str) and value in DIRECTIONS
    if name == "chance":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "trials":
        return isinstance(value, int) and 0 <= value <= MOST_ANSWERS
    if name == "decimals" and not (isinstance(value, int) and 0 <= value <= 12):
        return False
    return name in _TYPES and type(value) is _TYPES[name]


FIELDS = tuple(field.name for field in fields(Metric) if field.name not in ("name", "unit"))
"""What a description may say."""
