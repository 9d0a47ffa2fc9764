"""The JSON Schema that editors use says the same as the grid reader."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from atma_sweep.sweep.config import (
    MOVED_PROBE_SETTINGS,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    Resources,
    TrainConfig,
)
from atma_sweep.sweep.grid.grid import GRIDS, shipped
from atma_sweep.sweep.grid.json_schema import grid_schema
from ruamel.yaml import YAML

CASES = YAML(typ="safe", pure=True).load((Path(__file__).parent / "schema_cases.yaml").read_text())
FILES = sorted([*GRIDS.glob("*.yaml"), *GRIDS.glob("base/*.yaml")])


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = grid_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_shipped_schema_equals_generated_schema() -> None:
    assert json.loads((GRIDS / "schema.json").read_text()) == grid_schema()


@pytest.mark.thorough
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_grids_and_bases_validate(validator: jsonschema.Draft202012Validator, path: Path) -> None:
    assert {file.stem for file in FILES} == {*shipped(), *shipped("base")}
    assert [error.message for error in validator.iter_errors(YAML(typ="safe", pure=True).load(path.read_text()))] == []


@pytest.mark.parametrize("case", CASES["right"])
def test_schema_accepts_valid_grids(validator: jsonschema.Draft202012Validator, case: str) -> None:
    assert [error.message for error in validator.iter_errors(CASES["right"][case])] == []


@pytest.mark.parametrize("case", CASES["wrong"])
def test_schema_rejects_invalid_grids(validator: jsonschema.Draft202012Validator, case: str) -> None:
    grid, where = CASES["wrong"][case]
    assert [list(error.absolute_path) for error in validator.iter_errors(grid)] == [where]


def test_schema_describes_every_config_field() -> None:
    definitions = grid_schema()["$defs"]
    for cls in (TrainConfig, EvalConfig, Resources, CheckpointConfig, DataConfig):
        shown = definitions[cls.__name__]["properties"]
        former = set(MOVED_PROBE_SETTINGS) if cls is EvalConfig else set()
        assert (
            set(shown)
            == set(cls.model_fields) - {"fingerprint", "corpus_source", "regularizer_source", "init_sha256"} | former
        )
        assert all(shown[name]["description"] for name in shown)
