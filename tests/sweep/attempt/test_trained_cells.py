"""Trained cells from the database: configs restored to the same id, weights found, and one line for what is missing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atma_sweep
import pytest
import torch
from atma_sweep.model import registry
from atma_sweep.model.backbone import Backbone, build
from atma_sweep.model.config import Config, knob
from atma_sweep.model.mixers.softmax import NoPE
from atma_sweep.results.errors import CellAmbiguous, CellUnknown, StoreMissing, SweepUnknown
from atma_sweep.results.store.records import Owner
from atma_sweep.results.store.store import Store, open_store
from atma_sweep.sweep.attempt import trained_cells as loading
from atma_sweep.sweep.attempt.trained_cells import CellUnreadable, NotTrained, WeightsGone
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.checkpoints.checkpoint import CheckpointError
from atma_sweep.sweep.data.corpora import CorpusError
from atma_sweep.sweep.errors import MachineError, SweepError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid, shipped
from atma_sweep.sweep.grid.plugins import PluginChanged
from atma_sweep.sweep.orchestrator.supervisor import freeze_plugins
from factories import prepared_text, record_sweep
from patience import PATIENCE_S
from refusals import refused

OWNER = Owner(name="test", host="here", pid=1, started=1.0)
POLAR, NOPE, ROPE = (f"{name}-baseline-d0-m0-w0-s0" for name in ("polar", "nope", "rope"))
MIXER = """
from atma_sweep.model import MixerConfig
from atma_sweep.model.mixers.softmax import NoPE
from atma_sweep.model.registry import register_mixer

@register_mixer("flat")
class Flat(NoPE):
    class Config(MixerConfig):
        size: int = 3
"""


class Shelf:
    """A database with cells, of which some are trained by hand: weights drawn, not learned."""

    def __init__(self, folder: Path, write: Callable[..., Path], wake: Callable[[Backbone], None]) -> None:
        self.path, self.runs, self.write, self.wake = folder / "atma.db", folder / "atma-runs", write, wake
        self.text = prepared_text(folder, self.runs)
        self.store = open_store(self.path, create=True)
        cells = self.expand("axes: {attn_type: [polar, nope, rope]}\nset: {model.n_layers: 3}\n")
        self.cells = {cell.slug: cell for cell in cells}
        self.list("g", cells)

    def expand(self, text: str) -> list[Cell]:
        """The cells of a grid with these lines, on a prepared corpus."""
        return load_grid(self.write(f"name: g\nextends: micro\n{text}")).expand(self.text)

    def list(self, sweep: str, cells: list[Cell]) -> None:
        record_sweep(self.store, cells, sweep)

    def train(
        self, slug: str, state: Any = "done", *, seed: int = 0, keep: bool = True, address: str | None = None
    ) -> Backbone:
        cell = self.cells[slug]
        attempt = self.store.start_attempt(cell.id, owner=OWNER, fence=0)
        model = build(cell.config.model, seed=seed)
        self.wake(model)
        name = address or f"{attempt.run_dir}/weights.safetensors"
        checkpoint.save_weights(storage.resolve(self.runs, name), model)
        self.store.finish_attempt(attempt.id, 0, state, weights=name if keep else None)
        return model

    def stored(self, slug: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the config that the database holds of a cell."""
        import sqlite3

        with sqlite3.connect(self.path) as connection:
            ((text,),) = connection.execute("SELECT config FROM cell WHERE slug = ?", [slug]).fetchall()
            config = json.loads(text)
            change(config)
            connection.execute("UPDATE cell SET config = ? WHERE slug = ?", [json.dumps(config), slug])

    def load(self, cell_name: str, **options: Any) -> loading.LoadedModel:
        return atma_sweep.load(cell_name, db=self.path, **options)


@pytest.fixture
def shelf(tmp_path: Path, write: Callable[..., Path], wake: Callable[[Backbone], None]) -> Shelf:
    return Shelf(tmp_path, write, wake)


@torch.no_grad()
def test_loaded_model_equals_the_saved_model(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shelf.train(POLAR).eval()
    trained = shelf.load(POLAR)
    tokens_BT = torch.randint(0, 257, (2, 13), generator=torch.Generator().manual_seed(1))
    assert torch.equal(trained.model(tokens_BT), model(tokens_BT))
    assert trained.model(tokens_BT).std() > 0.1
    assert not trained.model.training
    assert {parameter.dtype for parameter in trained.model.parameters()} == {torch.float32}
    cell = shelf.cells[POLAR]
    assert (trained.cell, trained.slug, trained.config) == (cell.id, POLAR, cell.config)
    assert trained.tokenizer.encode("né").tolist() == [110, 195, 169]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trained.slug = "other"  # type: ignore[misc]
    # the same by another name, from the working folder, and with the folder of artifacts elsewhere
    monkeypatch.chdir(shelf.path.parent)
    monkeypatch.delenv("ATMA_DB", raising=False)
    elsewhere = shelf.runs.rename(shelf.runs.with_name("moved"))
    again = atma_sweep.load(cell.id[:7], runs=str(elsewhere), sweep="g")
    assert torch.equal(again.model(tokens_BT), model(tokens_BT))


def test_the_newest_finished_training_counts(shelf: Shelf) -> None:
    shelf.train(NOPE, seed=1)
    second = shelf.train(NOPE, seed=2)
    shelf.train(NOPE, "failed", seed=3)
    assert torch.equal(shelf.load(NOPE).model.embedding.weight, second.embedding.weight)
    shelf.train(NOPE, seed=4, keep=False)
    with pytest.raises(WeightsGone, match="not kept"):
        shelf.load(NOPE)


def test_weights_at_an_address_of_their_own(shelf: Shelf, tmp_path: Path) -> None:
    model = shelf.train(POLAR, address=f"file://{tmp_path}/elsewhere/polar.safetensors")
    assert torch.equal(shelf.load(POLAR).model.head.weight, model.head.weight)
    (tmp_path / "elsewhere" / "polar.safetensors").unlink()
    with pytest.raises(WeightsGone, match="are gone from file:///"):
        shelf.load(POLAR)


def assert_refused(call: Callable[[], object], error: type[Exception], *parts: str) -> None:
    """The call ends with one line that holds these words."""
    message = refused(call, error)
    assert [word for word in parts if word not in message] == []


def test_errors_of_load_name_the_remedy(shelf: Shelf, tmp_path: Path) -> None:
    name = f"cell {shelf.cells[ROPE].id} ({ROPE})"
    assert_refused(lambda: shelf.load(ROPE), NotTrained, f"{name} is not trained yet; launch its grid")
    shelf.train(ROPE, "diverged")
    assert_refused(lambda: shelf.load(ROPE), NotTrained, f"{name} diverged", "launch it with --retrain")
    shelf.train(POLAR)
    (weights,) = shelf.runs.glob(f"{shelf.cells[POLAR].id}/1/*.safetensors")
    (shelf.runs / "corpora").rename(tmp_path / "aside")
    with pytest.raises(CorpusError, match="no prepared corpus"):
        shelf.load(POLAR)
    (tmp_path / "aside").rename(shelf.runs / "corpora")
    assert_refused(
        lambda: shelf.load(POLAR, runs=tmp_path / "none"), WeightsGone, str(tmp_path / "none"), "--runs", "--retrain"
    )
    weights.write_bytes(weights.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="cannot be read"):
        shelf.load(POLAR)
    weights.unlink()
    assert_refused(lambda: shelf.load(POLAR), WeightsGone, "are gone from", "--retrain")
    assert WeightsGone("x").exit_code == 2


def test_load_finds_cells_like_show(shelf: Shelf, tmp_path: Path) -> None:
    shelf.train(NOPE)
    with pytest.raises(CellUnknown, match=f"did you mean {POLAR}"):
        shelf.load("polar-baseline-d0-m0-w0-s1")
    with pytest.raises(SweepUnknown, match="existing sweeps: g"):
        shelf.load(NOPE, sweep="h")
    with pytest.raises(StoreMissing, match="launch a grid first"):
        atma_sweep.load(NOPE, db=tmp_path / "none.db")
    # a later sweep without the cell hides it from nobody; one that has another cell of the slug goes first
    shelf.list("later", [shelf.cells[ROPE]])
    assert shelf.load(NOPE).cell == shelf.cells[NOPE].id
    (twin,) = shelf.expand("set: {model: {attn_type: nope, n_layers: 5}}\n")
    shelf.list("last", [twin])
    with pytest.raises(NotTrained, match=twin.id):
        shelf.load(NOPE)
    assert shelf.load(NOPE, sweep="g").cell == shelf.cells[NOPE].id
    shelf.list("last", [shelf.cells[NOPE], twin])
    with pytest.raises(CellAmbiguous, match="fits 2 cells"):
        shelf.load(NOPE)


def _stored(store: Store, cell: Cell, runs: Path) -> Cell:
    return loading.restore_cell(store.cell(cell.id), runs)


@pytest.mark.thorough
@pytest.mark.parametrize("grid", shipped())
def test_shipped_cells_come_back_from_the_database_as_they_were(
    grid: str, tmp_path: Path, fake_fingerprint: Callable[..., str]
) -> None:
    cells = load_grid(grid).expand(fake_fingerprint)
    store = open_store(tmp_path / "a.db", create=True)
    record_sweep(store, cells, "g")
    for cell in cells[:: max(1, len(cells) // 7)]:
        assert _stored(store, cell, tmp_path) == cell


def test_fields_newer_than_the_stored_config_leave_the_id_alone(shelf: Shelf) -> None:
    cell = shelf.cells[POLAR]

    def forget(config: dict[str, Any]) -> None:
        del config["train"]["deterministic"], config["model"]["init"], config["data"]["shuffle"], config["checkpoint"]
        config["model"]["mixers"]["polar"].pop("canon")

    shelf.stored(POLAR, forget)
    assert _stored(shelf.store, cell, shelf.runs) == cell

    class Later(Config):
        old: int = knob(1, "Always there.")
        new: int = knob(5, "Its working default has moved.", identity=2)
        other: int = knob(7, "In the id whatever it is.")

    assert loading.fill_identity_defaults(Later, {"old": 3}) == {"old": 3, "new": 2}


def test_a_config_that_means_another_cell_by_now_is_refused(shelf: Shelf) -> None:
    shelf.train(POLAR)
    shelf.stored(POLAR, lambda config: config["train"].update(muon_lr=0.5))
    assert_refused(
        lambda: shelf.load(POLAR),
        CellUnreadable,
        shelf.cells[POLAR].id,
        POLAR,
        "this version computes another id",
        "launch its grid again",
    )
    shelf.stored(POLAR, lambda config: config["train"].update(warmth=1))
    with pytest.raises(CellUnreadable, match=r"cannot read the config .*: Extra inputs are not permitted"):
        shelf.load(POLAR)
    shelf.train(NOPE)
    shelf.stored(NOPE, lambda config: config["model"].update(attn_type="elsewhere"))
    with pytest.raises(CellUnreadable, match="no mixer named 'elsewhere'"):
        shelf.load(NOPE)


@pytest.fixture
def plugged(shelf: Shelf, monkeypatch: pytest.MonkeyPatch, registries: None) -> Path:
    """A trained cell with a mixer from outside, as a new process finds it; returns the frozen copy of the file."""
    # a text of its own for each test, since a file is imported once a process
    source = shelf.write(f"{MIXER}# {shelf.path}\n", "flat.py")
    with registry.MIXERS.scope():
        plain = shelf.expand("plugins: [flat.py]\nset: {model: {attn_type: flat, n_layers: 3}}\n")
        frozen = freeze_plugins(plain, shelf.runs)
        source.unlink()
        (cell,) = frozen
        shelf.cells[cell.slug] = cell
        shelf.list("g", frozen)
        shelf.train(cell.slug)
    name = f"atma_sweep_plugin_{cell.config.plugins[0].sha256[:12]}"
    monkeypatch.delitem(sys.modules, name)
    return Path(cell.config.plugins[0].path)


def test_plugins_come_from_the_frozen_copy(shelf: Shelf, plugged: Path) -> None:
    moved = shelf.runs.rename(shelf.runs.with_name("moved"))
    trained = shelf.load("flat-baseline-d0-m0-w0-s0", runs=moved)
    assert trained.config.model.mixers["flat"]["size"] == 3
    assert trained.config.plugins[0].path == str(moved / "plugins" / plugged.name)
    assert type(trained.model.blocks[2].mix.mixer).__name__ == "Flat"


def test_load_reports_missing_edited_and_broken_plugins(shelf: Shelf, plugged: Path) -> None:
    slug = "flat-baseline-d0-m0-w0-s0"
    text = plugged.read_text()
    plugged.write_text(text + "# edited\n")
    with pytest.raises(PluginChanged, match="has changed"):
        shelf.load(slug)
    plugged.write_text(text)
    registry.MIXERS.register("flat")(NoPE)
    assert_refused(
        lambda: shelf.load(slug),
        CellUnreadable,
        slug,
        "ValueError: a mixer named 'flat' exists already",
        "in separate processes",
    )
    plugged.unlink()
    assert_refused(lambda: shelf.load(slug), CellUnreadable, str(plugged), "--runs")


def test_load_checks_the_device_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SweepError, match=r'device \'tpu\' is unknown; use device="cpu" or device="cuda"'):
        atma_sweep.load(POLAR, db=tmp_path / "none.db", device="tpu")

    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver\non your system")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    message = refused(lambda: atma_sweep.load(POLAR, db=tmp_path / "none.db", device="cuda"), MachineError)
    assert message == 'no usable CUDA GPU: Found no NVIDIA driver; device="cpu" loads the model on the CPU'


@pytest.mark.gpu
@torch.no_grad()
def test_on_cuda_the_model_is_as_attempts_have_it(shelf: Shelf) -> None:
    model = shelf.train(POLAR).eval()
    trained = shelf.load(POLAR, device="cuda")
    assert (trained.model.dtype, trained.model.device.type) == (torch.bfloat16, "cuda")
    assert trained.model.head.weight.dtype == torch.float32
    tokens_BT = torch.arange(26).view(2, 13)
    difference = (trained.model(tokens_BT.cuda()).cpu() - model(tokens_BT)).abs().mean()
    assert 0 < difference < 0.1


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import atma_sweep; new = set(sys.modules) - before; "
        "print(sorted(name for name in new if name.split('.')[0] not in sys.stdlib_module_names)); "
        "print(callable(atma_sweep.load), atma_sweep.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines() == ["['atma_sweep']", f"True {atma_sweep.__version__}"], done.stderr
