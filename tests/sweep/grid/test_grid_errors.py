"""Errors of grid files: one line with file, line, key, problem, allowed values and the nearest word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
from atma_sweep.model.mixers.softmax import RoPEConfig
from atma_sweep.model.registry import MEMORIES, MIXERS, POSITIONS
from atma_sweep.results.metrics import TRAINING_SOURCES
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.errors import GridError, closest_match
from atma_sweep.sweep.grid.grid import load_grid, shipped
from atma_sweep.sweep.grid.json_schema import grid_schema
from atma_sweep.sweep.planning import replicates
from atma_sweep.sweep.probes import PROBES
from jsonschema import Draft202012Validator
from registries import has_distractor
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Write = Callable[..., Path]
NAMES = {
    "TRAIN": ", ".join(
        f"train.{name}" for name in TrainConfig.model_fields if name not in ("regularizer_source", "init_sha256")
    ),
    "BASES": ", ".join(shipped("base")),
    "PROBES": ", ".join(PROBES),
    "PROBE_SETTINGS": ", ".join(f"eval.settings.{name}" for name in sorted(PROBES)),
    "PROBES_AND_TRAINING": ", ".join([*PROBES, *TRAINING_SOURCES]),
    "MEMORY": ", ".join(["off", "on", *MEMORIES]),
    "MIXERS": ", ".join([*MIXERS, "none"]),
    "POSITIONS": ", ".join(POSITIONS),
    "ROPE": ", ".join(f"model.mixers.rope.{name}" for name in sorted(RoPEConfig.model_fields)),
}
TABLE = YAML(typ="safe", pure=True).load((Path(__file__).parent / "bad_grids.yaml").read_text())
CASES = {f"{section}-{name}": case for section, cases in TABLE.items() for name, case in cases.items()}
HEAD = "name: g\nextends: micro\n"
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
def test_grid_error_is_a_line_with_position_and_cause(
    case: str, write: Write, fake_fingerprint: Callable[..., str]
) -> None:
    write("raise RuntimeError('first line\\nsecond line')\n", "raises.py")
    write(CLASH, "clash.py")
    path, sets = write(CASES[case]["grid"]), CASES[case].get("sets", ())
    expected = Template(CASES[case]["error"]).substitute(NAMES)
    line = message(path, fake_fingerprint, sets=sets, rename="other" if sets else None)
    assert line == (expected if sets else f"{path}:{expected}")


def test_schema_marks_errors_that_no_plugin_can_fix() -> None:
    schema = Draft202012Validator(grid_schema())

    def is_marked(text: str) -> bool:
        try:
            return not schema.is_valid(YAML(typ="safe", pure=True).load(text))
        except YAMLError:
            return False

    assert {name for name, case in CASES.items() if is_marked(case["grid"])} == {
        name for name, case in CASES.items() if case.get("marked")
    }


@pytest.mark.parametrize("mixer", [name for name in MIXERS if not has_distractor(name)])
def test_grid_error_for_mixer_without_distractor_loss(
    mixer: str, write: Write, fake_fingerprint: Callable[..., str]
) -> None:
    path = write(f"{HEAD}axes:\n  attn_type: [polar, {mixer}]\n  distractor: [off, on]\n")
    problem = f"mixer {mixer} has no distractor loss; exclude that combination, or implement the loss for the mixer"
    assert message(path, fake_fingerprint) == f"{path}:5: axes.distractor: {problem}"


def test_base_cycle_is_reported_in_the_base_that_closes_it(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    first_base = write("description: x\nextends: two\n", "one.yaml")
    two = write("extends: one\n", "two.yaml")
    grid = write("name: g\nextends: one\n")
    assert message(grid, fake_fingerprint) == f"{two}:1: extends: base 'one' extends itself"
    first_base.write_text("extends: one\n")
    assert message(grid, fake_fingerprint) == f"{first_base}:1: extends: base 'one' extends itself"


def test_grid_error_for_base_with_axes(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    base = write("extends: micro\naxes:\n  memory: [on]\n", "mine.yaml")
    grid = write("name: g\nextends: mine\n")
    expected = f"{base}:2: axes: no such key; allowed: description, extends, set, resources"
    assert message(grid, fake_fingerprint) == expected


def test_grid_error_points_to_the_line_of_the_base(write: Write, fake_fingerprint: Callable[..., str]) -> None:
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


def test_grid_error_for_unreadable_file(write: Write, fake_fingerprint: Callable[..., str]) -> None:
    path = write("name: g\n")
    path.write_bytes(b"name: \xff\n")
    assert message(path, fake_fingerprint).startswith(f"{path}: cannot be read: 'utf-8' codec can't decode byte 0xff")


@pytest.mark.parametrize("name", [None, "g"])
def test_set_option_requires_a_new_name(write: Write, name: str | None, fake_fingerprint: Callable[..., str]) -> None:
    text = message(write(HEAD), fake_fingerprint, sets=["train.clip=2"], rename=name)
    assert text == "--set: a changed grid needs its own name; add --name with a name other than 'g'"


def test_grid_error_exposes_its_attributes(write: Write) -> None:
    path = write(HEAD + "axes:\n  memory: [offf]\n")
    with pytest.raises(GridError) as caught:
        load_grid(path)
    error = caught.value
    assert (error.file, error.line, error.key) == (str(path), 4, "axes.memory")
    assert (error.allowed, error.nearest, error.exit_code) == (["off", "on", *MEMORIES], "off", 2)


def test_grid_error_suggests_only_near_matches() -> None:
    assert closest_match("polr", ["nope", "polar", "rope"]) == "polar"
    assert closest_match("xyzzy", ["nope", "polar", "rope"]) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../../../x", "'../../../x' is not a valid sweep name: letters, digits"),
        ("a b", "'a b' is not a valid sweep name"),
        ("x" * 5000, f"'{'x' * 60}'... (5000 letters) is not a valid sweep name"),
        (
            "printed-v2",
            "'printed-v2' is not available as a sweep name: printed-... is reserved for the paper's numbers",
        ),
    ],
)
def test_grid_error_for_invalid_sweep_name(write: Write, name: str, why: str) -> None:
    good, bad = write("name: g\nextends: micro\n"), write(f"extends: micro\nname: {name}\n", "bad.yaml")
    with pytest.raises(GridError) as error:
        load_grid(bad)
    assert str(error.value).startswith(f"{bad}:2: name: {why}")
    with pytest.raises(GridError) as error:
        load_grid(good, rename=name)
    assert str(error.value).startswith(f"--name: {why}")
    # what a file may not be called does not matter when it is launched under another name
    assert load_grid(bad, rename="fine").name == "fine"
