"""Content of a cell's id: fields that change it, and fields that never may."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from atma_sweep.model.backbone import count_parameters
from atma_sweep.model.block_parts.fla_catalogue import fla_version
from atma_sweep.model.config import Flag, Float, Int, ModelConfig, knob
from atma_sweep.model.registry import SETTINGS
from atma_sweep.sweep.config import CellConfig, DataConfig, TrainConfig, knob_outside_id
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid import cell as cell_module
from atma_sweep.sweep.grid.cell import Cell, cell_id, identity, slug
from atma_sweep.sweep.grid.grid import load_grid, shipped
from atma_sweep.sweep.grid.plugins import PLUGGABLE, Pluggable
from optional_data import optional_data
from tiers import every_nth

Cells = Callable[..., list[Cell]]
GOLDEN: dict[str, list[list[str]]] = json.loads((Path(__file__).parent / "golden_ids.json").read_text())
STRIDES = {"mad": 36}
"""Grid -> distance between its recorded cells; otherwise all are recorded."""
WITH_ALL = "set:\n  {attn_type: rope, window: on, distractor: on, memory: on, reg_mode: weak}\n"


def single_id(cells: Cells, setting: str = "", base: str = "") -> str:
    """Return the id of the only cell of `base` with one additional setting, such as "train.clip: 2"."""
    text = (base or "set:\n") + (f"  {setting}\n" if setting else "")
    if base and setting:
        text = base.rstrip().removesuffix("}") + f", {setting}}}\n"
    (cell,) = cells(text if setting or base else "")
    return cell.id


@pytest.mark.parametrize(
    "spelling", ["1e9", "1_000_000_000", "1000000000", "1000000000.0", '"1e9"', '"1_000_000_000"', "1.0e+9"]
)
def test_id_is_equal_for_spellings_of_a_number(cells: Cells, spelling: str) -> None:
    (cell,) = cells(f"set:\n  train.tokens: {spelling}\n")
    assert (cell.config.train.tokens, type(cell.config.train.tokens)) == (10**9, int)
    assert cell.id == single_id(cells, "train.tokens: 1000000000")


@pytest.mark.parametrize("spelling", ["0.001", "1e-3", '"1e-3"', "1.0e-3", "0.00_1"])
def test_id_is_equal_for_spellings_of_a_fraction(cells: Cells, spelling: str) -> None:
    assert single_id(cells, f"train.muon_lr: {spelling}") == single_id(cells, "train.muon_lr: 0.001")


@pytest.mark.parametrize("setting", [
    "eval.lengths: [8, 16]", "eval.probes: [val]", "eval.validate_every: 3", "eval.needle_seed: 9", "resources.gpus: 1",
    "resources.cpus: 7", "checkpoint.every_minutes: 1", "checkpoint.every_steps: 5", "checkpoint.keep: nothing",
    "data.path: /elsewhere", "data.corpus: files", "data.heldout_tokens: 99", "train.graphs: on", "train.graphs: off",
])  # fmt: skip
def test_id_excludes_sections_that_change_no_weight(cells: Cells, setting: str) -> None:
    assert single_id(cells, setting) == single_id(cells)


def test_id_excludes_tokenizer_but_not_fingerprint() -> None:
    def number(tokenizer: str, fingerprint: str) -> str:
        return cell_id(CellConfig(data=DataConfig(tokenizer=tokenizer, fingerprint=fingerprint)))

    assert number("bytes", "a") == number("gpt2", "a") != number("bytes", "b")


INSIDE = [
    "model.d_model: 88", "model.n_layers: 5", "model.n_heads: 8", "model.n_kv_heads: 1", "model.head_dim: 24",
    "model.vocab_size: 265", "model.attn_every: 3", "model.attn_offset: 1", "model.mlp_ratio: 3", "model.mlp_width: 33", "model.conv_taps: 4",
    "model.canon_taps: 3", "model.norm_eps: 1e-5", "model.logit_cap: 30", "model.init: zero-ends-and-conv-in",
    "attn_type: nope", "memory: off", "window: off", "model.window_size: 65", "model.mixers.rope.base: 99",
    "model.mixers.rope.canon: off", "model.mixers.rope.scale: 0.1", "model.mixers.rope.rotary: half-truncated",
    "model.mixers.rope.distractor_norm: off", "data.shuffle: off", "train.tokens: 153_601", "train.seq_len: 64",
    "train.batch_tokens: 2048", "train.micro_batch: 4", "train.loss_reduction: sum", "train.schedule: linear",
    "train.constant: 0.4", "train.clip: 2", "train.muon_lr: 0.1", "train.muon_momentum: 0.9",
    "train.muon_weight_decay: 0", "train.muon_iterations: 5", "train.muon_split: head", "train.muon_for: square", "train.embedding_lr: 0.1", "train.head_lr: 0.1",
    "train.scalar_lr: 0.1", "train.adam_beta1: 0.9", "train.adam_beta2: 0.9", "train.adam_eps: 1e-8",
    "reg_mode: strong", "train.regularizer_weight: 0.1", "train.regularizer_sketch: 8", "distractor: off",
    "train.distractor_weight: 0.1", "train.distractor_count: 5", "train.deterministic: on", "train.compile: off", "train.compile: blocks",
    "train.kernels: torch", "train.activations: float32", "data.whole_steps: on", "train.warmup_steps: 5", "train.optimizer: adamw",
    "train.adam_weight_decay: 0.1", "model.mlp: swiglu", "model.match: parameters", "model.residual: normed", "model.dropout: 0.1",
    "model.tie_head: on", "model.positions: ape", "model.qk_norm: off", "model.output_gate: off", "model.bias: off",
    "model.canon: off", "model.qkv_bias: off", "model.head_bias: off",
    "model.embedding_dtype: float32", "model.decoder: row",
]  # fmt: skip


def test_id_includes_every_model_data_and_train_field(cells: Cells) -> None:
    base = "seeds: [0]\n" + WITH_ALL
    ids = {"": single_id(cells, base=base)}
    for setting in INSIDE:
        name, value = setting.split(": ")
        if name in ("attn_type", "memory", "window", "distractor", "reg_mode"):
            text = base.replace(
                next(part for part in base[base.index("{") + 1 : -2].split(", ") if part.startswith(name)), setting
            )
            (cell,) = cells(text)
            ids[setting] = cell.id
        else:
            ids[setting] = single_id(cells, f"{name}: {value}", base)
    ids["seed"] = cells("seeds: [1]\n" + WITH_ALL)[0].id
    assert len(set(ids.values())) == len(ids)


def test_id_field_list_is_complete() -> None:
    listed = {setting.split(": ")[0] for setting in INSIDE}
    listed |= {"model.attn_type", "model.memory", "model.window", "train.regularizer", "train.distractor"}
    # the rest has its own test: sub-sections, the plugin's hash, the fingerprint
    listed |= {f"model.{section}" for section in SETTINGS} | {f"{part.section}.{part.source}" for part in PLUGGABLE}
    # and what needs another setting beside it
    listed |= {setting.split(": ")[0] for _, setting in OUTSIDE_SETTINGS}
    listed.add("train.graphs")  # which is outside
    listed.add("train.recompute")  # which is outside
    listed.add("train.precision")  # which needs a GPU, below
    # which need a source and no Canon: planning/test_initial_weights.py
    listed |= {"train.init_from", "train.init_sha256", "train.init_missing", "model.qk_norm_weight"}
    listed.add("train.loss_on")  # which needs a corpus of its own: training/test_marks.py
    for section, cls in (("model", ModelConfig), ("train", TrainConfig)):
        assert [name for name in cls.model_fields if f"{section}.{name}" not in listed] == []


def test_compile_is_a_switch_or_blocks(cells: Cells) -> None:
    grid_cells = cells("axes: {train.compile: [on, off, blocks]}\n")
    assert [cell.config.train.compile for cell in grid_cells] == [True, False, "blocks"]
    with pytest.raises(GridError, match=r"train\.compile: must be on, off or blocks, got 'sometimes'"):
        cells("set: {train.compile: sometimes}\n")


@pytest.mark.parametrize("resources", ["gpus: 1", "{gpus: 0.5, gpu_type: H200}"])
def test_id_includes_precision_except_bf16(cells: Cells, resources: str) -> None:
    resources = resources if resources.startswith("{") else f"{{{resources}}}"
    text = f"resources: {resources}\nset: {{model.head_dim: 16}}\naxes: {{train.precision: [bf16, fp16, fp8]}}\n"
    by_precision = {cell.config.train.precision: cell for cell in cells(text)}
    (plain,) = cells("set: {model.head_dim: 16}\n")
    assert by_precision["bf16"].id == plain.id
    assert len({cell.id for cell in by_precision.values()}) == 3
    assert by_precision["fp8"].slug.endswith("-precisionfp8-s0")
    assert "precision" not in identity(by_precision["bf16"].config)["train"]
    assert identity(by_precision["fp8"].config)["train"]["precision"] == "fp8"


OUTSIDE_SETTINGS = [
    ("train.optimizer: adamw", "train.matrix_lr: 0.1"), ("model.positions: ape", "model.position_settings.ape.std: 0.1"),
    ("model.positions: label", "model.position_settings.label.length: 500"),
]  # fmt: skip


@pytest.mark.parametrize(("switch", "setting"), OUTSIDE_SETTINGS)
def test_id_includes_settings_of_active_parts(cells: Cells, switch: str, setting: str) -> None:
    assert single_id(cells, f"{{{switch}, {setting}}}") != single_id(cells, f"{{{switch}}}")


@pytest.mark.parametrize(("switch", "setting"), [
    ("model.positions: none", "model.position_settings.ape.std: 0.1"),
    ("model.positions: ape", "model.position_settings.label.std: 0.1"),
    ("train.optimizer: muon", "train.matrix_lr: 0.1"), ("train.optimizer: adamw", "train.muon_lr: 0.1"),
    ("train.optimizer: adamw", "train.muon_iterations: 3"), ("window: off", "model.window_size: 9"), ("distractor: off", "train.distractor_weight: 0.5"),
    ("distractor: off", "train.distractor_count: 5"), ("reg_mode: baseline", "train.regularizer_weight: 0.5"),
    ("reg_mode: baseline", "train.regularizer_sketch: 5"), ("attn_type: nope", "model.mixers.rope.base: 5"),
])  # fmt: skip
def test_id_excludes_settings_of_inactive_parts(cells: Cells, switch: str, setting: str) -> None:
    assert single_id(cells, f"{{{switch}, {setting}}}") == single_id(cells, f"{{{switch}}}")


def test_id_is_the_hash_of_the_canonical_identity() -> None:
    config = CellConfig(data=DataConfig(fingerprint="ab"), seed=4)
    expected = {
        "model": {"d_model": 1024, "n_layers": 16, "n_heads": 8, "n_kv_heads": 2, "head_dim": 128, "vocab_size": 50304,
                  "attn_type": "polar"},
        "data": {"fingerprint": "ab"},
        "train": {"tokens": 996147200, "seq_len": 2048, "batch_tokens": 524288, "micro_batch": 4},
        "seed": 4,
    }  # fmt: skip
    assert identity(config) == expected
    text = json.dumps(expected, sort_keys=True, separators=(",", ":"))
    assert cell_id(config) == hashlib.sha256(text.encode()).hexdigest()[:12]


def test_id_includes_only_the_hash_of_a_plugin() -> None:
    plain = CellConfig()
    for part in PLUGGABLE:

        def sourced(source: str | None, part: Pluggable = part) -> CellConfig:
            section = getattr(plain, part.section).model_copy(update={part.source: source})
            return plain.model_copy(update={part.section: section})

        assert len({cell_id(sourced(source)) for source in (None, "a", "b")}) == 3
        assert identity(sourced("a"))[part.section][part.source] == "a"
        assert cell_id(sourced(None)) == cell_id(plain)


# --- a version from the future ------------------------------------------------------------------------------------


class LaterTrain(TrainConfig):
    """Fields added later, each with the value that older cells implicitly had; one working default has moved on."""

    warmup: Int = knob(0, "New.", identity=0)
    ema: Float = knob(0.999, "New, and on by default for new cells.", identity=0.0)
    compiled: Flag = knob_outside_id(True, "New, and irrelevant to the weights.")
    clip: Float = knob(2.0, "Moved from 1.0.", identity=1.0)


class LaterCell(CellConfig):
    train: LaterTrain = LaterTrain()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the id of the cell in a simulated later version."""

    def number(**train: Any) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(cell_module, "TrainConfig", LaterTrain)
            return cell_id(LaterCell(train=LaterTrain(**train)))

    return number


def test_new_fields_at_identity_default_keep_old_ids(later: Callable[..., str]) -> None:
    old = cell_id(CellConfig())
    assert later(clip=1.0, ema=0.0) == old
    assert later(clip=1.0, ema=0.0, warmup=0, compiled=False) == old
    assert later(clip=1.0, ema=0.0, warmup=1) != old


def test_changed_default_moves_only_cells_that_use_it(later: Callable[..., str]) -> None:
    assert later(ema=0.0) == cell_id(CellConfig(train=TrainConfig(clip=2.0)))
    assert later(clip=1.0, ema=0.0) == cell_id(CellConfig(train=TrainConfig(clip=1.0)))
    assert later(clip=1.0) != cell_id(CellConfig())


# --- golden ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", every_nth(shipped(), 6))
def test_golden_ids(name: str, fake_fingerprint: Any) -> None:
    """A change here orphans every result that was measured under the old ids; those of fla's layers have its version."""
    if name.endswith("-fla") and fla_version() != "0.6.0":
        pytest.skip("needs flash-linear-attention 0.6.0")
    cells = load_grid(name).expand(fake_fingerprint)
    assert [[cell.id, cell.slug] for cell in cells[:: STRIDES.get(name, 1)]] == GOLDEN[name]
    assert len({cell.id for cell in cells}) == len({cell.slug for cell in cells}) == len(cells)
    assert all(map(count_parameters, {id(cell.config.model): cell.config.model for cell in cells}.values()))


def test_recipes_share_no_cell_but_paper_grids_do() -> None:
    ids = {name: {number for number, _ in cells} for name, cells in GOLDEN.items()}
    assert sorted(ids) == shipped()
    assert ids["paper-v1"] < ids["paper-v2"]
    assert not ids["full"] & ids["paper-v2"]


def run_id(cell: Cell) -> str:
    """Return the paper authors' name of a cell."""
    level, digit = cell.levels, {"off": "0", "on": "1"}
    switches = "__".join(
        f"{short}-{digit[level[name]]}"
        for short, name in (("distr", "distractor"), ("mem", "memory"), ("win", "window"))
    )
    return f"{level['attn_type']}__reg-{level['reg_mode']}__{switches}"


def test_paper_grids_match_rows_of_the_papers_tables(fake_fingerprint: Any) -> None:
    tables = json.loads((optional_data("paper/tables.json")).read_text())
    missing = tables["_meta"]["v1_missing_cells"]
    first, second = ([run_id(c) for c in load_grid(name).expand(fake_fingerprint)] for name in ("paper-v1", "paper-v2"))
    assert len(missing) == 20
    assert first == [name for name in second if name not in missing]
    assert first == [row["run_id"] for row in tables["v1"]["table6_complete"]["rows"]]
    assert second == [row["run_id"] for row in tables["v2"]["table8_complete"]["rows"]]


@pytest.mark.thorough
def test_ids_are_independent_of_the_hash_seed() -> None:
    program = (
        "from atma_sweep.sweep.grid.grid import load_grid\n"
        "print(*(c.id for c in load_grid('quick').expand(lambda data: 'f' * 64)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [number for number, _ in GOLDEN["quick"]]


# --- slugs --------------------------------------------------------------------------------------------------------


def test_slugs(cells: Cells) -> None:
    (plain,) = cells(WITH_ALL + "seeds: [12]\n")
    assert plain.slug == "rope-weak-d1-m1-w1-s12"
    assert (
        slug(plain.config, {"data.path": "/a b/ü.txt", "train.muon_lr": "0.01"})
        == "rope-weak-d1-m1-w1-path_a_b_.txt-muon_lr0.01-s12"
    )
