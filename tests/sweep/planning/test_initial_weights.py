"""Weights that a cell starts from: their hash in its id, refusals, and the tensors that are new."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import build
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.checkpoints import checkpoint, storage
from atma_sweep.sweep.checkpoints.garbage import find_garbage
from atma_sweep.sweep.checkpoints.initial import copy_path, load_initial
from atma_sweep.sweep.config import without_identity_defaults
from atma_sweep.sweep.data.corpora import with_checksum
from atma_sweep.sweep.errors import GridError, SweepError
from atma_sweep.sweep.external_models.hub_checkpoint import WeightsUnavailable
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning.initial_weights import WeightsFinder, check_tokenizers, copy_initial_weights
from bench import Bench
from factories import OWNER, fingerprint, record_sweep

NETWORK = "set: {model: {n_layers: 3, d_model: 16, n_heads: 2, n_kv_heads: 1, head_dim: 8}}\naxes: {attn_type: [polar, rope]}\n"
ROPE = "rope-baseline-d0-m0-w0-s0"


class Sources:
    """A database with one cell of random weights, and grids that start from it."""

    def __init__(self, folder: Path, write: Callable[..., Path]) -> None:
        self.folder, self.write, self.runs = folder, write, folder / "atma-runs"
        self.store = open_store(folder / "atma.db", create=True)
        polar, rope = load_grid(write(f"name: a\nextends: micro\n{NETWORK}")).expand(fingerprint)
        record_sweep(self.store, [polar, rope], "a")
        self.rope = rope
        self.weights = self.train(1)

    def train(self, seed: int) -> Path:
        attempt = self.store.start_attempt(self.rope.id, owner=OWNER, fence=0)
        name = f"{attempt.run_dir}/weights.safetensors"
        path = Path(storage.resolve(self.runs, name))
        path.parent.mkdir(parents=True)
        (path.parent / "job.json").write_text(json.dumps({"config": without_identity_defaults(self.rope.config)}))
        checkpoint.save_weights(str(path), build(self.rope.config.model, seed=seed))
        self.store.finish_attempt(attempt.id, 0, "done", weights=name)
        return path

    def finder(self, **options: Any) -> WeightsFinder:
        return WeightsFinder(str(self.folder / "atma.db"), self.runs, **options)

    def cells(self, source: str, more: str = "", *, axes: str = "[rope]", **options: Any) -> list[Cell]:
        """The cells of a grid with the network of `a` that start from the source."""
        text = f"name: b\nextends: micro\n{NETWORK.replace('[polar, rope]', axes)}levels:\n  attn_type:\n"
        for mixer in axes.strip("[]").split(", "):
            text += f"    {mixer}: {{train.init_from: {json.dumps(source)}{more}}}\n"
        return replace(load_grid(self.write(text)), initial=self.finder(**options)).expand(fingerprint)


@pytest.fixture
def sources(tmp_path: Path, write: Callable[..., Path]) -> Sources:
    return Sources(tmp_path, write)


def test_id_holds_the_hash_of_the_weights(sources: Sources) -> None:
    (cell,) = sources.cells(ROPE)
    assert cell.config.train.init_sha256 == hashlib.sha256(sources.weights.read_bytes()).hexdigest()
    assert cell.id != sources.rope.id
    # the same weights by other names are the same cell, and what may be missing is no part of it
    relative = sources.weights.relative_to(sources.folder).as_posix()
    for name in (f"a:{ROPE}", sources.rope.id[:8], str(sources.weights), relative, str(sources.weights.parent)):
        assert [same.id for same in sources.cells(name)] == [cell.id], name
    assert sources.cells(ROPE, ", train.init_missing: init")[0].id == cell.id
    # a cell that starts from a name cannot be meant by it, even if it has the same slug
    record_sweep(sources.store, [cell], "b")
    assert sources.cells(ROPE)[0].id == cell.id
    sources.train(2)
    assert sources.cells(ROPE)[0].id != cell.id


def test_provisional_hash_is_refused_at_launch(sources: Sources) -> None:
    (cell,) = sources.cells("hf:nobody/nothing", dry=True)
    assert (cell.config.train.init_sha256 or "").startswith("provisional")
    with pytest.raises(SweepError, match="were not looked up"):
        copy_initial_weights([cell], sources.finder())


def test_new_tensors_are_named_or_listed(sources: Sources) -> None:
    cells = sources.cells(ROPE, axes="[rope, nope, wall]")
    copy_initial_weights(cells[:2], sources.finder())  # RoPE has no tensors that NoPE lacks
    with pytest.raises(SweepError, match=r"wall-.*: the source lacks tensor blocks\.\*\.mix\.mixer\.gate\.weight"):
        copy_initial_weights(cells, sources.finder())
    (wall,) = sources.cells(ROPE, ", train.init_missing: init", axes="[wall]")
    sources.weights.rename(sources.weights.with_suffix(".gone"))  # the copy is enough
    copy_initial_weights([wall], sources.finder())
    model, plain = (build(wall.config.model, seed=5) for _ in range(2))
    digest = wall.config.train.init_sha256 or ""
    report = load_initial(sources.runs, model, source=ROPE, sha256=digest, allow_missing=True)
    assert report.new == ("blocks.*.mix.mixer.gate.weight", "blocks.*.mix.mixer.gate.offset")
    assert "new tensors: blocks.*.mix.mixer.gate.weight" in report.text()
    source = build(sources.rope.config.model, seed=1).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, source[name] if name in source else plain.state_dict()[name]), name
    # a damaged copy is noticed
    path = copy_path(sources.runs, digest)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(SweepError, match="SHA-256"):
        load_initial(sources.runs, model, source=ROPE, sha256=digest, allow_missing=True)


def _hub(folder: Path, **settings: Any) -> Path:
    """Make a folder with the config of a small Llama and a file that is no safetensors."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 264,
        "intermediate_size": 24, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | settings))
    (folder / "model.safetensors").write_bytes(b"half a download")
    return folder


def _refused(sources: Sources, source: str, **options: Any) -> str:
    """Return the message of the refusal, which has the grid's line and no other line."""
    with pytest.raises((GridError, WeightsUnavailable)) as refusal:
        sources.cells(source, **options)
    message = str(refusal.value)
    assert "\n" not in message
    return message


def test_wrong_sources_are_refused_in_a_line(sources: Sources) -> None:
    hub = _hub(sources.folder / "hub")
    message = _refused(sources, "hf:hub")
    assert "g.yaml:7" in message
    assert "half a download" in message
    (hub / "model.safetensors").rename(hub / "pytorch_model.bin")
    assert "a format that can run code" in _refused(sources, "hf:hub")
    (hub / "pytorch_model.bin").unlink()
    assert "holds no weights" in _refused(sources, "hf:hub")
    (hub / "config.json").unlink()
    assert "has no config.json, so it is not a checkpoint in the hub's format; name a folder" in _refused(
        sources, "hf:hub"
    )
    shutil.rmtree(hub)
    assert "neither a folder nor a repository" in _refused(sources, "hf:./hub/deeper")
    assert "--prepare" in _refused(sources, "hf:nobody/nothing")
    assert "models of type 'gemma2' cannot be converted; types that can: llama" in _refused(
        sources, f"hf:{_hub(sources.folder / 'g', model_type='gemma2')}"
    )
    (sources.folder / "empty").mkdir()
    assert "is no checkpoint" in _refused(sources, str(sources.folder / "empty"))
    assert "there are no weights at" in _refused(sources, "missing/weights.safetensors")
    assert "no cell has the id or slug" in _refused(sources, "rope-strong")
    assert "is not trained yet; launch its grid first" in _refused(sources, "polar-baseline-d0-m0-w0-s0")
    sources.store.clear_weights(sources.store.attempts(sources.rope.id)[0].id)
    assert "--retrain" in _refused(sources, ROPE)
    (sources.folder / "atma.db").rename(sources.folder / "other.db")
    assert "no database yet" in _refused(sources, ROPE)


def test_changed_network_needs_permission(sources: Sources) -> None:
    change = ", model.logit_cap: none, model.mixers.rope.base: 500"
    with pytest.raises(GridError, match=r"model\.logit_cap: 15\.0 \(not none\), model\.mixers\.rope\.base: 10000\.0"):
        sources.cells(ROPE, change)
    assert sources.cells(ROPE, f"{change}, train.init_missing: init")
    with pytest.raises(GridError, match=r"tokens \(0\) is less than one step"):
        load_grid(sources.write("name: c\nextends: micro\nset: {train.tokens: 0}\n")).expand(fingerprint)


def test_changed_tokenizer_needs_permission(sources: Sources) -> None:
    (cell,) = sources.cells(ROPE)
    changed = cell.config.data.model_copy(update={"fingerprint": "e" * 64})
    second_text = replace(cell, config=cell.config.model_copy(update={"data": changed}))
    for letter, tokenizer in (("f", "bytes"), ("e", "gpt2")):
        folder = sources.runs / "corpora" / (letter * 16)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(with_checksum({"tokenizer": tokenizer})))
    check_tokenizers([cell], sources.finder())
    with pytest.raises(SweepError, match="trained with tokenizer bytes, but text 'stdlib' was prepared with gpt2"):
        check_tokenizers([cell, second_text], sources.finder())


def test_gc_removes_copies_that_no_cell_needs(sources: Sources) -> None:
    (cell,) = sources.cells(ROPE)
    copy_initial_weights([cell], sources.finder())
    path = copy_path(sources.runs, cell.config.train.init_sha256 or "")
    files = [path, path.with_suffix(".sha256")]

    def unowned() -> set[str]:
        return {item.address for item in find_garbage(sources.store, sources.runs).things}

    assert unowned() == set()  # a sweep may be about to use young files
    for file in files:
        os.utime(file, (1, 1))
    assert unowned() == set(map(str, files))
    record_sweep(sources.store, [cell], "b")
    assert unowned() == set()


@pytest.mark.thorough
def test_zero_steps_measure_the_same_as_the_source(bench: Bench) -> None:
    bench.edit("[nope, polar]", "[polar]")
    bench.launch()
    pytest.importorskip("transformers")
    bench.run("export", "polar-baseline-d0-m0-w0-s0", "exported", "--to", "hf")
    grid = (bench.folder / "micro.yaml").read_text()
    query = (
        "SELECT probe, metric, length, value FROM results WHERE sweep = '{}' AND value IS NOT NULL "
        "AND probe NOT IN ('throughput', 'decode') AND unit NOT IN ('s', 'bytes') ORDER BY 1, 2, 3"
    )
    first = bench.sql(query.format("micro"))
    assert len(first) > 10
    for name, source in (("again", "micro:polar-baseline-d0-m0-w0-s0"), ("loaded", "hf:./exported")):
        zero = grid.replace("train: {tokens: 1536", f"train: {{tokens: 0, init_from: '{source}'")
        (bench.folder / f"{name}.yaml").write_text(zero.replace("name: micro", f"name: {name}"))
        bench.run("launch", f"{name}.yaml", "--executor", "local")
        assert first == bench.sql(query.format(name))
    assert "initial weights of micro:polar-baseline-d0-m0-w0-s0" in bench.ask("show", "polar", "--sweep", "again")
    # tensors that do not fit end a launch before it prints its plan
    wider = (bench.folder / "again.yaml").read_text().replace("name: again", "name: wider")
    (bench.folder / "wider.yaml").write_text(f"{wider}\n".replace("[polar]", "[wall]"))
    process = bench.start("launch", "wider.yaml", "--executor", "local")
    text, _ = process.communicate()
    assert process.returncode == 2
    assert "the source lacks tensor blocks.*.mix.mixer.gate.weight" in text
    assert len(text.splitlines()) == 1
