"""A plugin file with a mixer, a memory and a regularizer: in the grid, the id, training and reloading."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import atma_sweep
import pytest
from atma_sweep.sweep.attempt.cell_runner import CellRunner
from atma_sweep.sweep.attempt.trained_cells import restore_cell
from atma_sweep.sweep.commands import verify
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import Cell
from attempts import Room, room_of, small_grid
from registries import scope

PARTS = """
import torch
from atma_sweep.model import (
    Memory, MemoryConfig, Mixer, Position, register_memory, register_mixer, register_position, register_regularizer
)

@register_mixer("flat")
class Flat(Mixer):
    def forward(self, q, k, v, *, window):
        return v.repeat_interleave(q.size(2) // v.size(2), 2)

@register_memory("leak")
class Leak(Memory):
    class Config(MemoryConfig):
        keep: float = 0.5

    def __init__(self, model, config):
        super().__init__(model, config)
        self.gain = torch.nn.Parameter(torch.full((model.d_model,), config.keep))

    def forward(self, x, q, k, v):
        return x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(1, -1, 1) * self.gain

@register_position("ramp")
class Ramp(Position):
    def __init__(self, model, config):
        super().__init__(model, config)
        self.slope = torch.nn.Parameter(torch.full((model.d_model,), 0.01))

    def forward(self, places):
        return places[..., None] * self.slope

@register_regularizer("shrink")
def shrink(streams, directions):
    return torch.stack([x.float().square().mean() for x in streams])
"""
AXES = "plugins: [parts.py]\naxes: {attn_type: [flat, nope], memory: [leak, off], reg_mode: [shrink, baseline]}\n"
Cells = Callable[..., list[Cell]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.usefixtures("registries")
def test_plugin_hash_is_in_the_id_only_where_used(write: Callable[..., Path], cells: Cells) -> None:
    ids = {}
    for text in (PARTS, f"{PARTS}# reworded\n"):
        write(text, "parts.py")
        with scope():
            ids[text] = cells(AXES)
        for cell in ids[text]:
            model, train = cell.config.model, cell.config.train
            for name, of, source in (
                ("flat", model.attn_type, model.mixer_source), ("leak", model.memory, model.memory_source),
                ("shrink", train.regularizer, train.regularizer_source),
            ):  # fmt: skip
                assert source == (digest(text) if of == name else None)
    first, second = ids.values()
    same = [
        first_cell.slug
        for first_cell, second_cell in zip(first, second, strict=True)
        if first_cell.id == second_cell.id
    ]
    assert same == ["nope-baseline-d0-m0-w0-s0"]
    assert len({cell.id for cell in first}) == 8
    write(f"{PARTS}# positions\n", "parts.py")
    placed, plain = cells("plugins: [parts.py]\naxes: {attn_type: [nope], model.positions: [ramp, none]}\n")
    assert placed.config.model.position_source == digest(f"{PARTS}# positions\n")
    assert (plain.config.model.position_source, plain.id) == (None, first[-1].id)
    (plain,) = cells("axes: {attn_type: [nope]}\n")
    assert plain.id == first[-1].id


@pytest.mark.usefixtures("registries")
def test_plugin_settings_and_misspelled_names(write: Callable[..., Path], cells: Cells) -> None:
    write(PARTS + "# settings\n", "parts.py")
    lines = "plugins: [parts.py]\naxes: {memory: [leak], model.memories.leak.keep: [0.5, 0.9]}\n"
    assert [cell.config.model.memories["leak"]["keep"] for cell in cells(lines)] == [0.5, 0.9]
    for axis, word in (("memory", "leek"), ("reg_mode", "shrik")):
        with pytest.raises(GridError, match=rf"axes\.{axis}: no level '{word}'; .*; did you mean '(leak|shrink)'"):
            cells(f"plugins: [parts.py]\naxes: {{{axis}: [{word}]}}\n")
    with pytest.raises(GridError, match=r"model\.memory_source.* is computed from the plugin file; remove it"):
        cells("plugins: [parts.py]\nset: {model.memory_source: abc}\n")
    with pytest.raises(GridError, match=r"regularizer_source.* is computed from the plugin file; remove it"):
        cells("plugins: [parts.py]\nset: {train.regularizer_source: abc}\n")


KNOBS = """
from atma_sweep.model import Mixer, MixerConfig, register_mixer
from atma_sweep.model.config import Int, knob

@register_mixer("knobs")
class Knobs(Mixer):
    class Config(MixerConfig):
        one: Int = knob(1, "One.", identity=1)
        two: Int = knob(2, "Two.", identity=3)
        plain: int = 4
"""


@pytest.mark.usefixtures("registries")
def test_possible_ids_without_running_the_plugin(write: Callable[..., Path], cells: Cells) -> None:
    """Only the plugin knows which settings are at their identity default; the id must be among the candidates."""
    write(KNOBS, "knobs.py")
    with scope():
        grid_cells = cells("plugins: [knobs.py]\naxes: {attn_type: [knobs], model.mixers.knobs.one: [1, 5], "
                      "model.mixers.knobs.two: [2, 3], model.mixers.knobs.canon: [on, off]}\n")  # fmt: skip
    dumps = [cell.config.model_dump(mode="json") for cell in grid_cells]
    assert len({cell.id for cell in grid_cells}) == 8
    for cell, config in zip(grid_cells, dumps, strict=True):
        assert verify.identify(config, cell.id) == cell.id
    # what stands in the id cannot be another value; what does not is nobody's word but the plugin's
    off = next(
        config for cell, config in zip(grid_cells, dumps, strict=True) if cell.config.model.mixers["knobs"]["one"] == 5
    )
    (claimed,) = [cell.id for cell, config in zip(grid_cells, dumps, strict=True) if config is off]
    for change in ({"one": 6}, {"plain": 5}):
        changed = off["model"]["mixers"]["knobs"] | change
        forged = off | {"model": off["model"] | {"mixers": {"knobs": changed}}}
        assert verify.identify(forged, claimed) != claimed
    settings = dict.fromkeys("abcdefghi", 1)
    several_parts = dumps[0] | {"model": dumps[0]["model"] | {"mixers": {"knobs": settings}}}
    with pytest.raises(LookupError, match="9 settings are of plugins that are not loaded"):
        verify.identify(several_parts, grid_cells[0].id)


@pytest.fixture
def plugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registries: None) -> Room:
    """Return a trained cell with the plugin's memory and regularizer, as a new process sees it."""
    folder = tmp_path / "grid"
    folder.mkdir()
    grid = small_grid(folder)
    # a text of its own, since a file is imported once a process
    text = f"{PARTS}# {tmp_path}\n"
    (folder / "parts.py").write_text(text)
    grid.write_text(grid.read_text() + "plugins: [parts.py]\n")
    # as on a GPU whose peak is known
    monkeypatch.setattr(CellRunner, "_peak_flops", lambda self: 4e12)
    with scope():
        room = room_of(grid, tmp_path, "memory=leak", "reg_mode=shrink", "model.positions=ramp")
        assert room.run(keep="weights").state == "done"
    monkeypatch.delitem(sys.modules, f"atma_sweep_plugin_{digest(text)[:12]}")
    return room


@pytest.mark.thorough
def test_plugin_cell_is_trained_evaluated_and_loaded(plugged: Room) -> None:
    (attempt,) = plugged.store.attempts(plugged.cell.id)
    assert len(plugged.curve(attempt)) == 12
    record = plugged.store.cell(plugged.cell.id)
    assert verify.identify(record.config, plugged.cell.id) == plugged.cell.id
    model = record.config["model"]
    for change in ({"d_model": 24}, {"memories": {"leak": {"keep": 0.4}}}):
        assert verify.identify(record.config | {"model": model | change}, plugged.cell.id) != plugged.cell.id
    with pytest.raises(LookupError, match="leak"):
        verify.identify(record.config | {"model": model | {"memory_source": None}}, plugged.cell.id)
    with scope():
        assert restore_cell(record, plugged.runs) == plugged.cell
        assert verify.identify(record.config, plugged.cell.id) == plugged.cell.id
    del sys.modules[f"atma_sweep_plugin_{plugged.cell.config.plugins[0].sha256[:12]}"]
    trained = atma_sweep.load(plugged.cell.id, db=str(plugged.store.url))
    assert type(trained.model.blocks[2].mix.memory).__name__ == "Leak"
    assert plugged.run("evaluate", weights=attempt.weights).state == "done"


def test_plugin_without_flops_gives_a_reason_for_mfu(plugged: Room) -> None:
    (attempt,) = plugged.store.attempts(plugged.cell.id)
    by_metric = {row.metric: row for row in plugged.store.measurements(plugged.cell.id) if row.probe == "throughput"}
    assert (by_metric["mfu"].value, by_metric["mfu"].reason) == (
        None,
        "n/a: memory 'leak' does not define its FLOPs (forward_flops)",
    )
    # the paper's formula counts parameters, whatever the parts do
    assert 0 < by_metric["mfu_paper"].value < 1
    assert by_metric["mfu_paper"].reason is None
    for point in plugged.store.curve(attempt.id):
        assert (point.mfu, point.mfu_paper > 0) == (None, True)
