"""Declared contrasts: allowed values, storage, and that they change no cell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.reports.sweep_data import load_sweep_data
from atma_sweep.results.contrasts import Contrast, contrasts_as_json, contrasts_from_options
from atma_sweep.results.exchange.exporting import export_sweep
from atma_sweep.results.exchange.importing import import_bundle
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.host.processes import this_process
from atma_sweep.sweep.orchestrator.launch import LaunchRequest, claim_sweep

Write = Callable[..., Path]
HEAD = "name: g\nextends: micro\naxes: {attn_type: [polar, nope], memory: [off, on]}\n"
GOOD = """contrasts:
  - {measure: needle.digit_accuracy@1024, axis: memory, level: on, within: {attn_type: polar}, margin: 0.05}
  - {measure: clean.nats@avg, axis: attn_type, level: nope, reference: polar}
  - {measure: val.val_loss, axis: memory, level: gated_delta}
"""
NEEDLE = Contrast(
    probe="needle", metric="digit_accuracy", length=1024, axis="memory", level="on", within={"attn_type": "polar"}, margin=0.05
)  # fmt: skip
CLEAN = Contrast(probe="clean", metric="nats", length=None, axis="attn_type", level="nope", reference="polar")
VAL = Contrast(probe="val", metric="val_loss", length=0, axis="memory", level="on")


def fake(data: object) -> str:
    return "f" * 64


def test_contrasts_are_read(write: Write) -> None:
    assert load_grid(write(HEAD + GOOD)).contrasts == (NEEDLE, CLEAN, VAL)
    assert [contrast.measure for contrast in (NEEDLE, CLEAN, VAL)] == [
        "needle.digit_accuracy@1024",
        "clean.nats@avg",
        "val.val_loss",
    ]


def test_contrasts_accept_levels_of_include(write: Write) -> None:
    text = (
        "include: [{attn_type: rope, memory: on}]\ncontrasts: [{measure: val.val_loss, axis: attn_type, level: rope}]\n"
    )
    assert load_grid(write(HEAD + text)).contrasts[0].level == "rope"


def test_contrasts_allow_lengths_of_the_command_line(write: Write) -> None:
    grid = load_grid(write(HEAD + GOOD), sets=["eval.lengths=[64]"], rename="h")
    assert len(grid.expand(fake)) == 4


@pytest.mark.parametrize("text", [GOOD, "stop: {contrast: memory, metric: needle@1024, ci: 10}\n"])
def test_contrasts_and_stop_rule_change_no_id(write: Write, text: str) -> None:
    bare, declared = (load_grid(write(HEAD + more)).expand(fake) for more in ("", text))
    assert [(cell.id, cell.config) for cell in declared] == [(cell.id, cell.config) for cell in bare]


def test_contrast_options_round_trip_skipping_invalid() -> None:
    options = json.loads(json.dumps({"contrasts": contrasts_as_json((NEEDLE, CLEAN, VAL))}))
    assert contrasts_from_options(options) == (NEEDLE, CLEAN, VAL)
    good = options["contrasts"][0]
    bad = [1, {}, good | {"length": "x"}, good | {"within": [1]}, good | {"margin": "x"}, good | {"axis": None}]
    assert contrasts_from_options({"contrasts": [*bad, good]}) == (NEEDLE,)
    assert contrasts_from_options({"contrasts": 3}) == contrasts_from_options({}) == contrasts_from_options(None) == ()


def test_contrasts_are_stored_by_launch_and_in_bundles(write: Write, tmp_path: Path) -> None:
    grid = load_grid(write(HEAD + GOOD))
    request = LaunchRequest(grid=grid, cells=grid.expand(fake), runs=tmp_path)
    store = open_store(tmp_path / "a.db", create=True)
    for fence in (1, 2):
        assert claim_sweep(request, store, this_process("launch")) == fence
        store.release_sweep("g", fence)
        assert store.revision("g").number == 1, "the same launch again is the same revision"
    assert declared(store) == (NEEDLE, CLEAN, VAL)
    export_sweep(store, "g", tmp_path / "g.zip")
    second_store = open_store(tmp_path / "b.db", create=True)
    import_bundle(second_store, tmp_path / "g.zip")
    assert declared(second_store) == (NEEDLE, CLEAN, VAL)
    for database in (store, second_store):
        database.close()


def test_grid_without_contrasts_stores_no_option(write: Write, tmp_path: Path) -> None:
    grid = load_grid(write(HEAD))
    store = open_store(tmp_path / "a.db", create=True)
    claim_sweep(LaunchRequest(grid=grid, cells=grid.expand(fake), runs=tmp_path), store, this_process("launch"))
    assert set(store.revision("g").options) == {"price", "requested", "set"}
    assert declared(store) == ()
    store.close()


def declared(store: Store) -> tuple[Contrast, ...]:
    contrasts = load_sweep_data(store, "g").contrasts
    assert contrasts_from_options(store.revision("g").options) == contrasts
    return contrasts
