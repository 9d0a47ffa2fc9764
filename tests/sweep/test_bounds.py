"""Every number of a config is bounded where it is declared, and what all bounds allow together still is planned."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, get_args

import annotated_types
import histories
import pytest
from atma_sweep.model import bounds, registry
from atma_sweep.model.config import Config, Float, Int, ModelConfig, PositiveOrNone, knob
from atma_sweep.results.store.store import open_store
from atma_sweep.sweep.config import TrainConfig
from atma_sweep.sweep.data.registry import CORPORA
from atma_sweep.sweep.external_models.config import OpenWeightConfig
from atma_sweep.sweep.grid.grid import load_grid
from atma_sweep.sweep.planning import admission as plan_corpora
from atma_sweep.sweep.planning.planner import to_record
from atma_sweep.sweep.probes import PROBES
from atma_sweep.sweep.training import flops
from pydantic import BaseModel, ValidationError
from sqlalchemy import update

UNBOUNDED = {
    "EvalConfig.lengths": "its validator says that they rise from 2",
    "MemoryRecallConfig.pairs": "its validator says that they rise from 2",
    "PasskeyConfig.depths": "its validator says that they rise from 0 to 1",
}
"""Field that declares no lower or no upper bound -> the reason."""


def configs() -> Iterator[type[BaseModel]]:
    """Every config class: the sections of a cell, and the settings of each mixer, memory, position, probe and corpus."""
    waiting: list[Any] = [OpenWeightConfig]
    for table in (*registry.SETTINGS.values(), PROBES, CORPORA):
        waiting += [table.load(name).Config for name in table]
    seen: set[Any] = set()
    while waiting:
        cls = waiting.pop()
        if cls in seen:
            continue
        seen.add(cls)
        yield cls
        for field in cls.model_fields.values():
            inner = (field.annotation, *get_args(field.annotation))
            waiting += [item for item in inner if isinstance(item, type) and issubclass(item, BaseModel)]


def numbers(annotation: Any, metadata: list[Any]) -> Iterator[list[Any]]:
    """The constraints of each number inside an annotation: its own, or those of the union or tuple that it stands in."""
    if annotation in (int, float):
        yield metadata
        return
    inner = getattr(annotation, "__metadata__", None)
    if inner is not None:
        flat = [item for field in inner for item in (field, *getattr(field, "metadata", ()))]
        yield from numbers(annotation.__origin__, metadata + flat)
        return
    for part in get_args(annotation):
        yield from numbers(part, metadata)


def unbounded(cls: type[BaseModel]) -> list[str]:
    """The numeric fields of a class that lack a lower or an upper bound."""
    names = []
    for name, field in cls.model_fields.items():
        if any(item in get_args(PositiveOrNone) for item in field.metadata):
            continue  # its validator holds both bounds
        for metadata in numbers(field.annotation, field.metadata):
            upper = any(isinstance(item, annotated_types.Le | annotated_types.Lt) for item in metadata)
            lower = any(isinstance(item, annotated_types.Ge | annotated_types.Gt) for item in metadata)
            if not (upper and lower):
                names.append(f"{cls.__name__}.{name}")
    return names


def test_every_numeric_config_field_has_both_bounds() -> None:
    names = [name for cls in configs() for name in unbounded(cls)]
    assert sorted(set(names) - set(UNBOUNDED)) == []
    assert sorted(set(UNBOUNDED) - set(names)) == [], "exempt though bounded, or gone"


def test_unbounded_numbers_of_any_shape_are_detected() -> None:
    class Loose(Config):
        """Settings without an upper bound, without a lower one, and with both."""

        plain: Int = knob(1, "A number.", ge=0)
        optional: Float | None = knob(None, "A number or none.", lt=3)
        several: tuple[Int, ...] = knob((), "Numbers.")
        limited: Int | None = knob(None, "A number or none.", ge=0, le=3)
        options: str = knob("", "No number.")

    assert unbounded(Loose) == ["Loose.plain", "Loose.optional", "Loose.several"]


def test_numbers_without_bounds_of_their_own_fit_int64() -> None:
    class Loose(Config):
        """Settings as a plug-in may declare them."""

        count: Int = knob(1, "A number.")
        rate: Float = knob(1.0, "A number.")

    assert Loose(count=2**63 - 1, rate=-1e18).count == 2**63 - 1
    for values in ({"count": 2**63}, {"count": "1e19"}, {"rate": 1.1e18}, {"rate": "1e400"}, {"rate": math.nan}):
        with pytest.raises(ValidationError):
            Loose(**values)


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_global_layers_are_counted_without_a_loop(every: int) -> None:
    for offset in range(every):
        for layers in range(1, 20):
            model = ModelConfig(n_layers=layers, attn_every=every, attn_offset=offset)
            assert model.n_global_layers == sum(map(model.is_global, range(layers)))


def largest() -> tuple[ModelConfig, TrainConfig]:
    """Sections in which every number that makes a network or a training large stands at its upper bound."""

    def values(cls: type[BaseModel], **fixed: Any) -> dict[str, Any]:
        names = {}
        for name, field in cls.model_fields.items():
            upper = [item.le for item in field.metadata if isinstance(item, annotated_types.Le)]
            if upper and isinstance(upper[0], int):
                names[name] = upper[0]
        return names | fixed

    model = ModelConfig(**values(ModelConfig, attn_every=1, attn_offset=0))
    train = TrainConfig(**values(TrainConfig, micro_batch=1, warmup_steps=0))
    return model, train


def test_products_of_the_largest_values_fit_a_float64() -> None:
    """By hand: the terms of a training's FLOPs, each factor at its bound, are far below 1.8e308."""
    model, train = largest()
    assert (model.n_layers, model.d_model) == (bounds.MAX_LAYERS, bounds.MAX_WIDTH)
    each = flops.estimated_flops(model, train.seq_len)
    dense = 6 * model.n_layers * 3 * model.mlp_ratio * model.d_model**2
    assert dense < each < 1e100
    assert math.isfinite(float(each) * train.tokens)


@pytest.mark.thorough
def test_plan_of_the_largest_values_reports_the_disk(command_line: Any) -> None:
    settings = {
        "data.corpus": "flipflop", "data.settings.flipflop.train_rows": 10**9, "train.seq_len": 2**17,
        "data.settings.flipflop.validation_rows": 10**9, "data.settings.flipflop.length": 2**17,
        "train.tokens": 10**15, "train.batch_tokens": 2**30, "train.micro_batch": 2**13,
        "model.n_layers": bounds.MAX_LAYERS, "model.d_model": 2**20, "model.n_heads": 2**14, "model.n_kv_heads": 2**14,
        "model.head_dim": 2**20, "model.vocab_size": 2**24, "model.mlp_ratio": 1024, "model.conv_taps": 2**16,
        "eval.validation_tokens": 10**13, "eval.validate_every": 1, "eval.probes": "[val]",
    }  # fmt: skip
    options = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
    code, out, err = command_line("launch", "quick", *options, "--name", "x", "--dry-run", "--only", "attn_type=nope")
    assert (code, err) == (0, "")
    assert "during training exceed the" in out, "the disk that it would take, against what is free"


def test_the_schema_shows_the_bounds(command_line: Any) -> None:
    code, out, _ = command_line("schema")
    model = json.loads(out)["$defs"]["ModelConfig"]["properties"]
    assert code == 0
    assert (model["n_layers"]["minimum"], model["n_layers"]["maximum"]) == (1, bounds.MAX_LAYERS)
    assert model["d_model"]["maximum"] == bounds.MAX_WIDTH


def test_stored_values_beyond_bounds_stay_readable(command_line: Any, tmp_path: Any) -> None:
    """A database may hold what an earlier release allowed: its numbers are printed, and a plan leaves its times out."""
    store = open_store(tmp_path / "atma.db", create=True)
    cells, _ = plan_corpora.expand_grid(load_grid("quick"), tmp_path, dry=True)
    records = [to_record(cell) for cell in cells]
    histories.launch(store, records)
    histories.run(store, records[0].id, 1)
    with store.transaction() as session:
        cell = histories.T["cell"]
        config = records[0].config | {"model": records[0].config["model"] | {"n_layers": 10**7}}
        session.execute(update(cell).where(cell.c.id == records[0].id).values(config=config))
    store.close()
    for argv in (["status"], ["show", records[0].slug], ["plan", "quick"], ["launch", "quick", "--dry-run"]):
        code, out, err = command_line(*argv)
        assert (code, err) == (0, ""), argv
        assert out
    code, out, err = command_line("report", "--table", "5")
    assert (code, err) == (0, "")
    assert "1 of 12 cells done" in out
