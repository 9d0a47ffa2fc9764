"""The JSON Schema that editors use says the same as the grid reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from atma_sweep.sweep.config import FORMER, CheckpointConfig, DataConfig, EvalConfig, Resources, TrainConfig
from atma_sweep.sweep.grid.grid import GRIDS, shipped
from atma_sweep.sweep.grid.json_schema import grid_schema
from ruamel.yaml import YAML

FILES = sorted([*GRIDS.glob("*.yaml"), *GRIDS.glob("base/*.yaml")])


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = grid_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_shipped_schema_is_the_one_of_the_code() -> None:
    assert json.loads((GRIDS / "schema.json").read_text()) == grid_schema()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_grids_and_bases_validate(validator: jsonschema.Draft202012Validator, path: Path) -> None:
    assert {one.stem for one in FILES} == {*shipped(), *shipped("base")}
    assert [error.message for error in validator.iter_errors(YAML(typ="safe", pure=True).load(path.read_text()))] == []


RIGHT: dict[str, dict[str, Any]] = {
    "numbers-as-text": {"set": {"train": {"tokens": "1e9", "clip": 1, "muon_lr": "1e-2"}}},
    "whole-number-as-float": {"set": {"train": {"tokens": 1e9}}},
    "switches": {"axes": {"memory": ["off", "on"], "window": [True, False]}, "set": {"distractor": "on"}},
    "switch-as-text": {"set": {"model": {"window": "on"}}},
    "dotted": {"set": {"train.tokens": 5, "model.mixers.rope.base": 9, "model": {"mixers.rope": {"base": 9}}}},
    "null": {"set": {"train": {"distractor_count": None}, "checkpoint": {"every_steps": None}}},
    "path-axis": {"axes": {"train.muon_lr": [0.1, 0.2]}},
    "plugin-mixer": {"axes": {"attn_type": ["mine"]}, "plugins": ["mine.py"]},
    "plugin-memory": {"axes": {"memory": ["mine", "off", False]}, "plugins": ["mine.py"]},
    "plugin-regularizer": {"set": {"reg_mode": "mine"}, "plugins": ["mine.py"]},
    "rules": {"exclude": [{"memory": "on", "attn_type": ["polar"]}], "include": [{"window": True}]},
    "seeds": {"seeds": [4, 2]},
    "no-cap": {"set": {"model": {"logit_cap": "none"}}, "axes": {"model.logit_cap": [15, "none"]}},
    "resources": {"resources": {"gpus": 1, "cpus": 2}},
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_grids_validate(validator: jsonschema.Draft202012Validator, case: str) -> None:
    assert [error.message for error in validator.iter_errors(RIGHT[case])] == []


WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "key": ({"axis": {}}, []),
    "axis": ({"axes": {"memry": ["on"]}}, ["axes", "memry"]),
    "level": ({"axes": {"memory": ["onn"]}}, ["axes", "memory", 0]),
    "regularizer": ({"axes": {"reg_mode": ["wek"]}}, ["axes", "reg_mode", 0]),
    "mixer": ({"axes": {"attn_type": ["pola"]}}, ["axes", "attn_type", 0]),
    "mixer-of-all": ({"set": {"attn_type": "pola"}}, ["set", "attn_type"]),
    "empty-axis": ({"axes": {"memory": []}}, ["axes", "memory"]),
    "axis-is-no-list": ({"axes": {"memory": "on"}}, ["axes", "memory"]),
    "level-twice": ({"axes": {"memory": ["on", "on"]}}, ["axes", "memory"]),
    "setting": ({"set": {"train": {"token": 1}}}, ["set", "train"]),
    "section": ({"set": {"trian": {}}}, ["set"]),
    "literal": ({"set": {"train": {"schedule": "cosin"}}}, ["set", "train", "schedule"]),
    "boolean-for-number": ({"set": {"train": {"clip": True}}}, ["set", "train", "clip"]),
    "number": ({"set": {"train": {"tokens": "abc"}}}, ["set", "train", "tokens"]),
    "switch": ({"set": {"model": {"window": "maybe"}}}, ["set", "model", "window"]),
    "computed": ({"set": {"data": {"fingerprint": "x"}}}, ["set", "data"]),
    "seed": ({"set": {"seed": 1}}, ["set"]),
    "neither-number-nor-none": ({"set": {"model": {"logit_cap": "off"}}}, ["set", "model", "logit_cap"]),
    "limit": ({"set": {"train": {"clip": 0}}}, ["set", "train", "clip"]),
    "seeds-0": ({"seeds": 0}, ["seeds"]),
    "seeds-negative": ({"seeds": [-1]}, ["seeds"]),
    "resources": ({"resources": {"gpu": 1}}, ["resources"]),
    "gpus": ({"resources": {"gpus": 2}}, ["resources", "gpus"]),
    "rule": ({"exclude": [{}]}, ["exclude", 0]),
    "name": ({"name": 3}, ["name"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_grids_do_not_validate(validator: jsonschema.Draft202012Validator, case: str) -> None:
    grid, where = WRONG[case]
    assert [list(error.absolute_path) for error in validator.iter_errors(grid)] == [where]


def test_every_field_is_there_with_its_description() -> None:
    definitions = grid_schema()["$defs"]
    for cls in (TrainConfig, EvalConfig, Resources, CheckpointConfig, DataConfig):
        shown = definitions[cls.__name__]["properties"]
        former = set(FORMER) if cls is EvalConfig else set()
        assert set(shown) == set(cls.model_fields) - {"fingerprint", "corpus_source", "regularizer_source"} | former
        assert all(shown[name]["description"] for name in shown)
