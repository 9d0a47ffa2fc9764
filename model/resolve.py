"""From the model section as written to the one that is built: names checked, settings of other mixers dropped."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import ValidationError

from . import registry
from .config import Config, ModelConfig, ModelConfigError

NO_MEMORY = "none"
NO_POSITIONS = "none"
NO_REGULARIZER = "baseline"


def check_model_config(config: ModelConfig) -> ModelConfig:
    """The config with the settings of mixers, memories and position schemes cut to the chosen ones and filled.

    Idempotent. Raises ModelConfigError for the unknown name of a part, an unknown or wrong setting of it, and a network
    it cannot work in.
    """
    if config.attn_type not in registry.MIXERS:
        raise ModelConfigError("model.attn_type", f"no mixer named {config.attn_type!r}", sorted(registry.MIXERS))
    if config.memory != NO_MEMORY and config.memory not in registry.MEMORIES:
        names = [NO_MEMORY, *sorted(registry.MEMORIES)]
        raise ModelConfigError("model.memory", f"no memory named {config.memory!r}", names)
    if config.positions != NO_POSITIONS and config.positions not in registry.POSITIONS:
        names = [NO_POSITIONS, *sorted(registry.POSITIONS)]
        raise ModelConfigError("model.positions", f"no position scheme named {config.positions!r}", names)
    for section, known in registry.SETTINGS.items():
        _check_names(f"model.{section}", getattr(config, section), sorted(known))
    mixers = {config.attn_type: mixer_settings(config).model_dump(mode="json")}
    memories: dict[str, dict[str, Any]] = {}
    if config.memory != NO_MEMORY:
        memories = {config.memory: memory_settings(config).model_dump(mode="json")}
    schemes: dict[str, dict[str, Any]] = {}
    if config.positions != NO_POSITIONS:
        schemes = {config.positions: position_settings(config).model_dump(mode="json")}
    return config.model_copy(update={"mixers": mixers, "memories": memories, "position_settings": schemes})


def check_regularizer(name: str) -> str:
    """The name, if it is "baseline" (none) or a known regularizer; else ModelConfigError."""
    if name != NO_REGULARIZER and name not in registry.REGULARIZERS:
        allowed = [NO_REGULARIZER, *sorted(registry.REGULARIZERS)]
        raise ModelConfigError("train.regularizer", f"no regularizer named {name!r}", allowed)
    return name


def mixer_settings(config: ModelConfig) -> Any:
    """The validated Config of the config's own mixer; ModelConfigError when a setting is wrong."""
    return _settings(registry.MIXERS.load(config.attn_type), config, f"model.mixers.{config.attn_type}", config.mixers)


def memory_settings(config: ModelConfig) -> Any:
    """The validated Config of the config's own memory; ModelConfigError when a setting is wrong."""
    return _settings(registry.MEMORIES.load(config.memory), config, f"model.memories.{config.memory}", config.memories)


def position_settings(config: ModelConfig) -> Any:
    """The validated Config of the config's own position scheme; ModelConfigError when a setting is wrong."""
    path = f"model.position_settings.{config.positions}"
    return _settings(registry.POSITIONS.load(config.positions), config, path, config.position_settings)


def longest_text(config: ModelConfig) -> int | None:
    """Tokens of the longest text that the network has places for; None for any. `config` is complete."""
    if config.positions == NO_POSITIONS:
        return None
    return registry.POSITIONS.load(config.positions).longest(config, position_settings(config))


def _settings(kind: Any, config: ModelConfig, path: str, sections: dict[str, dict[str, Any]]) -> Config:
    try:
        settings: Config = kind.Config(**sections.get(path.rsplit(".", 1)[1], {}))
    except ValidationError as error:
        raise _explain(path, kind.Config, error) from None
    try:
        kind.check(config, settings)
    except ValueError as error:
        raise ModelConfigError(path, str(error)) from None
    return settings


def _explain(path: str, schema: type[Config], error: ValidationError) -> ModelConfigError:
    first = error.errors(include_url=False)[0]
    names = [str(part) for part in first["loc"]]
    where = ".".join([path, *names[:1]])
    if first["type"] == "extra_forbidden":
        return ModelConfigError(where, "no such setting", sorted(schema.model_fields))
    allowed = None
    if first["type"] == "literal_error":
        allowed = [str(choice) for choice in get_args(schema.model_fields[names[0]].annotation)]
    return ModelConfigError(where, f"{first['msg']}, got {first['input']!r}", allowed)


def _check_names(path: str, sections: dict[str, Any], allowed: list[str]) -> None:
    for name in sections:
        if name not in allowed:
            raise ModelConfigError(f"{path}.{name}", "no such section", allowed)
