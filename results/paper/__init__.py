"""The paper's printed numbers (arXiv:2606.25156, versions 1 and 2) as CSV beside this file, and as read-only sweeps.

`printed-v1` holds 100 cells, `printed-v2` 120. In both, `clean`, `junk` and `needle` are what the authors' logs say at six
lengths, `val` and `throughput.mfu_paper` what the complete table prints, since no log of them is at hand. A number as
Table N prints it stands under the probe `table-N` with the metric `PROBE.METRIC` and the length it is about; N follows the
first version: 4 is training throughput (6 in the second version), 6 the complete results (8). `printed-v2-open-weight`
holds the rows of the second version's tables of training budgets and of open-weight models.

Losses are nats per token (the open-weight table: bits per token), accuracies and MFU fractions, step times seconds.
"""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import socket
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

from sqlalchemy import insert, update
from sqlalchemy.orm import Session

from ..errors import StoreError, SweepUnknown
from ..store import attempt_queries, queries
from ..store.records import AXES, CellRecord, Measurement, Owner, Provenance
from ..store.schema import AttemptRow, MeasurementRow, ProvenanceRow, SweepRow
from ..store.store import Store, StoreMissing, open_store

FOLDER = Path(__file__).parent
VERSIONS = ("v1", "v2")
SWEEPS = tuple(f"printed-{version}" for version in VERSIONS)
OPEN_WEIGHT = "printed-v2-open-weight"
"""The companion sweep of the open-weight models."""
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
DIGITS = 80
"""Digits behind a needle accuracy: 16 trials of 5, so every value is a multiple of 1.25%."""
MOST_FREQUENT = 14
"""How many of those DIGITS are a 7, the most frequent: what always answering 7 gets right at every length."""
TOKENS, STEP_TOKENS = 996_147_200, 524_288
PARAMETERS = {
    ("rope", "off"): 369_692_800,
    ("rope", "on"): 378_155_200,
    ("nope", "off"): 369_717_376,
    ("nope", "on"): 378_179_776,
    ("polar", "off"): 369_758_464,
    ("polar", "on"): 378_220_864,
}
"""By mixer and memory: all parameters of the published models, both vocabulary matrices included."""
SOURCE = "arXiv:2606.25156"
GRID_FILE = "results/paper"
OWNER = "published"
LEASE_S = 30.0
COMPLETE = {
    "val_loss": ("val", "val_loss", 0),
    "clean_2k": ("clean", "nats", 2048),
    "clean_64k": ("clean", "nats", 65536),
    "junk_2k": ("junk", "nats", 2048),
    "junk_64k": ("junk", "nats", 65536),
    "needle_2k": ("needle", "digit_accuracy", 2048),
    "needle_64k": ("needle", "digit_accuracy", 65536),
    "mfu": ("throughput", "mfu_paper", 0),
}
SMALL = {
    "clean": ("clean", "nats"),
    "needle": ("needle", "digit_accuracy"),
    "step_seconds": ("throughput", "step_seconds"),
    "mfu": ("throughput", "mfu_paper"),
    "mfu_drop": ("throughput", "mfu_drop"),
}
UNITS = {"val_loss": "nats/token", "nats": "nats/token", "bits": "bits/token", "step_seconds": "s"}


def rows(name: str) -> list[dict[str, str]]:
    """A shipped CSV (`complete-v2`, `lengths`, `small-v1`, `open-weight`, ...) as text, one mapping a row."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def load_published(store: Store) -> list[str]:
    """Adds the sweeps of this module that the database lacks; returns the names of those added.

    Safe to call again and after an interruption. They never become the default sweep of a database that has another.
    Raises StoreError when another sweep has such a name, SweepBusy while another process loads them.
    """
    have = {summary.name: summary.read_only for summary in store.sweeps()}
    added = []
    for place, sheet in enumerate((_open_weight(), *map(_complete, VERSIONS))):
        if not (sheet.name in have and _ours(store, sheet.name) and have[sheet.name]):
            _load(store, sheet, place)
            added.append(sheet.name)
    return added


def open_published() -> Store:
    """A temporary database with the published sweeps; its file is removed when the store is no longer used."""
    folder = tempfile.mkdtemp(prefix="atma-published-")
    try:
        store = open_store(Path(folder) / "published.db", create=True)
        weakref.finalize(store, shutil.rmtree, folder, ignore_errors=True)
        load_published(store)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return store


def with_published(store: Store, sweep: str) -> Store:
    """The store itself when it holds the sweep, else, for a published one, a temporary one that the whole process shares.

    Raises SweepUnknown, and StoreError when a sweep of one's own has a published name, from a time when it could.
    """
    try:
        if sweep in (*SWEEPS, OPEN_WEIGHT):
            _ours(store, sweep)
        else:
            store.revision(sweep)
    except SweepUnknown:
        if not is_published(sweep):
            raise
        return _shared()
    return store


def open_with_published(db: str | Path | None, sweep: str | None) -> Store:
    """The database; when a published sweep is asked for that it lacks, or there is no database, a temporary one with those.

    Raises as open_store does.
    """
    if sweep is None or not is_published(sweep):
        return open_store(db)
    try:
        return with_published(open_store(db), sweep)
    except StoreMissing:
        return _shared()


def is_published(sweep: str) -> bool:
    """Whether it is the name of one of this module's sweeps."""
    return sweep in (*SWEEPS, OPEN_WEIGHT)


@cache
def _shared() -> Store:
    return open_published()


# --- from CSV to records --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sheet:
    """A sweep to be stored: its cells in order and, by cell, the numbers."""

    name: str
    cells: Sequence[CellRecord]
    values: Mapping[str, Sequence[Measurement]]
    requested: Sequence[tuple[str, int]]
    version: str


def _fraction(text: str) -> float:
    """A printed percentage as the fraction whose shortest decimal has the same digits."""
    return float(Decimal(text) / 100)


def _number(metric: str, text: str) -> float:
    return float(text) if metric in UNITS else _fraction(text)


def _measured(probe: str, metric: str, length: int, text: str) -> Measurement:
    return Measurement(
        probe=probe, metric=metric, length=length, value=_number(metric, text), unit=UNITS.get(metric, "fraction")
    )


def _as_printed(table: str, probe: str, metric: str, length: int, text: str) -> Measurement:
    value, unit = _number(metric, text), UNITS.get(metric, "fraction")
    return Measurement(probe=f"table-{table}", metric=f"{probe}.{metric}", length=length, value=value, unit=unit)


def _slug(levels: Mapping[str, str]) -> str:
    bits = {"off": "0", "on": "1"}
    switches = "-".join(f"{axis[0]}{bits[levels[axis]]}" for axis in ("distractor", "memory", "window"))
    return f"{levels['attn_type']}-{levels['reg_mode']}-{switches}-s0"


def _id(sweep: str, slug: str) -> str:
    # the text that is hashed is no canonical JSON, so no cell of a grid can have the id
    return hashlib.sha256(f"{sweep}/{slug}".encode()).hexdigest()[:12]


def is_published_cell(cell: str, slug: str) -> bool:
    """Whether a cell is one of the published ones, whose ids are those of their names: nobody knows their whole config."""
    return any(cell == _id(sweep, slug) for sweep in (*SWEEPS, OPEN_WEIGHT))


def _cell(sweep: str, slug: str, levels: Mapping[str, str], config: Mapping[str, Any], tokens: int) -> CellRecord:
    return CellRecord(id=_id(sweep, slug), slug=slug, seed=0, levels=levels, config=config, axes=levels, tokens=tokens)


def _config(levels: Mapping[str, str]) -> dict[str, Any]:
    """What is known of the recipe, under the names that a cell of a grid uses."""
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


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[axis] for axis in AXES)


def _complete(version: str) -> _Sheet:
    name = f"printed-{version}"
    lengths: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    small: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in rows("lengths"):
        lengths[_key(row)].append(row)
    for row in rows(f"small-{version}"):
        small[_key(row)].append(row)
    cells, values = [], {}
    for row in rows(f"complete-{version}"):
        levels = {axis: row[axis] for axis in AXES}
        cell = _cell(name, _slug(levels), levels, _config(levels), TOKENS)
        cells.append(cell)
        found = [_measured(*COMPLETE[column], row[column]) for column in ("val_loss", "mfu")]
        found += [_as_printed("6", *COMPLETE[column], row[column]) for column in COMPLETE]
        for logged in lengths[_key(row)]:
            found += _logged(logged)
        for printed in small[_key(row)]:
            probe, metric = SMALL[printed["column"]]
            length = int(printed["length"])
            found.append(_as_printed(printed["table"], probe, metric, length, printed["printed"]))
            if metric == "step_seconds":
                found.append(_measured(probe, metric, 0, printed["logged"] or printed["printed"]))
        size = PARAMETERS[levels["attn_type"], levels["memory"]]
        found.append(Measurement(probe="throughput", metric="parameters", value=float(size), unit="parameters"))
        values[cell.id] = found
    requested = [("val", 0), *((probe, length) for probe in ("clean", "junk", "needle") for length in LENGTHS)]
    return _Sheet(name, cells, values, requested, version)


def _logged(row: Mapping[str, str]) -> list[Measurement]:
    length = int(row["length"])
    hits = round(float(row["needle"]) * DIGITS / 100)  # the logs averaged in single precision
    return [
        _measured("clean", "nats", length, row["clean"]),
        _measured("junk", "nats", length, row["junk"]),
        Measurement(
            probe="needle", metric="digit_accuracy", length=length, value=hits / DIGITS, unit="fraction", n=DIGITS
        ),
    ]


def _open_weight() -> _Sheet:
    budgets = {row["model"]: row for row in rows("budgets")}
    names = list(dict.fromkeys([*(row["model"] for row in rows("open-weight")), *budgets]))
    measured = {row["model"]: row for row in rows("open-weight")}
    cells, values = [], {}
    for name in names:
        known = {"model": name, "params": measured.get(name, budgets.get(name, {}))["params"]}
        known |= {key: text for key, text in budgets.get(name, {}).items() if key != "model"}
        levels = dict.fromkeys(AXES, "-") | {"attn_type": name}
        cell = _cell(OPEN_WEIGHT, name, levels, {"published": known}, 0)
        cells.append(cell)
        row = measured.get(name, {})
        found = []
        for column, text in row.items():
            probe, _, which = column.partition("_")
            if probe in ("clean", "junk", "needle"):
                metric = "digit_accuracy" if probe == "needle" else "bits"
                one = _measured(probe, metric, {"2k": 2048, "64k": 65536, "wavg": 0}[which], text)
                found.append(one)
        values[cell.id] = found
    return _Sheet(OPEN_WEIGHT, cells, values, [], "v2")


# --- into the database ----------------------------------------------------------------------------------------------


def _ours(store: Store, name: str) -> bool:
    if store.revision(name).grid_file == GRID_FILE:
        return True
    raise StoreError(
        f"a sweep of your own is named {name!r}, as the paper's numbers are: export it, import it with --name into a new "
        "database, and use that"
    )


def _load(store: Store, sheet: _Sheet, place: int) -> None:
    if any(summary.name == sheet.name for summary in store.sweeps()):
        _ours(store, sheet.name)
    options = {"requested": [list(pair) for pair in sheet.requested], "source": SOURCE, "version": sheet.version}
    store.record_revision(
        sheet.name,
        grid_text=f"# the numbers printed in {SOURCE}{sheet.version}\n",
        grid_file=GRID_FILE,
        options=options,
        cells=sheet.cells,
    )
    # before every launch, so that the default sweep stays the one that was launched last
    early = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=place)
    store.write(partial(_back_date, name=sheet.name, moment=early))
    loader = Owner(name=OWNER, host=socket.gethostname(), pid=os.getpid(), started=0.0)
    fence = store.acquire_sweep(sheet.name, loader, LEASE_S)
    for attempt in store.live_attempts(sheet.name):
        store.interrupt_dead(attempt.id, "loading the published numbers was interrupted")
    states = store.states([cell.id for cell in sheet.cells])
    lacking = [cell for cell in sheet.cells if states[cell.id].state != "done"]
    if lacking:
        store.write(partial(_fill, sheet=sheet, cells=lacking, fence=fence))
    store.release_sweep(sheet.name, fence)
    store.set_read_only(sheet.name)


def _back_date(session: Session, name: str, moment: datetime) -> None:
    session.execute(update(SweepRow).where(SweepRow.name == name).values(launched_at=moment))


def _fill(session: Session, sheet: _Sheet, cells: Sequence[CellRecord], fence: int) -> None:
    """One finished training of the paper for each cell, with its numbers: at once, since attempt by attempt takes seconds."""
    moment = queries.now(session)
    numbers = {cell.id: len(attempt_queries.attempts(session, cell.id)) + 1 for cell in cells}
    rows = [_attempt(cell, numbers[cell.id], fence, moment) for cell in cells]
    made = session.scalars(insert(AttemptRow).returning(AttemptRow.id, sort_by_parameter_order=True), rows)
    ids = {cell.id: attempt for cell, attempt in zip(cells, made, strict=True)}
    session.execute(
        insert(ProvenanceRow), [{"attempt_id": ids[cell.id]} | vars(_provenance(sheet, cell)) for cell in cells]
    )
    found = [
        {"attempt_id": ids[cell.id], "created_at": moment} | vars(one)
        for cell in cells
        for one in sheet.values[cell.id]
    ]
    session.execute(insert(MeasurementRow), found)


def _attempt(cell: CellRecord, number: int, fence: int, moment: datetime) -> dict[str, Any]:
    steps = cell.tokens // STEP_TOKENS if cell.tokens else None
    return {
        "cell_id": cell.id,
        "number": number,
        "kind": "train",
        "state": "done",
        "fence": fence,
        "owner": OWNER,
        "host": "paper",
        "pid": 0,
        "pid_started": 0.0,
        "started_at": moment,
        "heartbeat_at": moment,
        "finished_at": moment,
        "step": steps or 0,
        "steps_total": steps,
        "phase": "probing" if steps else "starting",
        "run_dir": f"{cell.id}/{number}",
    }


def _provenance(sheet: _Sheet, cell: CellRecord) -> Provenance:
    own = bool(cell.tokens)
    return Provenance(
        config=cell.config,
        seed=0,
        host="paper",
        device="cuda" if own else "",
        gpu_name="NVIDIA L4" if own else None,
        gpu_count=1 if own else 0,
        dtype="bfloat16" if own else "",
        tokenizer="gpt2" if own else "",
        corpus="fineweb-edu" if own else "",
        extra={"published": {"source": SOURCE, "version": sheet.version, "seed": "none was set"}},
    )
