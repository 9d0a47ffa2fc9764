"""`stop:` of a grid: allowed values, and the contrast and seeds that it gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atma_sweep.results.contrasts import Contrast
from atma_sweep.results.stopping.stopping_rule import StoppingRule
from atma_sweep.sweep.grid.grid import load_grid

Write = Callable[..., Path]
HEAD = "name: g\nextends: micro\naxes: {attn_type: [polar, nope, rope], memory: [off, on], window: [off, on]}\n"
GOOD = "stop: {contrast: memory, metric: needle@1024, ci: 10}\n"
NEEDLE = Contrast(probe="needle", metric="digit_accuracy", length=1024, axis="memory", level="on", reference="off")


def fake(data: object) -> str:
    return "f" * 64


def test_stop_section_gives_contrast_and_seeds(write: Write) -> None:
    grid = load_grid(write(HEAD + GOOD))
    assert grid.stop == StoppingRule(contrast=NEEDLE, width=0.1, seeds=tuple(range(8)))
    assert grid.contrasts == (NEEDLE,), "it is declared by this"
    switched = load_grid(
        write(HEAD + "stop: {contrast: memory, reference: false, metric: val_loss, sure: true}\n")
    ).stop
    assert switched is not None
    assert (switched.contrast.level, switched.contrast.reference, switched.width) == ("on", "off", None)
    more = "stop: {contrast: attn_type, level: nope, reference: rope, metric: val_loss, ci: 0.02, sure: yes, wave: 2, max_seeds: 12, spending: pocock}\n"
    rule = load_grid(write(f"{HEAD}seeds: [5, 2, 9, 30]\n{more}")).stop
    assert rule is not None
    assert (rule.width, rule.sure, rule.first, rule.seeds_at_looks, rule.spending) == (0.02, True, 4, (4, 6, 8, 10, 12), "pocock")  # fmt: skip
    assert rule.seeds == (5, 2, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38)
    assert (rule.contrast.measure, rule.contrast.level, rule.contrast.reference) == ("val.val_loss", "nope", "rope")


def test_stop_contrast_is_not_declared_twice(write: Write) -> None:
    declared = "contrasts: [{measure: needle.digit_accuracy@1024, axis: memory, level: gated_delta, margin: 0.05}]\n"
    grid = load_grid(write(HEAD + declared + GOOD))
    assert [contrast.margin for contrast in grid.contrasts] == [0.05]
    second_grid = load_grid(write(HEAD + declared.replace("memory, level: gated_delta", "window, level: on") + GOOD))
    assert [contrast.axis for contrast in second_grid.contrasts] == ["window", "memory"]
