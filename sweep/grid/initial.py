"""Initial weights that a grid names: their hash for the ids of cells, and the agreement of their network with a cell's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ...model import registry
from ...model.config import ModelConfig
from ..config import TrainConfig
from .validate import InvalidConfig

PROVISIONAL = "provisional-"
"""Prefix of the hash of weights that were not looked for."""
_WITHOUT_TENSORS = (
    "attn_type", "dropout", "embedding_dtype", "init", "window", "window_size", "mixer_source", "memory_source",
    "position_source", "mlp_ratio", "mlp_width", "mixers",
)  # fmt: skip
"""Settings that may differ from the source's: of training alone, or of the mixer, or visible in a tensor's shape."""


@dataclass(frozen=True)
class InitialWeights:
    """Weights that a cell starts from, as they are when the cell is planned."""

    sha256: str
    """SHA-256 of the weights in hex; begins with PROVISIONAL if they were not looked for."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the source's network by name, JSON values; settings that are unknown are absent."""
    tokenizer: str | None = None
    """Full name of the tokenizer that the source was trained with; None if unknown."""


def provisional_weights(source: str) -> InitialWeights:
    """Return weights whose hash depends on the name of their source alone, for plans that look for none."""
    return InitialWeights(PROVISIONAL + hashlib.sha256(source.encode()).hexdigest())


def fill_identity_defaults(cls: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the config class's missing fields at their identity default, where they have one.

    A new dict; nothing is validated, and unknown keys stay. Fields without an identity default stay missing.
    """
    full = dict(values)
    for name, config_field in cls.model_fields.items():
        extra = config_field.json_schema_extra
        if name not in full and isinstance(extra, dict) and "identity" in extra:
            full[name] = extra["identity"]
    return full


def check_initial_network(model: ModelConfig, train: TrainConfig, weights: InitialWeights) -> None:
    """Raise InvalidConfig if the network of a cell computes something else than that of its initial weights.

    Compared are the settings that the source has, other than those of `_WITHOUT_TENSORS`; of the mixer its own
    settings, if it is the same one. The message lists every difference with the source's value. With `init_missing:
    init` any network may differ.

    Args:
        model: Network of the cell.
        train: Its training section.
        weights: Initial weights.
    """
    if train.init_missing == "init" or not weights.model:
        return
    ours = model.model_dump(mode="json")
    wrong = [
        (f"model.{name}", ours[name], value)
        for name, value in weights.model.items()
        if name in ours and name not in _WITHOUT_TENSORS and name not in registry.SETTINGS and ours[name] != value
    ]
    ratio = weights.model.get("mlp_ratio", 0)
    channels = weights.model.get("mlp_width") or ratio * weights.model.get("d_model", 0)
    if channels and channels != model.mlp_channels:
        wrong.append(("model.mlp_width", model.mlp_channels, channels))
    if ours["attn_type"] == weights.model.get("attn_type"):
        name = ours["attn_type"]
        own = weights.model.get("mixers", {}).get(name, {})
        wrong += [
            (f"model.mixers.{name}.{setting}", value, own[setting])
            for setting, value in ours["mixers"].get(name, {}).items()
            if setting in own and own[setting] != value
        ]
    if wrong:
        needed = ", ".join(f"{path}: {_text(theirs)} (not {_text(our)})" for path, our, theirs in wrong)
        raise InvalidConfig(
            ("train.init_from",),
            f"the network of {train.init_from} has {needed}; set what the source has, or train.init_missing: init",
        )


def _text(value: object) -> str:
    """Return a setting's value as a grid file writes it."""
    texts = {True: "on", False: "off", None: "null"}
    return texts[value] if value is None or isinstance(value, bool) else str(value)
