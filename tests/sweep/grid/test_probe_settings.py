"""Settings of probes: spelling in a grid, former names, and the stored form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from atma_sweep.model.config import Int, knob
from atma_sweep.sweep.config import CellConfig, EvalConfig
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.probes import PROBES, ProbeConfig, bound, register_probe, requested
from atma_sweep.sweep.probes.needle import Needle

Cells = Callable[..., list[Cell]]
OLD: dict[str, Any] = {
    "probes": ["val", "clean", "junk", "needle"], "lengths": [32, 64], "validate_every": 10, "validation_tokens": 256,
    "documents": 2, "junk_rows": 3, "needle_trials": 4, "needle_digits": 2, "needle_seed": 9, "chunk_tokens": 8192,
}  # fmt: skip
"""The eval section as databases and job files have held it from the first release."""


def test_stored_eval_section_round_trips() -> None:
    config = CellConfig.model_validate({"eval": OLD})
    needle, junk = (bound(name, config).settings for name in ("needle", "junk"))
    assert (needle.trials, needle.digits, needle.seed, junk.rows) == (4, 2, 9, 3)
    assert config.model_dump(mode="json")["eval"] == OLD
    lengths = [(name, length) for name in ("clean", "junk", "needle") for length in (32, 64)]
    assert requested(config.eval) == [("val", 0), *lengths]


@pytest.mark.parametrize("spelling", [
    "{needle_trials: 4, junk_rows: 3}", "{settings: {needle: {trials: 4}, junk: {rows: 3}}}",
    "{settings.needle.trials: 4, junk_rows: 3}", "{needle_trials: 4.0, settings: {junk.rows: 3}}",
])  # fmt: skip
def test_probe_setting_spellings_are_equivalent(cells: Cells, spelling: str) -> None:
    (cell,) = cells(f"set:\n  eval: {spelling}\n")
    (plain,) = cells("")
    assert cell.id == plain.id
    stored = cell.config.model_dump(mode="json")["eval"]
    assert (stored["needle_trials"], stored["junk_rows"], stored["needle_seed"]) == (4, 3, 1234)
    assert "settings" not in stored
    assert CellConfig.model_validate(cell.config.model_dump(mode="json")).eval == cell.config.eval


def test_probe_setting_overrides_spelling_of_base(cells: Cells) -> None:
    (cell,) = cells("set:\n  eval.settings.junk.rows: 5\n", base="tiny")
    assert bound("junk", cell.config).settings.rows == 5, "the base says junk_rows: 8"


def test_settings_of_unused_probe_are_preserved(cells: Cells) -> None:
    (cell,) = cells("set:\n  eval: {probes: [val], needle_trials: 4}\n")
    stored = cell.config.model_dump(mode="json")["eval"]
    assert stored["needle_trials"] == 4
    assert "junk_rows" not in stored


def test_probe_setting_spellings_must_agree() -> None:
    with pytest.raises(
        ValueError, match=r"needle_trials and settings\.needle\.trials are the same setting with different values"
    ):
        EvalConfig.model_validate({"needle_trials": 3, "settings": {"needle": {"trials": 4}}})


def test_plugin_probe_settings_are_outside_the_id(cells: Cells) -> None:
    class LampConfig(ProbeConfig):
        lamps: Int = knob(2, "Lamps.", ge=1)

    with PROBES.scope():
        register_probe("glow")(type("Glow", (Needle,), {"Config": LampConfig}))
        ids = set()
        for lamps in (2, 3):
            (cell,) = cells(f"set:\n  eval: {{probes: [val, glow], settings: {{glow: {{lamps: {lamps}}}}}}}\n")
            ids.add(cell.id)
            assert cell.config.model_dump(mode="json")["eval"]["settings"] == {"glow": {"lamps": lamps}}
        (cell,) = cells("set:\n  eval.probes: [val, glow]\n")
        assert bound("glow", cell.config).settings.lamps == 2
    (plain,) = cells("")
    assert ids == {cell.id, plain.id}
