"""`stop:` in a grid: what it may say, and the contrast and the seeds that it means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from atma_sweep.results.contrasts import Contrast
from atma_sweep.results.stopping.stopping_rule import Rule
from atma_sweep.sweep.errors import GridError
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.grid.json_schema import grid_schema
from atma_sweep.sweep.planning import replicates
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

Write = Callable[..., Path]
HEAD = "name: g\nextends: micro\naxes: {attn_type: [polar, nope, rope], memory: [off, on], window: [off, on]}\n"
GOOD = "stop: {contrast: memory, metric: needle@1024, ci: 10}\n"
NEEDLE = Contrast(probe="needle", metric="digit_accuracy", length=1024, axis="memory", level="on", reference="off")

WRONG = {
    "no mapping": ("stop: 7\n", "4: stop: must be a mapping, got 7"),
    "key": ("stop: {contrast: memory, metric: val_loss, cii: 1}\n", "4: stop.cii: no such key; allowed: contrast, level,"),
    "lacking": ("stop: {metric: val_loss, ci: 1}\n", "4: stop: lacks contrast; it needs contrast, metric, and ci or sure"),
    "no end": ("stop: {contrast: memory, metric: val_loss}\n", "4: stop: must say when it is enough: ci, how wide the interval may be, or sure: true"),
    "contrast": ("stop: {contrast: memori, metric: val_loss, ci: 1}\n", "4: stop.contrast: not an axis of this grid; allowed: attn_type, memory, window; did you mean 'memory'?"),
    "a list": ("stop: {contrast: [memory], metric: val_loss, ci: 1}\n", "4: stop.contrast: not an axis of this grid"),
    "three levels": ("stop: {contrast: attn_type, metric: val_loss, ci: 1}\n", "4: stop.contrast: has the levels polar, nope, rope; say which one with level"),
    "level": ("stop: {contrast: attn_type, level: fox, metric: val_loss, ci: 1}\n", "4: stop.level: no level 'fox' of attn_type in this grid; allowed: polar, nope, rope"),
    "itself": ("stop: {contrast: memory, level: off, metric: val_loss, ci: 1}\n", "4: stop.reference: is the level off itself; a contrast needs two"),
    "within": ("stop: {contrast: memory, within: {attn_type: fox}, metric: val_loss, ci: 1}\n", "4: stop.within.attn_type: no level 'fox'"),
    "metric": ("stop: {contrast: memory, metric: vall_loss, ci: 1}\n", "4: stop.metric: no probe and no number is called 'vall_loss'; allowed: val, clean,"),
    "several": ("stop: {contrast: memory, metric: nats@1024, ci: 1}\n", "4: stop.metric: several probes have a number 'nats'; allowed: clean.nats, junk.nats,"),
    "no such metric": ("stop: {contrast: memory, metric: clean.nat@1024, ci: 1}\n", "4: stop.metric: the probe clean has no metric 'nat'"),
    "no length": ("stop: {contrast: memory, metric: needle, ci: 1}\n", "4: stop.metric: needs a context length: needle.digit_accuracy@65536"),
    "another length": ("stop: {contrast: memory, metric: needle@99, ci: 1}\n", "4: stop.metric: no cell is evaluated at needle.digit_accuracy@99 (eval.lengths)"),
    "ci": ("stop: {contrast: memory, metric: val_loss, ci: 0}\n", "4: stop.ci: must be the width of the interval in nats/token, above 0, got 0"),
    "points": ("stop: {contrast: memory, metric: needle@1024, ci: wide}\n", "4: stop.ci: must be the width of the interval in points, above 0, got 'wide'"),
    "sure": ("stop: {contrast: memory, metric: val_loss, sure: 0.05}\n", "4: stop.sure: must be true or false, got 0.05"),
    "min": ("stop: {contrast: memory, metric: val_loss, ci: 1, min_seeds: 1}\n", "4: stop.min_seeds: must be a whole number from 2 to 1000, got 1"),
    "max below min": ("stop: {contrast: memory, metric: val_loss, ci: 1, min_seeds: 4, max_seeds: 3}\n", "4: stop.max_seeds: 3 is below min_seeds: 4; give max_seeds: 4 or more"),
    "max below seeds": ("seeds: 9\nstop: {contrast: memory, metric: val_loss, ci: 1}\n", "5: stop.max_seeds: 8 (the default) is below the 9 seeds of the first look; give max_seeds: 9 or more"),
    "min below seeds": ("seeds: 4\nstop: {contrast: memory, metric: val_loss, ci: 1, min_seeds: 3}\n", "5: stop.min_seeds: is below the 4 seeds that every cell of the grid has; leave it out"),
    "wave": ("stop: {contrast: memory, metric: val_loss, ci: 1, wave: 0}\n", "4: stop.wave: must be a whole number from 1 to 1000, got 0"),
    "spending": ("stop: {contrast: memory, metric: val_loss, ci: 1, spending: pockok}\n", "4: stop.spending: no spending 'pockok'; allowed: obrien-fleming, pocock; did you mean 'pocock'?"),
    "no pair": ("exclude: [{memory: on}]\nstop: {contrast: memory, metric: val_loss, ci: 1}\n", "5: stop: no two cells of the grid differ in memory alone, on against off"),
    "not in the design": (
        "design: {runs: 6}\nstop: {contrast: memory, within: {attn_type: polar}, metric: val_loss, ci: 1}\n",
        "4: design.runs: 6 combinations cannot estimate 7 numbers",
    ),
    "no pair of the design": (
        "design: {runs: 8}\nexclude: [{attn_type: polar, memory: on}]\nstop: {contrast: memory, within: {attn_type: polar}, metric: val_loss, ci: 1}\n",
        "4: design: cannot estimate stop (memory: on - off): exclude leaves no pair of them within attn_type=polar",
    ),
    "a search": (
        "search: {trials: 3, objective: val_loss, ranges: {train.muon_lr: {low: 0.003, high: 0.1}}}\nstop: {contrast: memory, metric: val_loss, ci: 1}\n",
        "stop: is about the cells of a factorial grid",
    ),
    "too many cells": ("stop: {contrast: memory, metric: val_loss, ci: 1, max_seeds: 1000}\nset: {train.muon_lr: 0.1}\naxes: {memory: [off, on], train.tokens: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}\n", "seeds: the grid has 22,000 cells; more than 20,000"),
}  # fmt: skip


def fake(data: object) -> str:
    return "f" * 64


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(write: Write, name: str) -> None:
    text, told = WRONG[name]
    head = HEAD.partition("axes")[0] if "axes" in text or "search" in text else HEAD
    path = write(head + text)

    def begin() -> None:
        grid = load_grid(path)
        replicates.with_further_seeds(grid, grid.expand(fake), None)

    with pytest.raises(GridError) as wrong:
        begin()
    assert told in str(wrong.value)
    assert "\n" not in str(wrong.value)


def test_it_means_a_contrast_and_seeds(write: Write) -> None:
    grid = load_grid(write(HEAD + GOOD))
    assert grid.stop == Rule(contrast=NEEDLE, width=0.1, seeds=tuple(range(8)))
    assert grid.contrasts == (NEEDLE,), "it is declared by this"
    switched = load_grid(
        write(HEAD + "stop: {contrast: memory, reference: false, metric: val_loss, sure: true}\n")
    ).stop
    assert switched is not None
    assert (switched.contrast.level, switched.contrast.reference, switched.width) == ("on", "off", None)
    more = "stop: {contrast: attn_type, level: nope, reference: rope, metric: val_loss, ci: 0.02, sure: yes, wave: 2, max_seeds: 12, spending: pocock}\n"
    asked = load_grid(write(f"{HEAD}seeds: [5, 2, 9, 30]\n{more}")).stop
    assert asked is not None
    assert (asked.width, asked.sure, asked.first, asked.looks, asked.spending) == (0.02, True, 4, (4, 6, 8, 10, 12), "pocock")  # fmt: skip
    assert asked.seeds == (5, 2, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38)
    assert (asked.contrast.measure, asked.contrast.level, asked.contrast.reference) == ("val.val_loss", "nope", "rope")


def test_a_contrast_that_is_declared_already_is_not_declared_twice(write: Write) -> None:
    declared = "contrasts: [{measure: needle.digit_accuracy@1024, axis: memory, level: gated_delta, margin: 0.05}]\n"
    grid = load_grid(write(HEAD + declared + GOOD))
    assert [one.margin for one in grid.contrasts] == [0.05]
    other = load_grid(write(HEAD + declared.replace("memory, level: gated_delta", "window, level: on") + GOOD))
    assert [one.axis for one in other.contrasts] == ["window", "memory"]


def test_no_cell_of_the_grid_changes(write: Write) -> None:
    bare, with_rule = (load_grid(write(HEAD + text)).expand(fake) for text in ("", GOOD))
    assert [(cell.id, cell.config) for cell in with_rule] == [(cell.id, cell.config) for cell in bare]


def test_the_schema_knows_it() -> None:
    schema = Draft202012Validator(grid_schema())
    yaml = YAML(typ="safe", pure=True)
    assert list(schema.iter_errors(yaml.load(HEAD + GOOD))) == []
    for name in ("no mapping", "key", "lacking", "no end", "ci", "points", "sure", "min", "wave", "spending"):
        assert list(schema.iter_errors(yaml.load(HEAD + WRONG[name][0]))), name
