"""Resolution of a model section: names of parts checked, settings of the chosen parts validated, others dropped."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from . import registry
from .config import Config, ModelConfig, ModelConfigError

NO_MIXER = "none"
NO_MEMORY = "none"
NO_POSITIONS = "none"
NO_REGULARIZER = "baseline"


class PartKind(NamedTuple):
    """Kind of part that the model section of a config names, and whose settings it holds."""

    parts: registry.Registry[Any]
    """Registry of the parts."""
    name: str
    """Config field of the part's name."""
    settings: str
    """Config field of the settings, by part."""
    absent: str
    """Name that means no part."""


MIXER = PartKind(registry.MIXERS, "attn_type", "mixers", NO_MIXER)
MEMORY = PartKind(registry.MEMORIES, "memory", "memories", NO_MEMORY)
POSITION = PartKind(registry.POSITIONS, "positions", "position_settings", NO_POSITIONS)
KINDS = (MIXER, MEMORY, POSITION)


def check_model_config(config: ModelConfig) -> ModelConfig:
    """Return the config with settings of the chosen mixer, memory and position scheme only, complete with defaults.

    Settings of other registered parts are dropped without being validated. Idempotent. Imports the chosen parts, and
    with them torch.

    Raises:
        ModelConfigError: unknown name of a part (also of one that is only in the settings), unknown or invalid setting
            of a chosen part, a network that the part rejects, or a block part with a window or a memory.
    """
    chosen = [(kind, getattr(config, kind.name)) for kind in KINDS]
    for kind, name in chosen:
        if name != kind.absent and name not in kind.parts:
            allowed = [kind.absent, *sorted(kind.parts.choices(name))]
            raise ModelConfigError(f"model.{kind.name}", f"no {kind.parts.kind} named {name!r}", allowed)
    if config.attn_type == NO_MIXER:
        _check_memory_alone(config)
    for kind in KINDS:
        for name in getattr(config, kind.settings):
            if name not in kind.parts:
                raise ModelConfigError(f"model.{kind.settings}.{name}", "no such section", sorted(kind.parts))
    _check_block_part(config)
    settings = {
        kind.settings: {} if name == kind.absent else {name: _settings(kind, config).model_dump(mode="json")}
        for kind, name in chosen
    }
    return config.model_copy(update=settings)


def _check_memory_alone(config: ModelConfig) -> None:
    """Raise ModelConfigError if a network without a mixer has no memory either, or a window, which only mixers have."""
    if config.memory == NO_MEMORY:
        raise ModelConfigError(
            "model.attn_type",
            "none leaves the memory as the only mixer, but model.memory is none too; set a memory, or a mixer",
        )
    if config.window:
        raise ModelConfigError(
            "model.window", "must be off with attn_type none, because a memory has no window; switch it off"
        )
    if config.match != "none":
        raise ModelConfigError("model.match", "needs a mixer to match, and attn_type is none; set match to none")


def uses_block_part(config: ModelConfig) -> bool:
    """Return True if the config's `attn_type` names a block part, False for a mixer of q, k and v; imports the part."""
    return config.attn_type != NO_MIXER and bool(registry.MIXERS.load(config.attn_type).is_block)


def _check_block_part(config: ModelConfig) -> None:
    """Raise ModelConfigError for the window or memory of a network whose mixer is a block part, which has no q, k, v."""
    if not uses_block_part(config):
        return
    part = f"{config.attn_type} is a block part"
    if config.window:
        raise ModelConfigError("model.window", f"{part}, which has no sliding window; switch the window off")
    if config.memory != NO_MEMORY:
        raise ModelConfigError(
            "model.memory", f"{part}, without queries, keys and values for a memory; use memory none"
        )


def check_regularizer(name: str) -> str:
    """Return the name unchanged if it is "baseline" (none) or a registered regularizer.

    Registered are "weak", "strong", "discrete" and "zipfian", and those of plugins.

    Raises:
        ModelConfigError: any other name; it lists the allowed ones.
    """
    if name != NO_REGULARIZER and name not in registry.REGULARIZERS:
        allowed = [NO_REGULARIZER, *sorted(registry.REGULARIZERS)]
        raise ModelConfigError("train.regularizer", f"no regularizer named {name!r}", allowed)
    return name


def mixer_settings(config: ModelConfig) -> Any:
    """Return the validated settings of the config's mixer; raise ModelConfigError if one is invalid."""
    return _settings(MIXER, config)


def has_distractor(attn_type: str) -> bool:
    """Return True if that mixer has a distractor loss; False without a mixer ("none")."""
    return attn_type != NO_MIXER and bool(registry.MIXERS.load(attn_type).has_distractor)


def memory_settings(config: ModelConfig) -> Any:
    """Return the validated settings of the config's memory; raise ModelConfigError if one is invalid."""
    return _settings(MEMORY, config)


def position_settings(config: ModelConfig) -> Any:
    """Return the validated settings of the config's position scheme; raise ModelConfigError if one is invalid."""
    return _settings(POSITION, config)


def longest_text(config: ModelConfig) -> int | None:
    """Return the most tokens that the position scheme of a config supports; None: no limit, or no such scheme.

    Raises ModelConfigError if the scheme's settings are invalid.
    """
    if config.positions == NO_POSITIONS:
        return None
    return registry.POSITIONS.load(config.positions).longest(config, position_settings(config))


def _settings(kind: PartKind, config: ModelConfig) -> Config:
    """Return the validated settings of the part that the config names, complete with defaults.

    They are also checked against the network (`Part.check`). A name that is not registered raises KeyError.

    Raises:
        ModelConfigError: a setting is unknown or invalid, or the part rejects the network.
    """
    name = getattr(config, kind.name)
    part, path = kind.parts.load(name), f"model.{kind.settings}.{name}"
    try:
        settings: Config = part.Config(**getattr(config, kind.settings).get(name, {}))
        part.check(config, settings)
    except ValidationError as error:
        raise _explain(path, part.Config, error) from None
    except ValueError as error:
        raise ModelConfigError(path, str(error)) from None
    return settings


def _explain(path: str, schema: type[Config], error: ValidationError) -> ModelConfigError:
    """Return (not raise) a ModelConfigError for the first error of a failed validation.

    Its path is that of the setting. `allowed` is all names of settings for an unknown one, the choices for a value
    outside a list of choices, and None otherwise.

    Args:
        path: dotted path of the part's settings in the config.
        schema: config class that was validated.
        error: error of the validation.
    """
    first = error.errors(include_url=False)[0]
    names = [str(part) for part in first["loc"]]
    where = ".".join([path, *names[:1]])
    if first["type"] == "extra_forbidden":
        return ModelConfigError(where, "no such setting", sorted(schema.model_fields))
    allowed = None
    if first["type"] == "literal_error":
        allowed = [str(choice) for choice in get_args(schema.model_fields[names[0]].annotation)]
    message = first["msg"].removeprefix("Value error, ")
    return ModelConfigError(where, f"{message}, got {first['input']!r}", allowed)
