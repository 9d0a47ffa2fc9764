"""`design:` in a grid: what it may say, which cells it takes, and that they are cells of the whole grid."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.json_schema import grid_schema
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

Write = Callable[..., Path]
HEAD = (
    "name: g\nextends: micro\naxes: {attn_type: [polar, nope, rope], distractor: [off, on], memory: [off, on], window: [off, on]}\n"
)  # fmt: skip
TWO = HEAD.replace("[polar, nope, rope]", "[polar, nope]")
POLAR = "contrasts: [{measure: val.val_loss, axis: memory, level: on, within: {attn_type: polar}}]\n"

WRONG = {
    "no mapping": ("design: 7\n", "4: design: must be a mapping, got 7"),
    "key": ("design: {rnus: 9}\n", "4: design.rnus: no such key; allowed: fraction, runs, resolution, method, model; did you mean 'runs'?"),
    "two sizes": ("design: {runs: 9, fraction: 1/2}\n", "4: design: must give one of fraction, runs, resolution"),
    "no size": ("design: {method: regular}\n", "4: design: must give one of fraction, runs, resolution"),
    "method": ("design: {runs: 9, method: lucky}\n", "4: design.method: no method 'lucky'; allowed: d-optimal, regular"),
    "model": ("design: {runs: 9, model: mains}\n", "4: design.model: no model 'mains'; allowed: main, two-way; did you mean 'main'?"),
    "share": ("design: {fraction: 5/4}\n", "4: design.fraction: must be a share between 0 and 1 such as 1/4, got '5/4'"),
    "no number": ("design: {fraction: a half}\n", "4: design.fraction: must be a share between 0 and 1 such as 1/4, got 'a half'"),
    "runs": ("design: {runs: 0}\n", "4: design.runs: must be a whole number of combinations, at least 1, got 0"),
    "too few": (
        "design: {runs: 5}\n",
        "4: design.runs: 5 combinations cannot estimate 6 numbers (the mean, attn_type 2, distractor 1, memory 1, window 1); give runs: 6 or more",
    ),
    "too small a share": ("design: {fraction: 1/7}\n", "4: design.fraction: 3 combinations cannot estimate 6 numbers"),
    "too many": ("design: {runs: 25}\n", "4: design.runs: 25 are more than the grid's 24 combinations; leave design out to run all"),
    "resolution": ("design: {resolution: II}\n", "4: design.resolution: must be III (main effects apart), IV, V or higher, got 'II'"),
    "no fraction": (
        "design: {resolution: IV}\n",
        "4: design.resolution: no fraction of resolution IV of 3 two-level axes tells attn_type, distractor, memory, window apart",
    ),
    "excluded": ("design: {resolution: III}\nexclude: [{memory: on, window: on}]\n", "4: design.resolution: a regular fraction needs every combination"),
    "no power of two": ("design: {fraction: 1/3, method: regular}\n", "4: design.fraction: there is no regular fraction of 1/3"),
    "method of a resolution": ("design: {resolution: III, method: d-optimal}\n", "4: design.method: a resolution is that of a regular fraction"),
    "contrast needs more": (
        f"design: {{runs: 7}}\n{POLAR}",
        "4: design.runs: 7 combinations cannot estimate 8 numbers (the mean, attn_type 2, distractor 1, memory 1, window 1, "
        "attn_type x memory 2); give runs: 8 or more",
    ),
    "no such pair": (
        f"design: {{runs: 12}}\n{POLAR}exclude: [{{attn_type: polar, memory: on}}]\n",
        "4: design: cannot estimate contrasts[0] (memory: on - off): exclude leaves no pair of them within attn_type=polar",
    ),
    "nothing to choose": ("axes: {}\ninclude: [{memory: on}]\ndesign: {runs: 1}\n", "design: no axis has two levels"),
}  # fmt: skip


def fake(data: object) -> str:
    return "f" * 64


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(write: Write, name: str) -> None:
    text, told = WRONG[name]
    head = "name: g\nextends: micro\n" if "axes:" in text else HEAD
    with pytest.raises(GridError) as wrong:
        load_grid(write(head + text))
    assert told in str(wrong.value)
    assert "\n" not in str(wrong.value)


SIZES = {
    "{runs: 9}": 9,
    "{fraction: 1/2}": 12,
    "{fraction: 0.5}": 12,
    "{fraction: 1/3}": 8,
    "{fraction: 1/2, method: regular}": 12,
    "{resolution: III}": 12,
    "{runs: 20, model: two-way}": 20,
    "{runs: 24}": 24,
}


@pytest.mark.parametrize("asked", SIZES)
def test_its_cells_are_cells_of_the_whole_grid(write: Write, asked: str) -> None:
    rest = "seeds: 2\ninclude: [{attn_type: polar, memory: kda}]\n"
    whole = [cell.id for cell in load_grid(write(HEAD + rest)).expand(fake)]
    cells = [cell.id for cell in load_grid(write(f"{HEAD}{rest}design: {asked}\n")).expand(fake)]
    # both seeds of every combination, and the included one besides
    assert len(cells) == 2 * (SIZES[asked] + 1)
    assert cells == [cell for cell in whole if cell in set(cells)]
    assert cells[-2:] == whole[-2:]


def test_excluded_combinations_are_never_taken(write: Write) -> None:
    text = f"{HEAD}exclude: [{{memory: on, window: on, attn_type: [nope, rope]}}]\ndesign: {{runs: 20}}\n"
    cells = load_grid(write(text)).expand(fake)
    assert len(cells) == 20
    bare = load_grid(write(text.partition("design")[0])).expand(fake)
    assert [cell.id for cell in cells] == [cell.id for cell in bare]


def test_a_larger_design_holds_the_smaller_one(write: Write) -> None:
    ids = [
        {cell.id for cell in load_grid(write(f"{HEAD}{POLAR}design: {{runs: {n}}}\n")).expand(fake)}
        for n in (8, 9, 12, 17, 23, 24)
    ]
    assert all(small < large for small, large in pairwise(ids))


def test_a_regular_fraction_of_two_levels(write: Write) -> None:
    grid = load_grid(write(f"{TWO}design: {{resolution: IV}}\n"))
    assert grid.chosen is not None
    assert grid.chosen.design.words == (("attn_type", "distractor", "memory", "window"),)
    assert grid.chosen.told()[:2] == [
        "design: 8 of 16 combinations, regular, I = attn_type x distractor x memory x window; estimated: attn_type, distractor, "
        "memory, window; other interactions are taken for nothing",
        "design: with these 8 cells, attn_type x distractor cannot be told from memory x window; attn_type x memory cannot be told "
        "from distractor x window; attn_type x window cannot be told from distractor x memory",
    ]
    # what a contrast is about cannot be lost in another interaction that one is about
    both = f"{POLAR[:-2]}, {{measure: val.val_loss, axis: window, level: on, within: {{distractor: on}}}}]\n"
    with pytest.raises(GridError, match=r"design\.resolution: no fraction of resolution IV"):
        load_grid(write(f"{TWO}{both}design: {{resolution: IV}}\n"))


def test_the_same_cells_in_every_process(write: Write) -> None:
    path = write(f"{HEAD}{POLAR}design: {{runs: 11}}\n")
    grid = load_grid(path)
    assert grid.chosen is not None
    code = "import sys; from atma_sweep.sweep.grid.grid import load_grid; print(load_grid(sys.argv[1]).chosen.members.tolist())"
    told = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert json.loads(told.stdout) == grid.chosen.members.tolist() == [0, 3, 5, 6, 9, 10, 12, 15, 17, 18, 20]


def test_the_schema_knows_it() -> None:
    schema = Draft202012Validator(grid_schema())
    yaml = YAML(typ="safe", pure=True)
    for asked in SIZES:
        assert list(schema.iter_errors(yaml.load(f"{HEAD}design: {asked}\n"))) == []
    for name in ("no mapping", "key", "two sizes", "no size", "method", "model", "no number", "runs", "resolution"):
        assert list(schema.iter_errors(yaml.load(HEAD + WRONG[name][0]))), name
