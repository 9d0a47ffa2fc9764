"""`design:` of a grid: allowed values, the chosen cells, and that they are cells of the full grid."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.grid_file import _fraction
from atma_sweep.sweep.grid.json_schema import grid_schema
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

Write = Callable[..., Path]
HEAD = (
    "name: g\nextends: micro\naxes: {attn_type: [polar, nope, rope], distractor: [off, on], memory: [off, on], window: [off, on]}\n"
)  # fmt: skip
TWO = HEAD.replace("[polar, nope, rope]", "[polar, nope]")
POLAR = "contrasts: [{measure: val.val_loss, axis: memory, level: on, within: {attn_type: polar}}]\n"


def fake(data: object) -> str:
    return "f" * 64


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


@pytest.mark.parametrize("options", SIZES)
def test_design_cells_are_cells_of_the_full_grid(write: Write, options: str) -> None:
    rest = "seeds: 2\ninclude: [{attn_type: polar, memory: kda}]\n"
    all_ids = [cell.id for cell in load_grid(write(HEAD + rest)).expand(fake)]
    cells = [cell.id for cell in load_grid(write(f"{HEAD}{rest}design: {options}\n")).expand(fake)]
    # both seeds of every combination, and the included one besides
    assert len(cells) == 2 * (SIZES[options] + 1)
    assert cells == [cell for cell in all_ids if cell in set(cells)]
    assert cells[-2:] == all_ids[-2:]


def test_design_never_contains_excluded_combinations(write: Write) -> None:
    text = f"{HEAD}exclude: [{{memory: on, window: on, attn_type: [nope, rope]}}]\ndesign: {{runs: 20}}\n"
    cells = load_grid(write(text)).expand(fake)
    assert len(cells) == 20
    bare = load_grid(write(text.partition("design")[0])).expand(fake)
    assert [cell.id for cell in cells] == [cell.id for cell in bare]


def test_larger_design_contains_the_smaller_design(write: Write) -> None:
    ids = [
        {cell.id for cell in load_grid(write(f"{HEAD}{POLAR}design: {{runs: {n}}}\n")).expand(fake)}
        for n in (8, 9, 12, 17, 23, 24)
    ]
    assert all(small < large for small, large in pairwise(ids))


def test_design_regular_fraction_of_two_level_axes(write: Write) -> None:
    grid = load_grid(write(f"{TWO}design: {{resolution: IV}}\n"))
    assert grid.chosen is not None
    assert grid.chosen.design.defining_relation == (("attn_type", "distractor", "memory", "window"),)
    assert grid.chosen.lines()[:2] == [
        "design: 8 of 16 combinations, regular, I = attn_type x distractor x memory x window; estimated: attn_type, distractor, "
        "memory, window; other interactions are assumed to be zero",
        "design: with these 8 cells, attn_type x distractor is aliased with memory x window; attn_type x memory "
        "is aliased with distractor x window; attn_type x window is aliased with distractor x memory",
    ]
    # what a contrast is about cannot be lost in another interaction that one is about
    both = f"{POLAR[:-2]}, {{measure: val.val_loss, axis: window, level: on, within: {{distractor: on}}}}]\n"
    with pytest.raises(GridError, match=r"design\.resolution: no fraction of resolution IV"):
        load_grid(write(f"{TWO}{both}design: {{resolution: IV}}\n"))


def test_design_is_equal_in_every_process(write: Write) -> None:
    path = write(f"{HEAD}{POLAR}design: {{runs: 11}}\n")
    grid = load_grid(path)
    assert grid.chosen is not None
    code = "import sys; from atma_sweep.sweep.grid.grid import load_grid; print(load_grid(sys.argv[1]).chosen.members.tolist())"
    result = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert json.loads(result.stdout) == grid.chosen.members.tolist() == [0, 3, 5, 6, 9, 10, 12, 15, 17, 18, 20]


def test_schema_accepts_design_sections() -> None:
    schema = Draft202012Validator(grid_schema())
    yaml = YAML(typ="safe", pure=True)
    for size in SIZES:
        assert list(schema.iter_errors(yaml.load(f"{HEAD}design: {size}\n"))) == []


@pytest.mark.parametrize(("text", "share"), [
    ("1/4", Fraction(1, 4)), ("0.333333333333", Fraction(1, 3)), ("1e-7", Fraction(1, 10_000_000)),
    ("0.99999999", Fraction(99_999_999, 100_000_000)),
])  # fmt: skip
def test_fraction_is_never_rounded_to_0_or_1(text: str, share: Fraction) -> None:
    assert _fraction(text) == share
