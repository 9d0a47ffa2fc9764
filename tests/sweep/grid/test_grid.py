"""Composition: base < set < levels < --set, and which combinations make cells."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from atma_sweep.model.backbone import Backbone, build, count_parameters
from atma_sweep.model.registry import MEMORIES, MIXERS
from atma_sweep.results import paper
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.cell import Cell
from atma_sweep.sweep.grid.grid import find_file, load_grid, parse_value, shipped
from atma_sweep.sweep.grid.settings import flatten, path_problem
from atma_sweep.sweep.grid.yaml_document import GridDocument, load

Write = Callable[..., Path]
Cells = Callable[..., list[Cell]]
SWITCHES = [("off", False), ("on", True), ("no", False), ("yes", True), ("false", False), ("true", True)]
SPELLINGS = [(spelling(word), value) for word, value in SWITCHES for spelling in (str.lower, str.title, str.upper)]


def test_settings_precedence(write: Write, fake_fingerprint: Any) -> None:
    write("extends: micro\nset:\n  train: {clip: 2.0, muon_lr: 0.5, constant: 0.25, adam_beta1: 0.5}\n", "mine.yaml")
    text = """
name: g
extends: mine
set:
  train.muon_lr: 0.25
  train.constant: 0.5
  train.adam_beta1: 0.625
axes:
  train.constant: [0.125]
  train.adam_beta1: [0.75]
"""
    grid = load_grid(write(text), sets=["train.adam_beta1=0.875"], rename="h")
    (cell,) = grid.expand(fake_fingerprint)
    train = cell.config.train
    assert (train.clip, train.muon_lr, train.constant, train.adam_beta1) == (2.0, 0.25, 0.125, 0.875)
    assert (train.tokens, cell.config.model.d_model) == (153_600, 80), "what nobody sets comes from the parent"
    assert grid.name == "h"


def test_bases_merge_mappings_and_replace_lists(write: Write, fake_fingerprint: Any) -> None:
    write("set:\n  eval: {lengths: [8, 16, 32], documents: 3}\n  model.mixers.rope: {base: 99, scale: 0.5}\n", "a.yaml")
    write("extends: a\nset:\n  eval: {lengths: [4, 64]}\n  model: {mixers: {rope: {base: 100}}}\n", "b.yaml")
    (cell,) = load_grid(write("name: g\nextends: b\nset: {attn_type: rope}\n")).expand(fake_fingerprint)
    assert (cell.config.eval.lengths, cell.config.eval.documents) == ((4, 64), 3)
    assert (cell.config.model.mixers["rope"]["base"], cell.config.model.mixers["rope"]["scale"]) == (100.0, 0.5)


def test_without_a_base_the_defaults_hold(write: Write, fake_fingerprint: Any) -> None:
    (cell,) = load_grid(write("name: g\n")).expand(fake_fingerprint)
    assert cell.config.model.d_model == 1024
    assert cell.config.data.fingerprint == "f" * 64
    assert cell.slug == "polar-baseline-d0-m0-w0-s0"


@pytest.mark.parametrize(("word", "value"), SPELLINGS)
def test_switches_as_levels_and_as_settings(cells: Cells, word: str, value: bool) -> None:
    (as_level,) = cells(f"axes:\n  window: [{word}]\n")
    (as_word,) = cells(f"set:\n  window: {word}\n")
    (as_setting,) = cells(f"set:\n  model.window: {word}\n")
    (as_text,) = cells(f'set:\n  model:\n    window: "{word}"\n')
    assert [c.config.model.window for c in (as_level, as_word, as_setting, as_text)] == [value] * 4
    assert as_level.axes == {"window": "on" if value else "off"}
    assert len({c.id for c in (as_level, as_word, as_setting, as_text)}) == 1


def test_memory_levels(cells: Cells) -> None:
    assert [c.config.model.memory for c in cells("axes:\n  memory: [off, on]\n")] == ["none", "gated_delta"]
    (named,) = cells("axes:\n  memory: [gated_delta]\n")
    assert (named.axes, named.levels["memory"]) == ({"memory": "gated_delta"}, "on")


def test_cells_order_last_axis_fastest_seeds_innermost(cells: Cells) -> None:
    grid_cells = cells("seeds: [3, 1]\naxes:\n  window: [on, off]\n  attn_type: [rope, polar]\n")
    assert [c.slug for c in grid_cells] == [
        "rope-baseline-d0-m0-w1-s3", "rope-baseline-d0-m0-w1-s1",
        "polar-baseline-d0-m0-w1-s3", "polar-baseline-d0-m0-w1-s1",
        "rope-baseline-d0-m0-w0-s3", "rope-baseline-d0-m0-w0-s1",
        "polar-baseline-d0-m0-w0-s3", "polar-baseline-d0-m0-w0-s1",
    ]  # fmt: skip
    assert grid_cells[0].axes == {"window": "on", "attn_type": "rope"}


def test_seeds_as_a_count_and_as_a_list(cells: Cells) -> None:
    counted, listed = cells("seeds: 3\n"), cells("seeds: [0, 1, 2]\n")
    assert [c.config.seed for c in counted] == [0, 1, 2]
    assert [c.id for c in counted] == [c.id for c in listed]
    assert len({c.id for c in counted}) == 3
    assert [c.config.seed for c in cells("seeds: [7]\n")] == [7]


def test_exclude_drops_what_matches_all_keys(cells: Cells) -> None:
    axes = "axes:\n  attn_type: [polar, nope, rope]\n  memory: [off, on]\nexclude:\n"
    remaining = cells(axes + "  - {attn_type: rope, memory: [on]}\n  - {attn_type: [polar, nope], memory: no}\n")
    assert [(c.axes["attn_type"], c.axes["memory"]) for c in remaining] == [
        ("polar", "on"),
        ("nope", "on"),
        ("rope", "off"),
    ]


def test_exclude_drops_seeds_of_what_matches(cells: Cells) -> None:
    text = "axes:\n  attn_type: [polar, nope, rope]\n  memory: [off, on]\nseeds: 4\nexclude:\n"
    text += "  - {attn_type: rope, seed: [2, 3]}\n  - {attn_type: nope, memory: off, seed: 3}\n  - {attn_type: rope, memory: on}\n"
    every = cells(text.partition("exclude")[0])
    remaining = cells(text)
    wanted = {("polar", "off"): 4, ("polar", "on"): 4, ("nope", "off"): 3, ("nope", "on"): 4, ("rope", "off"): 2}
    assert Counter((c.axes["attn_type"], c.axes["memory"]) for c in remaining) == wanted
    assert [c.id for c in remaining] == [
        c.id for c in every if c.config.seed < wanted.get((c.axes["attn_type"], c.axes["memory"]), 0)
    ]


def test_exclude_by_a_config_path_compares_values(cells: Cells) -> None:
    remaining = cells(
        "axes:\n  train.muon_lr: [0.01, 0.02]\n  memory: [off, on]\nexclude:\n  - {train.muon_lr: 1e-2}\n"
    )
    assert [c.config.train.muon_lr for c in remaining] == [0.02, 0.02]


def test_include_comes_after_exclude(cells: Cells) -> None:
    text = """
axes:
  attn_type: [polar, nope]
  memory: [off, on]
exclude:
  - {memory: on}
include:
  - {attn_type: [polar, rope], memory: on}
  - {reg_mode: weak}
"""
    assert [c.slug for c in cells(text)] == [
        "polar-baseline-d0-m0-w0-s0", "nope-baseline-d0-m0-w0-s0",
        "polar-baseline-d0-m1-w0-s0", "rope-baseline-d0-m1-w0-s0", "polar-weak-d0-m0-w0-s0",
    ]  # fmt: skip


def test_include_alone_makes_only_what_it_names(cells: Cells) -> None:
    assert [c.axes for c in cells("include:\n  - {attn_type: nope}\n")] == [{"attn_type": "nope"}]


def test_cell_limit_is_checked_before_expansion(
    write: Write, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    """Cells are counted before any is made; the option with the same number allows them."""
    path = write("name: g\nextends: micro\nseeds: 20_000\n")
    assert load_grid(path).seeds == range(20_000)
    path = write("name: g\nextends: micro\nseeds: 3\naxes: {memory: [off, on]}\ninclude: [{attn_type: [nope, rope]}]\n")
    assert len(load_grid(path, max_cells=12).expand(lambda data: "f")) == 12
    with pytest.raises(GridError, match="the grid has 12 cells, more than the limit of 11; --cells 12 raises"):
        load_grid(path, max_cells=11)
    for arguments in (("launch", str(path), "--dry-run"), ("data", "prepare", "--grid", str(path))):
        code, _, err = command(*arguments, "--cells", "11")
        assert (code, len(err.splitlines())) == (2, 1)
        assert "--cells 12 raises the limit" in err
        assert command(*arguments, "--cells", "12")[0] == 0


def test_grid_without_axes_has_a_single_cell(cells: Cells) -> None:
    (cell,) = cells()
    assert (cell.axes, cell.slug) == ({}, "polar-baseline-d0-m0-w0-s0")


def test_any_config_path_is_an_axis_and_shows_in_the_slug(cells: Cells) -> None:
    grid_cells = cells("axes:\n  train.muon_lr: [0.01, 2e-2]\n  model.mixers.polar.canon: [on, off]\n")
    assert [c.slug for c in grid_cells] == [
        "polar-baseline-d0-m0-w0-muon_lr0.01-canonon-s0", "polar-baseline-d0-m0-w0-muon_lr0.01-canonoff-s0",
        "polar-baseline-d0-m0-w0-muon_lr0.02-canonon-s0", "polar-baseline-d0-m0-w0-muon_lr0.02-canonoff-s0",
    ]  # fmt: skip
    assert [c.config.model.mixers["polar"]["canon"] for c in grid_cells] == [True, False] * 2


def test_a_cell_keeps_the_settings_of_its_own_mixer_only(cells: Cells) -> None:
    both = "set:\n  model.mixers: {rope: {base: 77}, nope: {canon: off}}\naxes:\n  attn_type: [rope, nope, polar]\n"
    assert [list(c.config.model.mixers) for c in cells(both)] == [["rope"], ["nope"], ["polar"]]


def test_shipped_grids_by_name_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_fingerprint: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("quick", "quick.yaml", "grids/quick", "grids/quick.yaml"):
        assert len(load_grid(name).expand(fake_fingerprint)) == 12


def test_local_grid_or_base_wins_over_the_shipped_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_fingerprint: Any
) -> None:
    write("extends: base/tiny\nset: {train.clip: 5}\n", "tiny.yaml")
    write("name: quick\nextends: tiny\n", "quick.yaml")
    monkeypatch.chdir(tmp_path)
    (cell,) = load_grid("quick").expand(fake_fingerprint)
    assert cell.config.train.clip == 5.0
    assert cell.config.model.d_model < 1024, "whose parent is the shipped one"
    assert find_file("tiny", tmp_path, "base") == tmp_path / "tiny.yaml"


def test_bases_are_searched_in_the_folder_of_the_grid(write: Write, fake_fingerprint: Any) -> None:
    write("extends: ../micro\nset: {train.clip: 5}\n", "inner/mine.yaml")
    grid = write("name: g\nextends: mine\n", "inner/g.yaml")
    assert load_grid(grid).expand(fake_fingerprint)[0].config.train.clip == 5.0


def test_relative_data_path_starts_at_its_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_fingerprint: Any
) -> None:
    write("extends: ../micro\nset:\n  data: {corpus: files, path: texts}\n", "bases/mine.yaml")
    by_base = write("name: g\nextends: bases/mine\n")
    by_axis = write(
        "name: g\nextends: bases/mine\naxes:\n  data.path: [texts, /abs]\nexclude:\n  - data.path: /abs\n", "h.yaml"
    )
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert load_grid(by_base).expand(fake_fingerprint)[0].config.data.path == str(tmp_path / "bases" / "texts")
    assert load_grid(by_axis).expand(fake_fingerprint)[0].config.data.path == str(tmp_path / "texts")
    by_option = load_grid(by_base, sets=["data.path=texts"], rename="o").expand(fake_fingerprint)
    assert by_option[0].config.data.path == str(work / "texts")


def test_fingerprint_is_computed_once_per_corpus(write: Write) -> None:
    requests = []

    def fingerprint(data: Any) -> str:
        requests.append(data.shuffle)
        return f"{len(requests):064d}"

    grid = load_grid(write("name: g\nextends: micro\naxes:\n  memory: [off, on]\n  data.shuffle: [off, on]\n"))
    grid_cells = grid.expand(fingerprint)
    assert requests == [False, True]
    assert [c.config.data.fingerprint for c in grid_cells] == ["1".zfill(64), "2".zfill(64)] * 2


PLUGIN = """
from atma_sweep.model.config import Int, knob
from atma_sweep.model.bases import Mixer, MixerConfig
from atma_sweep.model.registry import register_mixer

class Settings(MixerConfig):
    reach: Int = knob(3, "How far.", identity=3, ge=1)

@register_mixer("mean")
class Mean(Mixer):
    Config = Settings
"""


@pytest.mark.usefixtures("registries")
def test_a_plugin_brings_a_mixer_with_settings(write: Write, fake_fingerprint: Any) -> None:
    plugin = write(PLUGIN, "mean.py")
    text = "name: g\nextends: micro\nplugins: [mean.py]\naxes:\n  attn_type: [mean, nope]\n  model.mixers.mean.reach: [5]\n"
    mean, nope = load_grid(write(text)).expand(fake_fingerprint)
    assert mean.config.model.mixers == {"mean": {"canon": True, "reach": 5}}
    assert mean.config.model.mixer_source == mean.config.plugins[0].sha256
    assert (nope.config.model.mixer_source, mean.config.plugins[0].path) == (None, str(plugin))
    with pytest.raises(Exception, match="mixer mean has no distractor loss; exclude that combination"):
        load_grid(write(text + "set:\n  distractor: on\n")).expand(fake_fingerprint)


def test_plain_values_of_a_file_and_their_lines(write: Write) -> None:
    path = write("a: {b: 1_000, c: 1e3}\nd:\n  - on\n  - 'x'\n  - [1, null]\ne: true\n")
    document = load(path)
    assert document.data == {"a": {"b": 1000, "c": 1000.0}, "d": ["on", "x", [1, None]], "e": True}
    assert [type(v) for v in (document.data["a"]["b"], document.data["a"]["c"], document.data["d"][0])] == [
        int,
        float,
        str,
    ]
    assert [document.line(*k) for k in (("a", "c"), ("d", 1), ("d", 2, 1), ("d", 9), ("z",))] == [1, 4, 5, 2, 1]


def test_flatten_mixes_dots_and_nesting() -> None:
    document = GridDocument(Path("x"), "", {}, {("a", "b.c"): 4})
    tree = {"b.c": {"d": 1}, "e": 2}
    assert list(flatten(tree, document, ("a",))) == [("b.c.d", 1, 4, "b.c.d"), ("e", 2, 1, "e")]


@pytest.mark.parametrize(("text", "value"), [
    ("1e6", 1e6), ("1_000", 1000), ("on", "on"), ("true", True), ("[8, 16]", [8, 16]), ("polar", "polar"), ("[8", "[8"),
    ("null", None), ("", None), ("a: b", {"a": "b"}),
])  # fmt: skip
def test_command_line_values_read_as_yaml(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_every_setting_of_every_shipped_base_is_a_valid_path() -> None:
    assert shipped("base") == [
        "atlas-page-170m", "intended-10m", "intended-1b", "intended-370m", "llama-medium", "llama-mini", "mad-128", "published-370m", "recall-mini", "tiny",
        "transformer-170m", "transformer-400m", "wall-page-1b", "wall-page-400m",
    ]  # fmt: skip
    for name in shipped("base"):
        path = find_file(name, folder="base")
        assert path is not None
        document = load(path)
        paths = [entry[0] for entry in flatten(document.data["set"], document, ("set",))]
        assert len(paths) >= 3
        assert [path for path in paths if path_problem(path)] == []


def test_memory_synonyms_give_the_same_cell(fake_fingerprint: Any) -> None:
    """`on` and `gated_delta` are synonyms, and every registered memory is a level."""
    memories = {c.axes["memory"]: c for c in load_grid("memories").expand(fake_fingerprint)}
    full = {c.slug: c.id for c in load_grid("full").expand(fake_fingerprint)}
    assert list(memories) == ["off", *MEMORIES]
    assert memories["gated_delta"].id == full["polar-baseline-d0-m1-w0-s0"]
    assert memories["off"].id == full["polar-baseline-d0-m0-w0-s0"]


def test_atlas_blog_has_the_recipe_and_size_of_its_page(fake_fingerprint: Callable[..., str]) -> None:
    """Parameters in closed form, with d = 768: blocks, embedding shared with the head, the head's bias, last norm."""
    cells = {c.config.model.attn_type: c.config for c in load_grid("atlas-blog").expand(fake_fingerprint)}
    assert {name: c.model.memory for name, c in cells.items()} == {
        "rope": "none",
        "polysketch": "none",
        "none": "atlas",
    }
    d, vocabulary = 768, 50304
    shared = 2 * d + 3 * (d * d + d) + 12 * d + 12 * d * d + 9 * d  # norms, q k v, filters of four taps, MLP
    memory = 2 * (d * d + d) + 4 * (16 * d + 16) + 192 * 256 + 48 * 192  # gate, output, rates, start
    sizes = {"rope": d * d + d, "polysketch": d * d + d, "none": memory}
    for name, config in cells.items():
        assert count_parameters(config.model) == 12 * (shared + sizes[name]) + vocabulary * d + vocabulary + d
        train = config.train
        assert (train.muon_for, train.muon_lr, train.matrix_lr, train.scalar_lr) == ("square", 1e-3, 3e-4, 3e-4)
        assert (train.schedule, train.constant, train.warmup_steps) == ("cosine", 0, 200)
        assert (train.batch_tokens // train.seq_len, train.seq_len) == (16, 512)
    assert cells["none"].model.memories["atlas"]["chunk"] == 64


def test_atlas_grids_match_the_published_settings(fake_fingerprint: Any) -> None:
    off, atlas = (cell.config for cell in load_grid("atlas-170m").expand(fake_fingerprint))
    assert (off.model.memory, atlas.model.memory) == ("none", "atlas")
    model, train = atlas.model, atlas.train
    assert (model.n_layers, model.d_model, model.n_heads, train.seq_len) == (12, 768, 16, 512)
    assert (train.batch_tokens // train.seq_len, train.muon_lr, train.warmup_steps) == (16, 1e-3, 200)
    assert {train.embedding_lr, train.head_lr, train.scalar_lr} == {3e-4}
    settings = model.memories["atlas"]
    assert [settings[name] for name in ("memory", "hidden", "chunk", "orthogonal")] == ["mlp2", 4, 64, "chunk"]
    # what is kept in a chunk, the momentum, and the step: 0.9, 0.95 and 0.25
    keep, momentum, step = (1 / (1 + math.exp(-settings[f"{name}_offset"])) for name in ("keep", "momentum", "step"))
    assert (keep**64, momentum, step) == pytest.approx((0.9, 0.95, 0.25), abs=0.01)
    parameters = [count_parameters(config.model) for config in (off, atlas)]
    assert [round(count / 1e6) for count in parameters] == [159, 174]


def test_the_two_recipes_differ_where_documented(fake_fingerprint: Any) -> None:
    def rope(name: str) -> Any:
        return next(c for c in load_grid(name).expand(fake_fingerprint) if c.levels["attn_type"] == "rope").config

    full, paper = rope("full"), rope("paper-v2")
    assert (full.train.schedule, paper.train.schedule) == ("cosine", "linear")
    assert (full.train.loss_reduction, paper.train.loss_reduction) == ("mean", "sum")
    assert (full.model.init, paper.model.init) == ("zero-ends", "zero-ends-and-conv-in")
    ropes = [
        (m["rotary"], m["base"], m["scale"], m["canon"])
        for m in (full.model.mixers["rope"], paper.model.mixers["rope"])
    ]
    assert ropes == [("full", 10_000.0, None, True), ("half-truncated", 1024.0, 0.12, False)]
    for config in (full, paper):
        assert (config.train.steps, config.train.accumulation) == (1900, 64)
        assert (config.train.tokens, config.train.steps * config.train.batch_tokens) == (996_147_200, 996_147_200)


PAPER = Path(paper.__file__).parent
LLAMA = {"llama-mini": (6, 256, 4), "llama-medium": (50304, 512, 8)}
"""Vocabulary, width and blocks."""


@pytest.mark.parametrize("base", LLAMA)
@pytest.mark.parametrize(("chosen", "more"), [
    ("attn_type: nope", 0), ("attn_type: rope", 0), ("attn_type: tra", "blocks * (width + 1) * heads"),
    ("attn_type: fox", "blocks * (width + 1) * heads"), ("attn_type: diff", "blocks * 6 * 64"),
    ("attn_type: cope", "blocks * 64 * 64"), ("{attn_type: nope, model.positions: ape}", "places * width"),
])  # fmt: skip
def test_threshold_paper_parameter_counts(write: Any, fake_fingerprint: Any, base: str, chosen: str, more: Any) -> None:
    """2.6 and 72 million: q, k, v and the output with its bias, an MLP of three matrices with theirs, and two norms a block."""
    overrides = chosen if chosen.startswith("{") else f"{{{chosen}}}"
    (cell,) = load_grid(write(f"name: g\nextends: {base}\nset: {overrides}\n")).expand(fake_fingerprint)
    vocabulary, width, blocks = LLAMA[base]
    heads, positions = width // 64, 512 if base == "llama-mini" else 8192
    attention, mlp, norms = 4 * width**2 + width, 3 * width * (2 * width) + 2 * (2 * width) + width, 2 * width
    block = attention + mlp + norms
    own = eval(str(more), {}, {"blocks": blocks, "width": width, "heads": heads, "places": positions})
    expected = 2 * vocabulary * width + blocks * block + width + own
    assert count_parameters(cell.config.model) == expected
    if chosen == "attn_type: nope":
        assert round(expected / 1e6, 1) == {"llama-mini": 2.6, "llama-medium": 72.5}[base]


@pytest.mark.parametrize("base", ["llama-mini", "llama-medium", "transformer-400m"])
def test_position_grids_use_mixers_without_canon(write: Any, fake_fingerprint: Any, base: str) -> None:
    """Canon would reveal the order of neighbours; the mixer must be in every block."""
    mixers = ", ".join(MIXERS)
    for cell in load_grid(write(f"name: g\nextends: {base}\naxes: {{attn_type: [{mixers}]}}\n")).expand(
        fake_fingerprint
    ):
        model = cell.config.model
        with torch.device("meta"):
            network = Backbone(model)
        assert not [name for name, _ in network.named_parameters() if ".canon." in name]
        assert all(map(model.is_global, range(model.n_layers)))


def test_threshold_paper_grids_have_its_nine_schemes(fake_fingerprint: Any) -> None:
    """The names equal those of the printed numbers, so that `--compare printed-tra` matches them."""
    printed = {
        tuple(line.split(",")[1:3])
        for sheet in ("tra-flipflop", "tra-wikitext")
        for line in (PAPER / f"{sheet}.csv").read_text().splitlines()[1:]
    }
    for name in ("flipflop", "wikitext-tra"):
        cells = load_grid(name).expand(fake_fingerprint)
        assert {(cell.levels["attn_type"], cell.axes["model.positions"]) for cell in cells} == printed
        assert len(printed) == 9
        assert {cell.config.seed for cell in cells} == {0, 1, 2, 3}
    train = cells[0].config.train
    assert (train.steps, train.seq_len, train.batch_tokens // train.seq_len) == (100_000, 128, 64)
    train = load_grid("flipflop").expand(fake_fingerprint)[0].config.train
    assert (train.steps, train.batch_tokens // train.seq_len, train.matrix_lr) == (25_000, 64, 1e-4)


def test_rel_of_wikitext_tra_reaches_the_last_training_distance(fake_fingerprint: Any) -> None:
    """Distances beyond a training row share the last number, so that none stays untrained, as in the paper's REL."""
    configs = [cell.config for cell in load_grid("wikitext-tra").expand(fake_fingerprint)]
    reaches = {config.model.mixers["rel"]["reach"] for config in configs if config.model.attn_type == "rel"}
    assert reaches == {configs[0].train.seq_len - 1} == {127}


def test_mqar_grid_reaches_far_only_through_memory(fake_fingerprint: Any) -> None:
    """Attention sees its own token and Canon the three before; a key is queried at least two tokens after its value."""
    cells = {(c.axes["memory"], c.axes["model.head_dim"]): c for c in load_grid("mqar").expand(fake_fingerprint)}
    assert {memory for memory, _ in cells} == {"off", *MEMORIES}
    for memory, far in (("off", False), ("gated_delta", True)):
        model = build(cells[memory, "32"].config.model, seed=0, device="cpu", dtype=torch.float64)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        tokens = torch.randint(1, 600, (1, 36))
        changed = tokens.clone()
        changed[0, 4] = 600
        with torch.no_grad():
            apart = (model.features(tokens).hidden_BTD - model.features(changed).hidden_BTD).abs().amax(-1)[0]
        assert (apart[4:8] > 0).all()
        assert bool((apart[8:] > 0).any()) is far
        assert not apart[:4].any()


@pytest.mark.parametrize(
    ("name", "width", "row", "batch"), [("wall-400m", 1024, 8192, 8e5), ("wall-1b", 2048, 2048, 4e6)]
)
def test_wall_recipes_have_the_printed_sizes(
    name: str, width: int, row: int, batch: float, fake_fingerprint: Any
) -> None:
    """Parameters in closed form: 24 blocks, full multi-head attention of `width`, hidden layer of twice that, and gates."""
    cells = load_grid(name).expand(fake_fingerprint)
    d, heads = width, width // 128
    attention = 5 * d * d + 5 * d + 3 * 4 * d  # q, its gate, k, v, o with biases, and three filters of four taps
    mlp = (2 + 1) * 2 * d * d + 2 * 2 * d + d  # [a | g] and back, with biases
    rest = 2 * 50304 * d + 50304 + d  # embedding, head with its bias, last norm
    gates = {"rope": 0, "fox": d * heads + heads, "wall": d * d + d}
    assert [cell.levels["attn_type"] for cell in cells] == ["rope", "fox", "wall", "wall"]
    assert [cell.axes["model.mixers.wall.rotary"] for cell in cells] == ["none"] * 3 + ["full"]
    for cell in cells:
        expected = 24 * (attention + mlp + 2 * d + gates[cell.levels["attn_type"]]) + rest
        assert count_parameters(cell.config.model) == expected
        train = cell.config.train
        assert (train.seq_len, train.muon_split, train.batch_tokens % row) == (row, "head", 0)
        assert abs(train.batch_tokens / batch - 1) < 0.004
