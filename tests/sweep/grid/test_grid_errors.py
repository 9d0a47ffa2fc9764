"""Every mistake in a grid is one line: file, line, key, what is wrong, what is allowed, the nearest word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.model.mixers.softmax import RoPEConfig
from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.errors import GridError, nearest
from atma_sweep.sweep.grid.grid import GRIDS, load_grid, shipped
from atma_sweep.sweep.probes import PROBES
from registries import has_distractor

BASES = ", ".join(sorted(file.stem for file in (GRIDS / "base").glob("*.yaml")))
Write = Callable[..., Path]
HEAD = "name: g\nextends: micro\n"
TRAIN = ", ".join(f"train.{name}" for name in TrainConfig.model_fields if name != "regularizer_source")
MEMORY = ", ".join(["off", "on", *MEMORIES])
ROPE = ", ".join(f"model.mixers.rope.{name}" for name in sorted(RoPEConfig.model_fields))
AXES = "attn_type, reg_mode, distractor, memory, window"
ANY = "or a config path such as train.muon_lr"
KEYS = "name, description, extends, axes, levels, exclude, include, seeds, set, resources, plugins, contrasts, design, stop, search, tune"
ONE = "keep one of them"
MISTAKE = "more than 20,000 are taken for a mistake, --cells {} allows them"
SEEDS = "must be a count or a list of different whole numbers"

CASES: dict[str, tuple[str, str]] = {
    "top-key": ("axis:\n  memory: [on]\n", f"3: axis: no such key; allowed: {KEYS}; did you mean 'axes'?"),
    "axis": (
        "axes:\n  atn_type: [polar]\n",
        f"4: axes.atn_type: no such axis; allowed: {AXES}, {ANY}; did you mean 'attn_type'?",
    ),
    "level": (
        "axes:\n  memory: [off, on]\n  attn_type: [polar, nop]\n",
        f"5: axes.attn_type: no level 'nop'; allowed: {', '.join(MIXERS)}; did you mean 'nope'?",
    ),
    "level-on-its-own-line": (
        "axes:\n  memory:\n    - off\n    - om\n",
        f"6: axes.memory: no level 'om'; allowed: {MEMORY}; did you mean 'omega'?",
    ),
    "dotted-path": (
        "set:\n  train.token: 1e6\n",
        f"4: set.train.token: no such setting under train; allowed: {TRAIN}; did you mean 'train.tokens'?",
    ),
    "nested-path": (
        "set:\n  train:\n    token: 1e6\n",
        f"5: set.train.token: no such setting under train; allowed: {TRAIN}; did you mean 'train.tokens'?",
    ),
    "path-as-axis": (
        "axes:\n  train.muonlr: [0.1]\n",
        f"4: axes.train.muonlr: no such setting under train; allowed: {TRAIN}; did you mean 'train.muon_lr'?",
    ),
    "section": (
        "set:\n  trian:\n    tokens: 1\n",
        "5: set.trian.tokens: no such section; allowed: model, data, train, eval, resources, checkpoint; "
        "did you mean 'train'?",
    ),
    "type": (
        "set:\n  train:\n    tokens: abc\n",
        "5: set.train.tokens: must be a valid integer, unable to parse string as an integer, got 'abc'",
    ),
    "limit": ("set:\n  train:\n    clip: -1\n", "5: set.train.clip: must be greater than 0, got -1"),
    "infinity": ("set:\n  train:\n    clip: .inf\n", "5: set.train.clip: must be a finite number, got inf"),
    "literal": (
        "set:\n  train:\n    schedule: cosin\n",
        "5: set.train.schedule: no such value 'cosin'; allowed: cosine, linear, wsd; did you mean 'cosine'?",
    ),
    "gate": (
        "set:\n  model:\n    mlp: swiglue\n",
        "5: set.model.mlp: no such value 'swiglue'; allowed: relu2, swiglu; did you mean 'swiglu'?",
    ),
    "number-or-none": (
        "set:\n  model:\n    logit_cap: off\n",
        "5: set.model.logit_cap: must be a number above 0, or none, got 'off'",
    ),
    "cap-of-zero": (
        "set:\n  model:\n    logit_cap: 0\n",
        "5: set.model.logit_cap: must be a number above 0, or none, got 0",
    ),
    "positions": (
        "set:\n  model:\n    positions: apr\n",
        f"5: set.model.positions: no such name 'apr'; allowed: {', '.join(['none', *POSITIONS])}; did you mean 'ape'?",
    ),
    "setting-of-positions": (
        "set:\n  model.positions: ape\n  model.position_settings.ape.len: 5\n",
        "5: set.model.position_settings.ape.len: no such setting under model.position_settings.ape; allowed: "
        "model.position_settings.ape.length, model.position_settings.ape.std; "
        "did you mean 'model.position_settings.ape.length'?",
    ),
    "table-too-short": (
        "set:\n  model.positions: ape\n  model.position_settings.ape.length: 100\n",
        "5: set.model.position_settings.ape.length: positions ape has 100 places, fewer than train.seq_len (128); "
        "set model.position_settings.ape.length to as many as the longest text has",
    ),
    "no-marks": (
        "set:\n  train.loss_on: marked\n",
        "4: set.train.loss_on: corpus stdlib does not mark which tokens count; set train.loss_on to all, or name one "
        "that may: shards, flipflop, mqar",
    ),
    "literal-as-axis": (
        "axes:\n  train.schedule: [cosine, cosin]\n",
        "4: axes.train.schedule: no such value 'cosin'; allowed: cosine, linear, wsd; did you mean 'cosine'?",
    ),
    "level-in-set": (
        "set:\n  memory: onn\n",
        f"4: set.memory: no level 'onn' of axis memory; allowed: {MEMORY}; did you mean 'on'?",
    ),
    "section-as-value": (
        "set:\n  data: 3\n",
        "4: set.data: is a section, not a value; allowed: data.corpus, data.path, "
        "data.tokenizer, data.tokenizer_file, data.end_of_text, data.train_tokens, data.validation_tokens, data.heldout_documents, data.heldout, data.heldout_tokens, data.shuffle, data.whole_steps, data.settings",
    ),
    "empty-section": ("set:\n  train: {}\n", "4: set.train: is empty; remove it or give it a value"),
    "set-is-a-list": ("set: [1]\n", "3: set: must be a mapping, got [1]"),
    "duplicate-yaml-key": (
        "set:\n  train:\n    tokens: 1e6\n    tokens: 2e6\n",
        "6: tokens: key given twice; keep one of them",
    ),
    "duplicate-level": ("axes:\n  memory: [off, on, no]\n", "4: axes.memory: level 'off' given twice"),
    "duplicate-cell": (
        "seeds: 2\naxes:\n  memory: [off, on]\n  model.window_size: [8, 16]\n",
        "6: axes.model.window_size: cells (memory=off, model.window_size=8, seed=0) and "
        "(memory=off, model.window_size=16, seed=0) are the same cell; exclude one of them",
    ),
    "duplicate-cell-of-one-memory": (
        "axes:\n  memory: [on, gated_delta]\n",
        "4: axes.memory: cells (memory=on, seed=0) and (memory=gated_delta, seed=0) are the same cell; "
        "exclude one of them",
    ),
    "duplicate-cell-by-include": (
        "axes:\n  memory: [off, on]\ninclude:\n  - {memory: on, window: on}\n  - {attn_type: polar}\n",
        "7: include: cells (memory=off, seed=0) and (attn_type=polar, seed=0) are the same cell; exclude one of them",
    ),
    "empty-axis": (
        "axes:\n  memory: []\n",
        "4: axes.memory: has no levels; give at least one, or remove the axis",
    ),
    "axis-is-no-list": ("axes:\n  memory: on\n", "4: axes.memory: must be a list of levels, got 'on'"),
    "axes-without-content": ("axes:\n", "3: axes: must be a mapping, got None"),
    "invalid-yaml": ("axes:\n  memory: [off, on\nseeds: 3\n", "5: not valid YAML: expected ',' or ']', but got ':'"),
    "tab": ("axes:\n\tmemory: [off]\n", "4: not valid YAML: found character '\\t' that cannot start any token"),
    "one-path-twice-in-set": (
        "set:\n  train.tokens: 1e6\n  train:\n    tokens: 2e6\n",
        f"6: set.train.tokens: sets train.tokens, which set.train.tokens in line 4 sets at the same level; {ONE}",
    ),
    "axis-name-and-path-in-set": (
        "set:\n  window: on\n  model:\n    window: on\n",
        f"6: set.model.window: sets model.window, which set.window in line 4 sets at the same level; {ONE}",
    ),
    "axis-name-and-path-as-axes": (
        "axes:\n  window: [off, on]\n  model.window: [off, on]\n",
        f"5: axes.model.window: sets model.window, which axes.window in line 4 sets at the same level; {ONE}",
    ),
    "resources-twice": (
        "resources:\n  gpus: 1\nset:\n  resources.gpus: 0\n",
        f"4: resources.gpus: sets resources.gpus, which set.resources.gpus in line 6 sets at the same level; {ONE}",
    ),
    "resources": (
        "resources:\n  gpu: 1\n",
        "4: resources.gpu: no such setting under resources; allowed: resources.gpus, resources.gpu_type, resources.cpus, "
        "resources.memory_gb, resources.on_cuda_oom, resources.order, resources.hang_minutes; did you mean 'resources.gpus'?",
    ),
    "exclude-axis": (
        "axes:\n  memory: [off, on]\nexclude:\n  - {memory: on}\n  - {memry: on}\n",
        "7: exclude[1].memry: not an axis of this grid; allowed: memory, seed; did you mean 'memory'?",
    ),
    "exclude-level": (
        "axes:\n  memory: [off, on]\nexclude:\n  - {memory: gated_delta}\n",
        "6: exclude[0].memory: no level 'gated_delta' in this grid; allowed: off, on",
    ),
    "exclude-seed": (
        "axes:\n  memory: [off, on]\nseeds: 2\nexclude:\n  - {memory: on, seed: [1, 2]}\n",
        "7: exclude[0].seed: no seed 2 in this grid; allowed: 0, 1",
    ),
    "exclude-seed-true": (
        "seeds: 2\nexclude:\n  - {seed: true}\n",
        "5: exclude[0].seed: no seed True in this grid; allowed: 0, 1",
    ),
    "exclude-seed-of-a-design": (
        "axes:\n  memory: [off, on]\nseeds: 2\nexclude:\n  - {memory: on, seed: 1}\ndesign: {runs: 2}\n",
        "7: exclude[0].seed: does not go with design, which has the same seeds for all; leave one out",
    ),
    "exclude-everything": (
        "axes:\n  memory: [off, on]\nexclude:\n  - memory: [on, off]\n",
        "5: exclude: drops every cell; nothing is left to run",
    ),
    "exclude-is-text": ("exclude: memory\n", "3: exclude: must be a list, got 'memory'"),
    "exclude-item": ("exclude:\n  - memory\n", "4: exclude[0]: must map axes to levels, got 'memory'"),
    "include-level": (
        "include:\n  - {memory: onn}\n",
        f"4: include[0].memory: no level 'onn'; allowed: {MEMORY}; did you mean 'on'?",
    ),
    "include-axis": (
        "include:\n  - {memry: on}\n",
        f"4: include[0].memry: no such axis; allowed: {AXES}, {ANY}; did you mean 'memory'?",
    ),
    "seeds-0": ("seeds: 0\n", "3: seeds: must be at least 1, got 0"),
    "seeds-text": ("seeds: three\n", f"3: seeds: {SEEDS}, got 'three'"),
    "seeds-boolean": ("seeds: true\n", f"3: seeds: {SEEDS}, got True"),
    "seeds-twice": ("seeds: [1, 1]\n", f"3: seeds: {SEEDS}, got [1, 1]"),
    "seeds-negative": ("seeds: [0, -1]\n", f"3: seeds: {SEEDS}, got [0, -1]"),
    "seeds-empty": ("seeds: []\n", f"3: seeds: {SEEDS}, got []"),
    "mixer-option": (
        "set:\n  model:\n    mixers:\n      rope: {bas: 3}\n",
        f"6: set.model.mixers.rope.bas: no such setting under model.mixers.rope; allowed: {ROPE}; "
        "did you mean 'model.mixers.rope.base'?",
    ),
    "mixer-option-type": (
        "set:\n  attn_type: rope\n  model.mixers.rope.base: x\n",
        "5: set.model.mixers.rope.base: must be a valid number, unable to parse string as a number, got 'x'",
    ),
    "mixer-option-literal": (
        "set:\n  attn_type: rope\n  model.mixers.rope.rotary: fll\n",
        "5: set.model.mixers.rope.rotary: no such value 'fll'; allowed: full, half-truncated; did you mean 'full'?",
    ),
    "mixer-name": (
        "set:\n  model:\n    mixers:\n      rop: {base: 3}\n",
        "6: set.model.mixers.rop.base: no such setting under model.mixers; "
        f"allowed: {', '.join(sorted(f'model.mixers.{name}' for name in MIXERS))}; did you mean 'model.mixers.rope'?",
    ),
    "diff-kv-heads": (
        "axes:\n  attn_type: [nope, diff]\nset:\n  model.n_kv_heads: 1\n",
        "6: set.model.n_kv_heads: mixer diff takes heads in pairs, but model.n_kv_heads is 1; make it even",
    ),
    "diff-heads": (
        "axes:\n  attn_type: [nope, diff]\nset:\n  model: {n_heads: 9, n_kv_heads: 3}\n",
        "6: set.model.n_heads: mixer diff takes heads in pairs, but model.n_heads is 9; make it even",
    ),
    "diff-rotary": (
        "set:\n  attn_type: diff\n  model.head_dim: 21\n",
        "5: set.model.head_dim: full rotary needs an even head_dim, got 21",
    ),
    "labels-too-few": (
        "axes:\n  model.positions: [none, label]\nset:\n  model.position_settings.label.length: 127\n",
        "6: set.model.position_settings.label.length: positions label has 127 places, fewer than train.seq_len (128); "
        "set model.position_settings.label.length to as many as the longest text has",
    ),
    "tra-no-key-survives": (
        "axes:\n  attn_type: [tra]\n  model.mixers.tra.scale: [1, 0]\n",
        "5: axes.model.mixers.tra.scale: scale must not be 0: a key survives when its score is above 0, and none would be",
    ),
    "no-place-for-a-mixer": (
        "axes:\n  attn_type: [tra, rel]\nset:\n  model: {attn_every: 8, attn_offset: 6}\n",
        "6: set.model.attn_offset: none of the 4 blocks is global, so mixer tra has no place; "
        "set model.attn_offset, which is 6, below model.n_layers",
    ),
    "no-place-in-few-blocks": (
        "set:\n  model.n_layers: 2\n",
        "4: set.model.n_layers: none of the 2 blocks is global, so mixer polar has no place; "
        "set model.attn_offset, which is 2, below model.n_layers",
    ),
    "cope-positions": (
        "set:\n  attn_type: cope\n  model.mixers.cope.positions: 0\n",
        "5: set.model.mixers.cope.positions: must be greater than or equal to 1, got 0",
    ),
    "memory-chunk-of-a-row": (
        "set:\n  model.memory: atlas\n  model.memories.atlas.chunk: 128\n",
        "5: set.model.memories.atlas.chunk: model.memories.atlas: chunk (128) is not below the 128 tokens of a row, and what a chunk "
        "writes is read after it alone, so nothing would be read; set a smaller one, or orthogonal to token or none",
    ),
    "memory-chunk-by-rows": (
        "axes: {memory: [atlas]}\nset:\n  train: {seq_len: 64, batch_tokens: 512}\n",
        "3: axes.memory: model.memories.atlas: chunk (64) is not below the 64 tokens of a row, and what a chunk "
        "writes is read after it alone, so nothing would be read; set a smaller one, or orthogonal to token or none",
    ),
    "memory-window-beyond-a-row": (
        "axes: {memory: [omega]}\nset:\n  model.memories.omega: {window: 129, chunk: 4}\n",
        "5: set.model.memories.omega.window: model.memories.omega: window (129) is more than the 128 tokens of a row, so none is ever "
        "full; set it to 128 at most",
    ),
    **{
        f"memory-{name}-0": (
            f"set:\n  model.memory: atlas\n  model.memories.atlas.{name}: 0\n",
            f"5: set.model.memories.atlas.{name}: must be greater than or equal to {least}, got 0",
        )
        for name, least in {"chunk": 1, "window": 1, "sketch": 1, "degree": 2, "hidden": 1}.items()
    },
    "memory-columns-of-products": (
        "axes: {memory: [omega]}\nset:\n  model.head_dim: 512\n  model.memories.omega.features: poly2\n",
        # 1 + 512 + 512 * 513 / 2 columns; a float32 for each of them, of 512 channels and of 4 heads
        "6: set.model.memories.omega.features: features (poly2) of 512 channels have 131,841 columns, and the memory of a layer 1,030 MiB a row; "
        "make sketch or model.head_dim smaller",
    ),
    "memory-columns-of-a-sketch": (
        "axes: {memory: [omega]}\nset:\n  model.memories.omega: {features: sketch, sketch: 300}\n",
        "5: set.model.memories.omega.sketch: features (sketch) of 20 channels have 90,000 columns, and the memory of a layer "
        "27 MiB a row; make sketch or model.head_dim smaller",
    ),
    "rel-buckets": (
        "axes:\n  attn_type: [rel]\n  model.mixers.rel.reach: [128, 16]\nset:\n  model.mixers.rel.buckets: 32\n",
        "5: axes.model.mixers.rel.reach: buckets (32) must be at most reach (16)",
    ),
    "rel-one-bucket": (
        "set:\n  attn_type: rel\n  model.mixers.rel.buckets: 1\n",
        "5: set.model.mixers.rel.buckets: must be greater than or equal to 2, got 1",
    ),
    **{
        f"distractor-{name}": (
            f"axes:\n  attn_type: [polar, {name}]\n  distractor: [off, on]\n",
            f"5: axes.distractor: mixer {name} has no distractor loss; exclude that combination, or give the mixer one",
        )
        for name in MIXERS
        if not has_distractor(name)
    },
    "computed-field": (
        "set:\n  data.fingerprint: abc\n",
        "4: set.data.fingerprint: is computed from the text; remove it",
    ),
    "seed-in-set": (
        "set:\n  seed: 3\n",
        "4: set.seed: is given by the grid's key seeds, for example seeds: [0, 1]",
    ),
    "seed-as-axis": (
        "axes:\n  seed: [0, 1]\n",
        "4: axes.seed: is given by the grid's key seeds, for example seeds: [0, 1]",
    ),
    "vocabulary": (
        "set:\n  model:\n    vocab_size: 256\n",
        "5: set.model.vocab_size: model.vocab_size is 256, but tokenizer bytes has 257 tokens",
    ),
    "vocabulary-by-tokenizer": (
        "set:\n  data:\n    tokenizer: gpt2\n",
        "5: set.data.tokenizer: model.vocab_size is 264, but tokenizer gpt2 has 50257 tokens",
    ),
    "tokenizer": (
        "set:\n  data:\n    tokenizer: gtp2\n",
        "5: set.data.tokenizer: no such name 'gtp2'; allowed: bytes, gpt2, json, mqar, flipflop; did you mean 'gpt2'?",
    ),
    "batch-does-not-divide": (
        "set:\n  train:\n    batch_tokens: 1000\n",
        "5: set.train.batch_tokens: batch_tokens (1000) must be a multiple of seq_len * micro_batch (128 * 8 = 1024)",
    ),
    "batch-does-not-divide-by-axis": (
        "axes:\n  train.micro_batch: [1, 3]\n",
        "4: axes.train.micro_batch: batch_tokens (1024) must be a multiple of seq_len * micro_batch (128 * 3 = 384)",
    ),
    "no-step": (
        "set:\n  train:\n    tokens: 1000\n",
        "5: set.train.tokens: tokens (1000) is less than one step of batch_tokens (1024)",
    ),
    "heads": ("set:\n  model.n_heads: 3\n", "4: set.model.n_heads: n_kv_heads (2) must divide n_heads (3)"),
    "more-gates-than-channels": (
        "set:\n  attn_type: wall\n  model.mixers.wall.subdim: 99\n",
        "5: set.model.mixers.wall.subdim: subdim (99) must be at most model.head_dim (20)",
    ),
    "lengths": (
        "set:\n  eval.lengths: [8, 4]\n",
        "4: set.eval.lengths: lengths must rise and start at 2 or more, got [8, 4]",
    ),
    "probe": (
        "set:\n  eval:\n    probes: [val, nedle]\n",
        f"5: set.eval.probes: no such name 'nedle'; allowed: {', '.join(PROBES)}; did you mean 'needle'?",
    ),
    "plugin-missing": (
        "plugins: [clahs.py]\n",
        "3: plugins: no file 'clahs.py' beside the grid; allowed: clash.py, raises.py; did you mean 'clash.py'?",
    ),
    "plugin-raises": (
        "plugins:\n  - raises.py\n",
        "4: plugins: raises.py cannot be loaded: RuntimeError: first line second line",
    ),
    "plugin-name-clash": (
        "plugins: [clash.py]\n",
        "3: plugins: clash.py cannot be loaded: ValueError: a mixer named 'rope' exists already; choose another name",
    ),
    "seeds-without-end": (
        f"seeds: {10**18}\n",
        f"3: seeds: the grid has {10**18:,} cells; {MISTAKE.format(10**18)}",
    ),
    "too-many-levels": (
        f"seeds: 2\naxes:\n  memory: [off, on]\n  train.clip: {list(range(1, 2000))}\n  train.muon_lr: {list(range(1, 1900))}\n",
        f"6: axes.train.clip: the grid has {8 * 1999 * 1899 // 2:,} cells; {MISTAKE.format(4 * 1999 * 1899)}",
    ),
    "too-many-included": (
        f"axes:\n  memory: [off, on]\ninclude:\n  - train.clip: {list(range(1, 150))}\n    train.muon_lr: {list(range(1, 150))}\n",
        f"5: include: the grid has {149 * 149 + 2:,} cells; {MISTAKE.format(149 * 149 + 2)}",
    ),
    "too-many-though-excluded": (
        f"axes:\n  memory: [off, on]\n  train.clip: {list(range(1, 20001))}\nexclude:\n  - memory: on\n",
        f"5: axes.train.clip: the grid has 40,000 cells, those that exclude drops counted; {MISTAKE.format(40000)}",
    ),
    "seed-beyond-the-database": (
        "seeds: [9_223_372_036_854_775_808]\n",
        "3: seeds: the whole number '9_223_372_036_854_775_808' is beyond 9223372036854775807; quote it where it is text",
    ),
    "plugins-is-text": ("plugins: clash.py\n", "3: plugins: must be a list, got 'clash.py'"),
}
CLASH = """
from atma_sweep.model.bases import Mixer
from atma_sweep.model.registry import register_mixer

@register_mixer("rope")
class Mine(Mixer):
    pass
"""


def message(path: Path | str, fingerprint: Callable[..., str], **options: object) -> str:
    with pytest.raises(GridError) as caught:
        load_grid(path, **options).expand(fingerprint)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line_that_says_where_and_what(
    case: str, write: Write, fake_fingerprint: Callable[..., str]
) -> None:
    write("raise RuntimeError('first line\\nsecond line')\n", "raises.py")
    write(CLASH, "clash.py")
    text, expected = CASES[case]
    path = write(HEAD + text)
    assert message(path, fake_fingerprint) == f"{path}:{expected}"


WHOLE_FILES = {
    "list": ("- a\n- b\n", "1: must hold a mapping of keys such as name, extends and axes"),
    "empty": ("", "1: must hold a mapping of keys such as name, extends and axes"),
    "no-name": ("extends: micro\n", "1: name: is missing; give the sweep a name"),
    "name-is-a-number": ("name: 3\nextends: micro\n", "1: name: must be text, got 3"),
    "name-twice": ("name: a\nname: b\n", "2: name: key given twice; keep one of them"),
    "unknown-base": (
        "name: g\nextends: tinny\n",
        f"2: extends: no base 'tinny'; allowed: {BASES}; did you mean 'tiny'?",
    ),
    "base-in-a-folder-that-is-not-there": (
        "name: g\nextends: elsewhere/tiny\n",
        f"2: extends: no base 'elsewhere/tiny'; allowed: {BASES}",
    ),
    "two-documents": ("name: a\n---\nname: b\n", "2: not valid YAML: but found another document"),
}


@pytest.mark.parametrize("case", WHOLE_FILES)
def test_a_file_that_is_no_grid(case: str, write: Write, fake_fingerprint: Callable[..., str]) -> None:
    text, expected = WHOLE_FILES[case]
    path = write(text)
    assert message(path, fake_fingerprint).startswith(f"{path}:{expected}")


def test_base_cycle_is_reported_in_the_base_that_closes_it(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    one = write("description: x\nextends: two\n", "one.yaml")
    two = write("extends: one\n", "two.yaml")
    grid = write("name: g\nextends: one\n")
    assert message(grid, fake_fingerprint) == f"{two}:1: extends: base 'one' extends itself"
    one.write_text("extends: one\n")
    assert message(grid, fake_fingerprint) == f"{one}:1: extends: base 'one' extends itself"


def test_a_base_may_not_have_axes(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    base = write("extends: micro\naxes:\n  memory: [on]\n", "mine.yaml")
    grid = write("name: g\nextends: mine\n")
    expected = f"{base}:2: axes: no such key; allowed: description, extends, set, resources"
    assert message(grid, fake_fingerprint) == expected


def test_wrong_value_in_a_base_is_blamed_there(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    base = write("extends: micro\nset:\n  train:\n    clip: 0\n", "mine.yaml")
    grid = write("name: g\nextends: mine\nset:\n  train.muon_lr: 0.1\n")
    assert message(grid, fake_fingerprint) == (
        f"{base}:4: set.train.clip: must be greater than 0, got 0; inherited from base mine: set train.clip in g.yaml to "
        "change it"
    )


def test_missing_grid_names_the_nearest_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_fingerprint: Callable[..., str]
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = f"no such grid file; allowed: {', '.join(sorted(shipped()))}"
    assert message("quik", fake_fingerprint) == f"quik: {problem}; did you mean 'quick'?"
    # A folder that was typed is meant: no shipped grid of the same name instead.
    assert message("mine/quick", fake_fingerprint) == f"mine/quick: {problem}; did you mean 'quick'?"
    assert message("/nowhere/grids/full.yaml", fake_fingerprint).startswith(f"/nowhere/grids/full.yaml: {problem}")
    assert message("", fake_fingerprint) == f": {problem}"


def test_unreadable_grid(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    path = write("name: g\n")
    path.write_bytes(b"name: \xff\n")
    assert message(path, fake_fingerprint).startswith(f"{path}: cannot be read: 'utf-8' codec can't decode byte 0xff")


SETS = {
    "no-equals": (("train.tokens",), "--set: train.tokens: must read path=value, for example train.tokens=1e6"),
    "twice": (
        ("train.tokens=1e6", "train.tokens=2e6"),
        "--set: train.tokens: sets train.tokens, which train.tokens sets at the same level; keep one of them",
    ),
    "axis-and-path": (
        ("window=on", "model.window=off"),
        "--set: model.window: sets model.window, which window sets at the same level; keep one of them",
    ),
    "unknown": (
        ("train.tokns=1e6",),
        f"--set: train.tokns: no such setting under train; allowed: {TRAIN}; did you mean 'train.tokens'?",
    ),
    "axis-name": (
        ("memry=on",),
        f"--set: memry: no such section; allowed: model, data, train, eval, resources, checkpoint, {AXES}; "
        "did you mean 'memory'?",
    ),
    "type": (
        ("train.tokens=few",),
        "--set: train.tokens: must be a valid integer, unable to parse string as an integer, got 'few'",
    ),
    "empty": (("train.tokens=",), "--set: train.tokens: must be a valid integer, got None"),
    "batch": (
        ("train.micro_batch=3",),
        "--set: train.micro_batch: batch_tokens (1024) must be a multiple of seq_len * micro_batch (128 * 3 = 384)",
    ),
    "seed": (("seed=3",), "--set: seed: is given by the grid's key seeds, for example seeds: [0, 1]"),
}


@pytest.mark.parametrize("case", SETS)
def test_mistakes_in_set_options(case: str, write: Write, fake_fingerprint: Callable[..., str]) -> None:
    sets, expected = SETS[case]
    assert message(write(HEAD), fake_fingerprint, sets=sets, rename="other") == expected


@pytest.mark.parametrize("name", [None, "g"])
def test_set_needs_a_name_of_its_own(write: Write, name: str | None, fake_fingerprint: Callable[..., str]) -> None:
    found = message(write(HEAD), fake_fingerprint, sets=["train.clip=2"], rename=name)
    assert found == "--set: a changed grid needs a name of its own: add --name, other than 'g'"


def test_error_keeps_its_parts(write: Write) -> None:
    path = write(HEAD + "axes:\n  memory: [offf]\n")
    with pytest.raises(GridError) as caught:
        load_grid(path)
    error = caught.value
    assert (error.file, error.line, error.key) == (str(path), 4, "axes.memory")
    assert (error.allowed, error.nearest, error.exit_code) == (["off", "on", *MEMORIES], "off", 2)


def test_nearest_word_is_near_or_none() -> None:
    assert nearest("polr", ["nope", "polar", "rope"]) == "polar"
    assert nearest("xyzzy", ["nope", "polar", "rope"]) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../../x", "'../../../x' is no name for a sweep: letters, digits"),
        ("a b", "'a b' is no name for a sweep"),
        ("x" * 5000, f"'{'x' * 60}'... (5000 letters) is no name for a sweep"),
        (
            "printed-v2",
            "'printed-v2' is no name for a sweep of your own: printed-... are the numbers that the paper prints",
        ),
    ],
)
def test_a_name_that_no_sweep_may_have(write: Write, name: str, why: str) -> None:
    good, bad = write("name: g\nextends: micro\n"), write(f"extends: micro\nname: {name}\n", "bad.yaml")
    with pytest.raises(GridError) as error:
        load_grid(bad)
    assert str(error.value).startswith(f"{bad}:2: name: {why}")
    with pytest.raises(GridError) as error:
        load_grid(good, rename=name)
    assert str(error.value).startswith(f"--name: {why}")
    # what a file may not be called does not matter when it is launched under another name
    assert load_grid(bad, rename="fine").name == "fine"
