"""Cells assembled from shared sections equal those built separately, and the sections are shared."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.model.resolve import check_model_config
from atma_sweep.sweep.config import CellConfig
from atma_sweep.sweep.grid.cell import Cell, cell_id, identity, slug
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.probes import with_settings
from atma_sweep.sweep.training import flops
from ruamel.yaml import YAML

from ..conftest import FINGERPRINT, MICRO

Write = Callable[..., Path]
LARGE = f"""
name: big
extends: micro
axes:
  attn_type: [polar, nope, rope]
  memory: [off, on]
  window: [off, on]
  reg_mode: [baseline, weak]
  distractor: [off, on]
  train.muon_lr: [{", ".join(f"{number / 1000}" for number in range(1, 27))}]
  model.mixers.rope.base: [10000, 5e3]
  data.shuffle: [on, off]
seeds: [0, 7, 3]
exclude:
  - {{attn_type: [polar, nope], model.mixers.rope.base: 5e3}}
include:
  - {{train.clip: [2, 3], attn_type: [polar, nope]}}
"""
FIVE = {
    "attn_type": "model.attn_type", "memory": "model.memory", "window": "model.window", "reg_mode": "train.regularizer",
    "distractor": "train.distractor",
}  # fmt: skip
LEVEL_VALUES: dict[tuple[str, str], Any] = {("memory", "off"): "none", ("memory", "on"): "gated_delta"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    folder = tmp_path_factory.mktemp("large")
    (folder / "micro.yaml").write_text(MICRO)
    (folder / "big.yaml").write_text(LARGE)
    return load_grid(folder / "big.yaml").expand(lambda data: FINGERPRINT)


def naive(cell: Cell) -> CellConfig:
    """Return the config from the base's values and the cell's levels alone, validated in full."""
    tree: dict[str, Any] = {}
    settings = dict(_leaves(YAML(typ="safe", pure=True).load(MICRO)["set"]))
    for axis, word in cell.axes.items():
        value = LEVEL_VALUES.get((axis, word), word)
        settings[FIVE.get(axis, axis)] = json.loads(value) if "." in axis and value not in ("on", "off") else value
    for path, value in settings.items():
        *sections, last = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    config = CellConfig.model_validate({**tree, "seed": cell.config.seed})
    data = config.data.model_copy(update={"fingerprint": FINGERPRINT})
    parts = {"model": check_model_config(config.model), "data": data, "eval": with_settings(config.eval)}
    return config.model_copy(update=parts)


def _leaves(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    leaves = []
    for name, value in tree.items():
        leaves += _leaves(value, f"{path}{name}.") if isinstance(value, dict) else [(f"{path}{name}", value)]
    return leaves


def test_expansion_ids_and_slugs_match_golden_hash(large: list[Cell]) -> None:
    """The golden values were computed cell by cell, before sections were shared."""
    assert len(large) == 9996
    listed = "\n".join(f"{cell.id} {cell.slug}" for cell in large)
    assert (
        hashlib.sha256(listed.encode()).hexdigest()
        == "f171bd68713604c951ec2509731042e5417c4e232fe8cd29fa4b4dd810432f4e"
    )


@pytest.mark.thorough
def test_expansion_matches_config_validated_in_full(large: list[Cell]) -> None:
    for cell in [*random.Random(3).sample(large, 200), *large[-12:]]:
        config = naive(cell)
        assert cell.config == config
        assert cell.config.model_dump_json() == config.model_dump_json()
        text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"))
        assert cell.id == hashlib.sha256(text.encode()).hexdigest()[:12] == cell_id(config)
        assert cell.slug == slug(config, {axis: word for axis, word in cell.axes.items() if "." in axis})


def test_expansion_shares_sections_between_cells(large: list[Cell]) -> None:
    """Unshared, a hundred thousand configs would fill the memory, and each would be validated separately."""
    crossed = large[:-12]
    counts = {name: len({id(getattr(cell.config, name)) for cell in crossed}) for name in CellConfig.model_fields}
    models = (2 + 2) * 2 * 2  # polar and nope with one base, rope with two; memory; window
    assert (counts["model"], counts["train"], counts["data"]) == (models, 2 * 2 * 26, 2)
    assert (counts["eval"], counts["resources"], counts["checkpoint"]) == (1, 1, 1)
    assert len({id(cell.axes) for cell in crossed}) == len(crossed) / 3, "one a combination, whatever its seeds"


def test_attention_flops_match_sum_over_queries() -> None:
    """The oracle sums the keys of each query; the product uses the closed form."""
    (config,) = (naive(Cell("", "", CellConfig(), {})).model,)
    for window, length in ((None, 1), (None, 37), (5, 37), (37, 37), (50, 37), (1, 9)):
        model = config.model_copy(update={"window": window is not None, "window_size": window or 1})
        keys = sum(min(query + 1, window or length) for query in range(length)) / length
        plain = flops.forward_flops(model.model_copy(update={"window": False}), 1)  # one key a query
        layers = sum(map(model.is_global, range(model.n_layers)))
        expected = plain + layers * 4 * model.n_heads * model.head_dim * (keys - 1)
        assert flops.forward_flops(model, length) == pytest.approx(expected, rel=1e-12)
