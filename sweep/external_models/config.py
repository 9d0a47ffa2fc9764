"""Representation of an open-weight model as a cell: model, revision, tokenizer, and the text that it is measured on.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...model.bounds import MAX_INT64
from ...model.config import Config, Int, knob
from ...results.store.records import AXES, CellRecord
from ..config import CellConfig, knob_outside_id
from ..grid.cell import Cell, canonical_json, slug_part
from .hub_checkpoint import HubCheckpoint

KEY = "open_weight"
"""Section of a stored config that describes the model, and option of a revision that lists such models."""


class ExternalModelConfig(Config):
    """A checkpoint, and how it is measured. All but the last fields make the cell's id, with the text's fingerprint."""

    name: str = knob(..., "Repository of the hub, or the folder's name.")
    revision: str = knob(..., "Commit of the hub, or the hash of the folder's files.")
    dtype: Literal["float32", "bfloat16"] = knob(..., "Type of weights and activations.")
    tokenizer: str = knob(..., "SHA-256 of the tokenizer's files.")
    pairing: Literal["text", "native"] = knob(
        "text",
        "text: contexts end at the same characters for every model; native: after the same number of the model's own tokens, as published.",
    )
    family: str = knob_outside_id("", "Model type of its config.json.")
    context: Int | None = knob_outside_id(
        None, "Context length of its training in tokens, from its config.", ge=0, le=MAX_INT64
    )
    places: Int | None = knob_outside_id(
        None, "Maximum number of tokens, for a learned position table.", ge=0, le=MAX_INT64
    )
    folder: str = knob_outside_id("", "Folder of its files.")


class OpenWeightConfig(CellConfig):
    """Text, probes and resources are those of a sweep's cells; model and train, but for the length of a row, mean nothing."""

    open_weight: ExternalModelConfig


def config_of(stored: Mapping[str, Any]) -> CellConfig:
    """Return the config of a job, of a trained cell or of an open-weight model."""
    return (OpenWeightConfig if KEY in stored else CellConfig).model_validate(stored)


def resolve_cell(checkpoint: HubCheckpoint, base: CellConfig, pairing: str) -> Cell:
    """Return the cell of a checkpoint that is measured next to the cells of a sweep.

    Its config has data, train, eval and resources of `base`. Its slug consists of the model's short name, the first
    seven digits of the revision, the dtype and, for native pairing, "native", joined by "-". Its levels are empty.

    Args:
        checkpoint: The checkpoint.
        base: Config of a cell of the sweep, for data, train, eval and resources; GPUs there mean that the model runs on
            one.
        pairing: "text" or "native" (`ExternalModelConfig.pairing`).

    Raises:
        MachineError: The model cannot run on the resources of the sweep's cells.
    """
    cuda = base.resources.gpus > 0
    checkpoint.check(cuda=cuda)
    model = ExternalModelConfig(
        name=checkpoint.name, revision=checkpoint.revision, dtype=checkpoint.dtype(cuda=cuda),
        tokenizer=checkpoint.tokenizer, pairing=pairing, family=checkpoint.family, context=checkpoint.context,
        places=checkpoint.max_positions, folder=str(checkpoint.folder),
    )  # fmt: skip
    config = OpenWeightConfig(
        data=base.data, train=base.train, eval=base.eval, resources=base.resources, open_weight=model
    )
    key = open_weight_id(model, base.data.fingerprint)
    parts = [checkpoint.short_name, checkpoint.revision.removeprefix("sha256:")[:7], model.dtype]
    slug_parts = "-".join(parts + (["native"] if pairing == "native" else [])).split("-")
    slug = "-".join(map(slug_part, slug_parts))
    return Cell(key, slug, config, {})


def open_weight_id(model: ExternalModelConfig, fingerprint: str | None) -> str:
    """Return the id of a cell, 12 hex digits, from what its numbers depend on apart from the probes.

    That is the model's name, revision, dtype, tokenizer and, unless it is "text", pairing, and the fingerprint of the
    text. Family, context, positions and folder do not count.

    Args:
        model: The model.
        fingerprint: Fingerprint of the corpus; None is hashed as such.
    """
    identity_fields = {"name", "revision", "dtype", "tokenizer"} | ({"pairing"} if model.pairing != "text" else set())
    identity = {KEY: model.model_dump(mode="json", include=identity_fields), "data": {"fingerprint": fingerprint}}
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:12]


def stored_open_weight_id(stored: Mapping[str, Any]) -> str:
    """Return the id of a cell whose config is stored in a database.

    Raises:
        ValidationError: The section of the model is invalid (pydantic).
        LookupError: The section is missing.
    """
    return open_weight_id(ExternalModelConfig.model_validate(stored[KEY]), stored["data"]["fingerprint"])


def levels_of_stored(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the levels of the five axes of a cell whose config is stored in a database, as text by axis.

    An external model has no axes: `attn_type` is the last part of the model's name; the other four are "-".

    Raises:
        ValidationError: The section of the model is invalid (pydantic).
        LookupError: The section is missing.
    """
    return dict.fromkeys(AXES, "-") | {"attn_type": Path(ExternalModelConfig.model_validate(stored[KEY]).name).name}


def to_record(cell: Cell) -> CellRecord:
    """Return the cell's record for the database, without the sections that do not apply to an external model.

    The stored config has `open_weight`, data, eval, resources and seed, and of train only seq_len and loss_on. Levels
    and axes are those of `levels_of_stored`.

    Args:
        cell: Cell whose config is an `OpenWeightConfig`, as `resolve_cell` returns it.
    """
    config = cell.config
    assert isinstance(config, OpenWeightConfig)
    stored = config.model_dump(mode="json", include={KEY, "data", "eval", "resources", "seed"})
    stored["train"] = {"seq_len": config.train.seq_len, "loss_on": config.train.loss_on}
    levels = levels_of_stored(stored)
    return CellRecord(id=cell.id, slug=cell.slug, seed=config.seed, levels=levels, config=stored, axes=levels)
