"""Published sweeps from the CSV files: cells, measurements and curves of each as one sheet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .. import metrics
from ..names import PUBLISHED, PUBLISHED_PREFIX
from ..store.records import AXES, CellRecord, CurvePoint, Measurement
from . import rivals
from .base import Sheet, printed_measurement, published_cell_id, rows

VERSIONS = ("v1", "v2")
SWEEPS, OPEN_WEIGHT = PUBLISHED[:2], PUBLISHED[2]
"""Sweeps of the paper's own models, and the sweep of its open-weight models."""
TRA, WALL, ATLAS = PUBLISHED[3:]
"""Sweeps of rival papers: threshold relative attention, Wall attention, and the ATLAS memory."""
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
DIGITS = 80
"""Number of digits of a needle accuracy: 16 trials of 5, so that every value is a multiple of 1.25 %."""
MOST_FREQUENT = 14
"""Number of these digits that are a 7, the most frequent one: the score of always answering 7, at every length."""
TOKENS, STEP_TOKENS = 996_147_200, 524_288
PARAMETERS = {
    ("rope", "off"): 369_692_800, ("rope", "on"): 378_155_200, ("nope", "off"): 369_717_376,
    ("nope", "on"): 378_179_776, ("polar", "off"): 369_758_464, ("polar", "on"): 378_220_864,
}  # fmt: skip
"""Number of parameters of the published models by mixer and memory, both vocabulary matrices included."""
SOURCE = "arXiv:2606.25156"
EDITION = 2
"""Edition of the numbers made from these files.

It increases with every change, so that databases with older numbers are updated.
"""
RIVALS: Mapping[str, rivals.RivalPaper] = {TRA: rivals.TRA_PAPER, WALL: rivals.WALL_PAPER, ATLAS: rivals.ATLAS_PAPER}
"""Source and edition of the numbers of rival papers, by sweep."""
L4 = {
    "device": "cuda", "gpu_name": "NVIDIA L4", "gpu_count": 1, "dtype": "bfloat16", "tokenizer": "gpt2",
    "corpus": "fineweb-edu",
}  # fmt: skip
"""Known facts about the machine of the published runs, as fields of a Provenance."""
COMPLETE_COLUMNS = {
    "val_loss": ("val", "val_loss", 0), "clean_2k": ("clean", "nats", 2048), "clean_64k": ("clean", "nats", 65536),
    "junk_2k": ("junk", "nats", 2048), "junk_64k": ("junk", "nats", 65536),
    "needle_2k": ("needle", "digit_accuracy", 2048), "needle_64k": ("needle", "digit_accuracy", 65536),
    "mfu": ("throughput", "mfu_paper", 0),
}  # fmt: skip
SMALL_TABLE_COLUMNS = {
    "clean": ("clean", "nats"), "needle": ("needle", "digit_accuracy"),
    "step_seconds": ("throughput", "step_seconds"), "mfu": ("throughput", "mfu_paper"),
    "mfu_drop": ("throughput", "mfu_drop"),
}  # fmt: skip
SWITCHES = ("distractor", "memory", "window")

LevelKey = tuple[str, ...]
"""Levels of a published cell, in the order of AXES."""


def options_of(name: str) -> dict[str, Any]:
    """Return the revision options of a published sweep, which also identify its edition.

    Keys: requested ([probe, length] pairs; empty for rivals and open-weight models), source, version, edition. `name`
    must be printed-v1, printed-v2, printed-v2-open-weight, printed-tra, printed-wall or printed-atlas, which is not
    checked.
    """
    if name in RIVALS:
        return {"requested": [], "source": RIVALS[name].source, "version": "", "edition": RIVALS[name].edition}
    lengths = [] if name == OPEN_WEIGHT else LENGTHS
    requested = [[probe, length] for probe in ("clean", "junk", "needle") for length in lengths]
    version = "v2" if name == OPEN_WEIGHT else name.removeprefix(PUBLISHED_PREFIX)
    first = [["val", 0]] if requested else []
    return {"requested": [*first, *requested], "source": SOURCE, "version": version, "edition": EDITION}


def published_sweep(name: str) -> Sheet:
    """Return the published sweep of that name, read from the CSV files; `name` must be in PUBLISHED."""
    if name in RIVALS:
        return RIVALS[name].sheet(name)
    return _open_weight_sheet() if name == OPEN_WEIGHT else _complete_sheet(name.removeprefix(PUBLISHED_PREFIX))


def _measured(probe: str, metric: str, length: int, text: str) -> Measurement:
    """Return a printed or logged number as a measurement in the unit of its metric; text of shares is a percentage."""
    return printed_measurement(probe, metrics.metric(probe, metric), length, text)


def _as_printed(table: str, probe: str, metric: str, length: int, text: str) -> Measurement:
    """Return a number as a table prints it, under the probe `table-N`."""
    return replace(_measured(probe, metric, length, text), probe=f"table-{table}", metric=f"{probe}.{metric}")


def _slug(levels: Mapping[str, str]) -> str:
    bits = {"off": "0", "on": "1"}
    switches = "-".join(f"{axis[0]}{bits[levels[axis]]}" for axis in SWITCHES)
    return f"{levels['attn_type']}-{levels['reg_mode']}-{switches}-s0"


def is_published_cell(cell: str, slug: str) -> bool:
    """Return True if the id of a cell is the hash of a published sweep's name and the slug.

    The complete config of such cells is unknown, so that their id is not that of a config.
    """
    return any(cell == published_cell_id(sweep, slug) for sweep in PUBLISHED)


def _cell(sweep: str, slug: str, levels: Mapping[str, str], config: Mapping[str, Any], tokens: int) -> CellRecord:
    return CellRecord(
        id=published_cell_id(sweep, slug), slug=slug, seed=0, levels=levels, config=config, axes=levels, tokens=tokens
    )


def _config(levels: Mapping[str, str]) -> dict[str, Any]:
    """Return the known part of the recipe, with the keys of a cell's config.

    It has the sections model, data, train and eval, and the seed 0. `levels` are the cell's levels by axis.
    """
    on = {axis: level == "on" for axis, level in levels.items()}
    memory = "gated_delta" if on["memory"] else "none"
    return {
        "model": {"attn_type": levels["attn_type"], "memory": memory, "window": on["window"]},
        "data": {"corpus": "fineweb-edu", "tokenizer": "gpt2"},
        "train": {
            "tokens": TOKENS,
            "seq_len": 2048,
            "batch_tokens": STEP_TOKENS,
            "micro_batch": 4,
            "schedule": "linear",
            "loss_reduction": "sum",
            "regularizer": levels["reg_mode"],
            "distractor": on["distractor"],
        },
        "eval": {"lengths": list(LENGTHS), "needle_trials": 16, "needle_digits": 5, "documents": 16, "junk_rows": 16},
        "seed": 0,
    }


def _key(row: Mapping[str, str]) -> LevelKey:
    return tuple(row[axis] for axis in AXES)


def _rows_by_cell(name: str) -> dict[LevelKey, list[dict[str, str]]]:
    rows_by_cell: dict[LevelKey, list[dict[str, str]]] = defaultdict(list)
    for row in rows(name):
        rows_by_cell[_key(row)].append(row)
    return rows_by_cell


def _complete_sheet(version: str) -> Sheet:
    """Return the sheet of one version (v1 or v2) of the complete results.

    A cell has measurements as printed (probes `table-N`), as logged, and of its training; a curve; and its release of
    torch.
    """
    name = f"{PUBLISHED_PREFIX}{version}"
    lengths, small, curves = _rows_by_cell("lengths"), _rows_by_cell(f"small-{version}"), _rows_by_cell("curves")
    runs = {_key(row): row for row in rows("runs")}
    keys, cells, values = [], [], {}
    for row in rows(f"complete-{version}"):
        levels, key = {axis: row[axis] for axis in AXES}, _key(row)
        cell = _cell(name, _slug(levels), levels, _config(levels), TOKENS)
        keys.append(key)
        cells.append(cell)
        measurements = [_measured(*COMPLETE_COLUMNS["val_loss"], row["val_loss"])]
        measurements += [_as_printed("6", *COMPLETE_COLUMNS[column], row[column]) for column in COMPLETE_COLUMNS]
        for logged in lengths[key]:
            measurements += _logged_measurements(logged)
        for printed in small[key]:
            probe, metric = SMALL_TABLE_COLUMNS[printed["column"]]
            length = int(printed["length"])
            measurements.append(_as_printed(printed["table"], probe, metric, length, printed["printed"]))
            if metric == "step_seconds":
                measurements.append(_measured(probe, metric, 0, printed["logged"] or printed["printed"]))
        values[cell.id] = measurements + _training_measurements(levels, runs[key])
    by_id = {cell.id: key for cell, key in zip(cells, keys, strict=True)}
    return Sheet(
        name=name,
        cells=cells,
        values=values,
        version=version,
        curves={cell: [_point(row) for row in curves[key]] for cell, key in by_id.items()},
        torch={cell: runs[key]["torch"] for cell, key in by_id.items()},
        ran=dict.fromkeys(by_id, L4),
    )


def _training_measurements(levels: Mapping[str, str], run: Mapping[str, str]) -> list[Measurement]:
    """Return the numbers of a training log besides its losses.

    They are throughput.mfu_paper, .train_seconds and .parameters, and needle.absent_nats at a context of 2048 tokens.

    Args:
        levels: levels of the cell; mixer and memory give the number of parameters.
        run: row of `runs.csv`.
    """
    size = PARAMETERS[levels["attn_type"], levels["memory"]]
    return [
        _measured("throughput", "mfu_paper", 0, run["mfu"]),
        _measured("throughput", "train_seconds", 0, run["train_seconds"]),
        Measurement(probe="throughput", metric="parameters", value=float(size), unit="parameters"),
        _per_digit("absent_nats", LENGTHS[0], run["absent_nats"]),
    ]


def _point(row: Mapping[str, str]) -> CurvePoint:
    """Return a point of a training curve from a row of `curves.csv`.

    Tokens are the step times the tokens of a step (STEP_TOKENS). The logs do not contain the training loss, which is
    None; the speed is None if the row lacks it.
    """
    step = int(row["step"])
    speed = float(row["tokens_per_s"]) if row["tokens_per_s"] else None
    return CurvePoint(
        step=step,
        tokens=step * STEP_TOKENS,
        wall_s=float(row["wall_s"]),
        train_loss=None,
        val_loss=float(row["val_loss"]),
        tokens_per_s=speed,
    )


def _per_digit(metric: str, length: int, text: str) -> Measurement:
    return Measurement(probe="needle", metric=metric, length=length, value=float(text), unit="nats/digit", n=DIGITS)


def _logged_measurements(row: Mapping[str, str]) -> list[Measurement]:
    """Return the logged numbers at one context length, from a row of `lengths.csv`.

    In this order: clean.nats, junk.nats, needle.digit_accuracy (a fraction of DIGITS digits) and needle.nats.
    """
    length = int(row["length"])
    hits = round(float(row["needle"]) * DIGITS / 100)  # the logs averaged in single precision
    return [
        _measured("clean", "nats", length, row["clean"]),
        _measured("junk", "nats", length, row["junk"]),
        Measurement(
            probe="needle", metric="digit_accuracy", length=length, value=hits / DIGITS, unit="fraction", n=DIGITS
        ),
        _per_digit("nats", length, row["needle_nats"]),
    ]


def _open_weight_sheet() -> Sheet:
    """Return the sheet of the open-weight models: one cell per model, without curves.

    Measurements are in bits per token; a model that only the table of training budgets lists has none. The budgets are
    in the config, under `published`.
    """
    budgets = {row["model"]: row for row in rows("budgets")}
    names = list(dict.fromkeys([*(row["model"] for row in rows("open-weight")), *budgets]))
    measured = {row["model"]: row for row in rows("open-weight")}
    cells, values = [], {}
    for name in names:
        facts = {"model": name, "params": measured.get(name, budgets.get(name, {}))["params"]}
        facts |= {key: text for key, text in budgets.get(name, {}).items() if key != "model"}
        levels = dict.fromkeys(AXES, "-") | {"attn_type": name}
        cell = _cell(OPEN_WEIGHT, name, levels, {"published": facts}, 0)
        cells.append(cell)
        row = measured.get(name, {})
        measurements = []
        for column, text in row.items():
            probe, _, length_name = column.partition("_")
            if probe in ("clean", "junk", "needle"):
                metric = "digit_accuracy" if probe == "needle" else "bits"
                measurement = _measured(probe, metric, {"2k": 2048, "64k": 65536, "wavg": 0}[length_name], text)
                measurements.append(measurement)
        values[cell.id] = measurements
    return Sheet(OPEN_WEIGHT, cells, values, "v2")
