"""Every mistake in a grid is one line: file, line, key, what is wrong, what is allowed, the nearest word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
from atma_sweep.model.mixers.softmax import RoPEConfig
from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS
from atma_sweep.results.metrics import OF_TRAINING
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.errors import GridError, nearest
from atma_sweep.sweep.grid.grid import load_grid, shipped
from atma_sweep.sweep.grid.json_schema import grid_schema
from atma_sweep.sweep.planning import replicates
from atma_sweep.sweep.probes import PROBES
from jsonschema import Draft202012Validator
from registries import has_distractor
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Write = Callable[..., Path]
BASES, MEMORY = ", ".join(shipped("base")), ", ".join(["off", "on", *MEMORIES])
TRAIN = ", ".join(f"train.{name}" for name in TrainConfig.model_fields if name != "regularizer_source")
NAMES = {
    "TRAIN": TRAIN,
    "PROBES": ", ".join(PROBES),
    "PROBE_SETTINGS": ", ".join(f"eval.settings.{name}" for name in sorted(PROBES)),
    "PROBES_AND_TRAINING": ", ".join([*PROBES, *OF_TRAINING]),
    "MEMORY": MEMORY,
    "MIXERS": ", ".join(MIXERS),
    "POSITIONS": ", ".join(POSITIONS),
    "ROPE": ", ".join(f"model.mixers.rope.{name}" for name in sorted(RoPEConfig.model_fields)),
}
TABLE = YAML(typ="safe", pure=True).load((Path(__file__).parent / "bad_grids.yaml").read_text())
CASES = {f"{section}-{name}": case for section, cases in TABLE.items() for name, case in cases.items()}
HEAD = "name: g\nextends: micro\n"
MISTAKE = "more than 20,000 are taken for a mistake, --cells {} allows them"
RANGES = [f"[{', '.join(map(str, range(1, n)))}]" for n in (2000, 1900, 150, 20001)]
LARGE = {
    f"seeds: {10**18}\n": f"3: seeds: the grid has {10**18:,} cells; {MISTAKE.format(10**18)}",
    f"seeds: 2\naxes:\n  memory: [off, on]\n  train.clip: {RANGES[0]}\n  train.muon_lr: {RANGES[1]}\n": (
        f"6: axes.train.clip: the grid has {4 * 1999 * 1899:,} cells; {MISTAKE.format(4 * 1999 * 1899)}"
    ),
    f"axes:\n  memory: [off, on]\ninclude:\n  - train.clip: {RANGES[2]}\n    train.muon_lr: {RANGES[2]}\n": (
        f"5: include: the grid has {149 * 149 + 2:,} cells; {MISTAKE.format(149 * 149 + 2)}"
    ),
    f"axes:\n  memory: [off, on]\n  train.clip: {RANGES[3]}\nexclude:\n  - memory: on\n": (
        f"5: axes.train.clip: the grid has 40,000 cells, those that exclude drops counted; {MISTAKE.format(40000)}"
    ),
    "stop: {contrast: memory, metric: val_loss, ci: 1, max_seeds: 1000}\n"
    "axes: {memory: [off, on], train.tokens: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}\n": (
        f"1: seeds: the grid has 22,000 cells; {MISTAKE.format(22000)}"
    ),
}
"""Lines below HEAD -> the message about the size."""
CLASH = """
from atma_sweep.model.bases import Mixer
from atma_sweep.model.registry import register_mixer

@register_mixer("rope")
class Mine(Mixer):
    pass
"""


def message(path: Path | str, fingerprint: Callable[..., str], **options: Any) -> str:
    """Return the one line that loading, expanding and planning the seeds of a grid ends with."""
    with pytest.raises(GridError) as caught:  # noqa: PT012 - any of the three may refuse it
        grid = load_grid(path, **options)
        replicates.with_further_seeds(grid, grid.expand(fingerprint), None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_one_line_that_says_where_and_what(
    case: str, write: Write, fake_fingerprint: Callable[..., str]
) -> None:
    write("raise RuntimeError('first line\\nsecond line')\n", "raises.py")
    write(CLASH, "clash.py")
    path = write(CASES[case]["grid"])
    assert message(path, fake_fingerprint) == f"{path}:{Template(CASES[case]['error']).substitute(NAMES)}"


def test_editors_mark_mistakes_that_no_plugin_excuses() -> None:
    schema = Draft202012Validator(grid_schema())

    def is_marked(text: str) -> bool:
        try:
            return not schema.is_valid(YAML(typ="safe", pure=True).load(text))
        except YAMLError:
            return False

    assert {name for name, case in CASES.items() if is_marked(case["grid"])} == {
        name for name, case in CASES.items() if case.get("marked")
    }


@pytest.mark.parametrize("text", LARGE, ids=lambda text: text[:20])
def test_a_grid_too_large_is_counted_not_made(text: str, write: Write, fake_fingerprint: Callable[..., str]) -> None:
    path = write(HEAD + text)
    assert message(path, fake_fingerprint) == f"{path}:{LARGE[text]}"


@pytest.mark.parametrize("mixer", [name for name in MIXERS if not has_distractor(name)])
def test_a_mixer_without_a_distractor_loss(mixer: str, write: Write, fake_fingerprint: Callable[..., str]) -> None:
    path = write(f"{HEAD}axes:\n  attn_type: [polar, {mixer}]\n  distractor: [off, on]\n")
    problem = f"mixer {mixer} has no distractor loss; exclude that combination, or give the mixer one"
    assert message(path, fake_fingerprint) == f"{path}:5: axes.distractor: {problem}"


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
        "--set: memry: no such section; allowed: model, data, train, eval, resources, checkpoint, attn_type, reg_mode, distractor, memory, window; "
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
