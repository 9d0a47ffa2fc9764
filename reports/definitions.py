"""What every metric means, in words for a reader who has only the report."""

from __future__ import annotations

DEFINITIONS: dict[tuple[str, str], str] = {
    ("val", "val_loss"): "Validation loss: mean cross-entropy over the first tokens of the validation split, in rows of the "
    "training length, with the attention window that the model was trained with.",
    ("val", "val_loss_full"): "Validation loss as above, with the attention window taken off.",
    ("clean", "nats"): "Clean loss: mean cross-entropy over the first L tokens of each long held-out document, L being the "
    "context length. The same documents at every length, full attention.",
    ("junk", "nats"): "Junk loss: mean cross-entropy over rows of L tokens of the validation stream, which run across the "
    "borders of documents, so that most of a long context is of no use. Full attention.",
    ("needle", "digit_accuracy"): "Needle: share of digits recalled when a record's key stands again after L tokens of other "
    "text, each digit judged by the most probable token. A guess gets 10%. Interval: 95%, by Wilson.",
    ("needle", "exact_accuracy"): "Needle: share of trials in which every digit was right. Interval: 95%, by Wilson.",
    ("needle", "nats"): "Needle: mean cross-entropy of the digits at their second place.",
    ("needle", "absent_nats"): "Needle: cross-entropy of digits that stand nowhere in the context, a yardstick for the one above.",
    ("throughput", "tokens_per_s"): "Training speed over the last validation interval, validation left out.",
    ("throughput", "mfu_paper"): "Model FLOPs utilisation by the paper's formula: FLOPs that the formula counts for a token, "
    "times tokens a second, over the chip's dense peak.",
    ("throughput", "mfu"): "Model FLOPs utilisation by the FLOPs really done: twice the multiply-adds of every matrix product, "
    "attention only over the keys that a token may see, three times the forward pass.",
    ("throughput", "train_seconds"): "Seconds of training, validation and checkpoints left out.",
    ("throughput", "step_seconds"): "Seconds of one optimizer step.",
    ("state_norm", "delta_norm"): "State norm: Frobenius norm of the memory's state after L tokens of a long held-out document, "
    "as the trained network leaves it; mean over documents, layers with a memory and heads.",
    ("state_norm", "hebbian_norm"): "State norm as above of the same keys, values and gates, written without erasing what stood "
    "there (Hebbian writes).",
    ("state_norm", "delta_norm_kept"): "State norm of the delta rule with gamma = 1: nothing decays, only its writes erase.",
    ("state_norm", "hebbian_norm_kept"): "State norm of Hebbian writes with gamma = 1: nothing decays and nothing is erased.",
    ("count_map", "beta"): "Slope beta of Polar attention's count map, tanh(beta ln(1 + m)) for m keys of one weight: mean over all "
    "heads of all Polar layers. Training starts it at 0.201.",
    ("count_map", "beta_lowest"): "Count map: the lowest slope among the heads.",
    ("count_map", "beta_highest"): "Count map: the highest slope among the heads.",
    ("throughput", "parameters"): "Trained parameters of the model, embeddings included.",
    ("corpus", "unigram_entropy"): "Entropy of the training tokens one by one: the loss of a model that knows only how often "
    "each occurs.",
    ("corpus", "bigram_entropy"): "Entropy of a training token given the one before: the loss of a model that sees one token back.",
}  # fmt: skip
PEAK_MEMORY = "Most memory that the evaluation took: on CUDA what was allocated, weights included; on the CPU the resident memory."
UNKNOWN = "Recorded by the probe {probe}, which says no more of it than its name and unit."
DIRECTIONS = {-1: "Less is better.", 0: "", 1: "More is better."}


def definition(probe: str, metric: str) -> str:
    """What the metric of that probe means; for one that we do not know, who recorded it."""
    known = DEFINITIONS.get((probe, metric))
    return known or (PEAK_MEMORY if metric == "peak_memory" else UNKNOWN.format(probe=probe))
