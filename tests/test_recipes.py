"""Every recipe of docs/how-to/add-a-part.md, followed letter by letter on a copy: one file and one line, or a plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recipes
from patience import PATIENCE_S

GRID = """
name: new
extends: tiny
plugins: [weight_rms.py, late_nats.py, running_mean.py]
axes:
  attn_type: [near]
  memory: [mean]
  reg_mode: [centred]
include:
  - {attn_type: running_mean, memory: off}
set:
  model: {d_model: 16, n_layers: 3, n_heads: 2, n_kv_heads: 1, head_dim: 8, positions: sine}
  data: {corpus: multiples, heldout_tokens: 400}
  train: {tokens: 512, seq_len: 32, batch_tokens: 128, micro_batch: 2}
  eval: {lengths: [32], documents: 2, junk_rows: 2, needle_trials: 2, validation_tokens: 256, probes: [val, weight_rms, late_nats]}
"""


PARTS = "Mixer,Block part,Memory,Regularizer,Position scheme,Probe,Probe that reads text,Corpus,Table,Figure,Executor".split(
    ","
)


def test_every_kind_of_part_has_its_recipe() -> None:
    assert list(recipes.recipes()) == PARTS


@pytest.mark.parametrize(("title", "file"), [
    ("Probe", "weight_rms.py"), ("Probe that reads text", "late_nats.py"), ("Block part", "running_mean.py"),
])  # fmt: skip
def test_the_recipe_is_a_plugin(title: str, file: str) -> None:
    assert [(block.path, block.plugin) for block in recipes.recipes()[title]] == [(file, True)]


@pytest.mark.parametrize("title", [part for part in PARTS if not part.startswith(("Probe", "Block"))])
def test_recipe_is_a_file_and_a_line(title: str) -> None:
    file, line = recipes.recipes()[title]
    assert (file.registry, line.registry != "", line.text.count("\n")) == ("", True, 1)


@pytest.mark.thorough
def test_the_recipes_make_what_they_say(tmp_path: Path) -> None:
    """The recipes work together: the new executor trains a cell of the new parts on the new corpus and reports it."""
    root = recipes.copy(tmp_path)
    folder = tmp_path / "place"
    folder.mkdir()
    for recipe in recipes.recipes().values():
        for block in recipe:
            recipes.follow(block, folder if block.plugin else root)
    (folder / "new.yaml").write_text(GRID)
    environment = {key: value for key, value in os.environ.items() if key != "ATMA_DB"} | {"PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "atma_sweep.cli", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "near-centred" in run("launch", "new.yaml", "--executor", "alone") + run("status", "--json")
    assert "running_mean" in run("report", "--table", "6")
    shown = run("show", "near-centred-d0-mmean-w0-s0")
    assert "weight_rms" in shown
    assert "nats (nats/token, n=32, plugin " in shown  # 16 targets of two documents
    assert "near" in run("report", "--table", "6")
    assert "near" in run("report", "--table", "speed")
    run("report", "--figure", "speed", "--out", "speed.svg")
    assert "near" in (folder / "speed.svg").read_text()
