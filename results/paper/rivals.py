"""Published numbers of rival papers as sweeps.

These are threshold relative attention (`printed-tra`), Wall attention (`printed-wall`) and the ATLAS memory
(`printed-atlas`). A printed mean over runs has its metric's name. The printed standard deviation between the runs has
that name with metrics.SD_SUFFIX, and the number of runs as its `n`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import metrics
from ..metrics import FRACTION, Metric
from ..store.records import AXES, CellRecord, Measurement
from .base import Sheet, printed_measurement, published_cell_id, rows

SETS = ("iid", "sparse", "dense")
"""Test sets of the flip-flop task, with the probe's names."""
TRA_RUNS = 4
"""Number of random initialisations behind a mean of the threshold paper."""
FLIPFLOP, EXTRAPOLATION, DOWNSTREAM = "flipflop", "extrapolation", "downstream"
"""Probes of the rivals' numbers; the first two are also probes of the package."""
PERPLEXITY = metrics.metric(EXTRAPOLATION, "perplexity")
TASKS: Mapping[str, Metric] = {
    name: Metric(name, FRACTION, "higher", f"{subject} answered rightly.", heading, 1)
    for name, heading, subject in (
        ("hellaswag", "HellaSwag", "HellaSwag: share of sentences to be ended"),
        ("arc_c", "ARC-C", "ARC, challenge set: share of questions"),
        ("mmlu", "MMLU", "MMLU: share of questions"),
        ("winogrande", "Winogrande", "Winogrande: share of pronouns"),
        ("average", "Avg", "Mean over HellaSwag, ARC-C, MMLU and Winogrande: share"),
    )
}
ROTARY = "model.mixers.wall.rotary"
HOUR = 3600.0
TASK, POSITIONS = "data.corpus", "model.positions"
"""Axes of the published rivals besides the five, with the names that a grid gives them."""

_LLAMA = {"attn_every": 1, "attn_offset": 0, "mlp": "swiglu", "mlp_ratio": 2}
_ADAM = {"optimizer": "adamw", "schedule": "cosine"}
_TRAINED: Mapping[str, Mapping[str, Any]] = {
    "flipflop": {
        "model": {**_LLAMA, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "d_model": 256, "head_dim": 64},
        "train": {**_ADAM, "tokens": 25_000 * 64 * 512, "seq_len": 512, "batch_tokens": 64 * 512, "loss_on": "marked"},
    },
    "wikitext-103": {
        "model": {**_LLAMA, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "d_model": 512, "head_dim": 64},
        "train": {**_ADAM, "tokens": 100_000 * 64 * 128, "seq_len": 128, "batch_tokens": 64 * 128, "loss_on": "all"},
    },
}
"""Known part of the recipes by corpus, with the keys of a cell's config (docs/explanation/recipes.md)."""
_TOKENIZERS = {"flipflop": "flipflop", "wikitext-103": "gpt2"}


@dataclass(frozen=True)
class RivalPaper:
    """Source of a rival's numbers, their edition, and the function that returns the sheet of a sweep."""

    source: str
    edition: int
    sheet: Callable[[str], Sheet]


def tra_sweep(sweep: str) -> Sheet:
    """Return both tables of the threshold paper as the sheet of the sweep of that name.

    One cell per mixer, positions and task, each with means over four runs: flipflop.exact_SET, and
    extrapolation.perplexity by length; each also with its standard deviation.
    """
    cells: dict[str, CellRecord] = {}
    values: dict[str, list[Measurement]] = {}
    for row in rows("tra-flipflop"):
        cell = _tra_cell(sweep, row, "flipflop", cells)
        exact = metrics.metric(FLIPFLOP, f"exact_{row['set']}")
        values.setdefault(cell, []).extend(_mean(FLIPFLOP, exact, 0, row["mean"], row["sd"]))
    for row in rows("tra-wikitext"):
        cell = _tra_cell(sweep, row, "wikitext-103", cells)
        values.setdefault(cell, []).extend(_mean(EXTRAPOLATION, PERPLEXITY, int(row["length"]), row["mean"], row["sd"]))
    ran = {cell.id: {"tokenizer": _TOKENIZERS[cell.axes[TASK]], "corpus": cell.axes[TASK]} for cell in cells.values()}
    return Sheet(sweep, list(cells.values()), values, "", ran=ran, seed=f"means over {TRA_RUNS} runs")


def wall_sweep(sweep: str) -> Sheet:
    """Return the comparison in the Wall blog's bar charts as the sheet of the sweep of that name.

    One cell per model, one run each, with the accuracy of every task in TASKS under the probe DOWNSTREAM.
    """
    cells, values = [], {}
    facts = {row["setting"]: row["printed"] for row in rows("wall-settings")}
    for row in rows("wall-downstream"):
        rotary = row["rotary"]
        axes = {"attn_type": row["attn_type"], **({ROTARY: rotary} if row["attn_type"] == "wall" else {})}
        published: dict[str, Any] = {"name": row["name"]} | (facts if row["attn_type"] == "wall" else {})
        config = {"model": {"attn_type": row["attn_type"]}, "published": published}
        if row["attn_type"] == "wall":
            config["model"] |= {"mixers": {"wall": {"rotary": rotary}}}
        slug = row["attn_type"] + (f"-rotary-{rotary}" if rotary not in ("-", "none") else "")
        cell = _cell(sweep, slug, axes, config, 0)
        cells.append(cell)
        values[cell.id] = [printed_measurement(DOWNSTREAM, TASKS[name], 0, row[name]) for name in TASKS]
    return Sheet(sweep, cells, values, "")


def atlas_sweep(sweep: str) -> Sheet:
    """Return the results of two trainings in a blog about ATLAS as the sheet of the sweep of that name.

    Each cell has val.val_loss (the last loss) and throughput.train_seconds. The blog does not give the number of
    tokens, nor does it say whether ATLAS stands beside attention: its cell has the level rope, records no mixer, and
    also matches cells without attention (`published.also_attn_type`).
    """
    cells, values = [], {}
    facts = {row["setting"]: row["printed"] for row in rows("atlas-settings")}
    for row in rows("atlas-blog"):
        shape = {"n_layers": 12, "d_model": 768, "n_heads": 16, "n_kv_heads": 16, "head_dim": 48}
        model: dict[str, Any] = {"memory": row["memory"], "window": False, **shape}
        if row["memory"] == "atlas":
            model |= {"memories": {"atlas": {"memory": "mlp2", "hidden": 4, "chunk": 64, "features": "sketch"}}}
        else:
            model |= {"attn_type": row["attn_type"]}
        train = {"seq_len": 512, "batch_tokens": 16 * 512, "optimizer": "muon", "muon_lr": 1e-3, "warmup_steps": 200}
        train |= {"schedule": "cosine", "constant": 0.0}
        train |= dict.fromkeys(("embedding_lr", "head_lr", "scalar_lr"), 3e-4)
        published: dict[str, Any] = {"name": row["name"]} | (facts if row["memory"] == "atlas" else {})
        if row["also_attn_type"]:
            published["also_attn_type"] = row["also_attn_type"]
        config = {"model": model, "data": {"corpus": facts["corpus"]}, "train": train, "published": published}
        level = "off" if row["memory"] == "none" else row["memory"]
        axes = {"attn_type": row["attn_type"], "memory": level}
        cell = _cell(sweep, f"{row['name'].lower()}-170m", axes, config, 0)
        cells.append(cell)
        values[cell.id] = [
            printed_measurement("val", metrics.metric("val", "val_loss"), 0, row["loss"]),
            printed_measurement(
                "throughput", metrics.metric("throughput", "train_seconds"), 0, str(float(row["train_hours"]) * HOUR)
            ),
        ]
    return Sheet(sweep, cells, values, "", ran={cell.id: {"corpus": facts["corpus"]} for cell in cells})


def _tra_cell(sweep: str, row: Mapping[str, str], corpus: str, cells: dict[str, CellRecord]) -> str:
    """Return the id of a row's cell, and add the cell to `cells` if it is new.

    Args:
        sweep: name of the sweep.
        row: row of a table; its mixer, positions and name are read.
        corpus: key of the recipe.
        cells: cells by id, extended here.
    """
    mixer, positions = row["attn_type"], row["positions"]
    named = mixer if positions == "none" else f"{mixer}-{positions}"
    slug = f"{named}-{corpus}"
    recipe = _TRAINED[corpus]
    config = {
        "model": {"attn_type": mixer, "memory": "none", "window": False, "positions": positions, **recipe["model"]},
        "data": {"corpus": corpus, "tokenizer": _TOKENIZERS[corpus]},
        "train": recipe["train"],
        "published": {"name": row["name"], "runs": TRA_RUNS},
    }
    axes = {"attn_type": mixer, POSITIONS: positions, TASK: corpus}
    cell = _cell(sweep, slug, axes, config, recipe["train"]["tokens"])
    cells.setdefault(cell.id, cell)
    return cell.id


def _cell(sweep: str, slug: str, axes: Mapping[str, str], config: Mapping[str, Any], tokens: int) -> CellRecord:
    """Return the record of a published cell, with seed 0.

    Its five levels are `attn_type` and `memory` (default off) of `axes`, and baseline, off and off for reg_mode,
    distractor and window.

    Args:
        sweep: name of the sweep, part of the cell's id.
        slug: slug of the cell, the other part of its id.
        axes: level by axis; must have `attn_type`.
        config: known part of the config.
        tokens: number of training tokens; 0 for unknown.
    """
    fixed = {"reg_mode": "baseline", "distractor": "off", "window": "off"}
    levels = {axis: fixed.get(axis) or axes.get(axis, "off") for axis in AXES}
    return CellRecord(
        id=published_cell_id(sweep, slug), slug=slug, seed=0, levels=levels, config=config, axes=axes, tokens=tokens
    )


def _mean(probe: str, metric: Metric, length: int, mean: str, sd: str) -> list[Measurement]:
    """Return a mean over runs and the standard deviation between them as two measurements, in this order.

    The second has the metric's name with the suffix "_sd", and 4 (TRA_RUNS) as its `n`.

    Args:
        probe: probe.
        metric: metric of the mean.
        length: context length in tokens, 0 for none.
        mean: printed mean; a percentage for shares.
        sd: printed standard deviation; a percentage for shares.
    """
    return [
        printed_measurement(probe, metric, length, mean),
        replace(printed_measurement(probe, metrics.sd_metric(metric), length, sd), n=TRA_RUNS),
    ]


TRA_PAPER = RivalPaper("arXiv:2503.23174", 2, tra_sweep)
WALL_PAPER = RivalPaper(
    "Wall Attention: Length Generalization With Diagonal Gates (Tilde Research, 2 June 2026)", 2, wall_sweep
)
ATLAS_PAPER = RivalPaper("a blog's training of ATLAS and of a transformer, 170M parameters", 3, atlas_sweep)
