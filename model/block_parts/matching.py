"""Hidden width of each block's MLP, with which parameters are matched (`match: parameters`)."""

from __future__ import annotations

import torch
from torch import nn

from ..attention import Attention
from ..config import ModelConfig, ModelConfigError
from ..resolve import NO_MEMORY, uses_block_part
from .layer import BlockLayer

REFERENCE = "nope"
"""Mixer whose blocks have the number of parameters that others are matched to."""
TOLERANCE = 0.01
"""Largest relative difference of a matched block's parameters."""
MULTIPLE = 16
"""Preferred divisor of a matched width, which 8-bit products need."""


def mlp_width(config: ModelConfig, layer: int) -> int:
    """Return the hidden width of the MLP in block `layer` (0-based).

    It is `mlp_ratio` times the network's width, unless `match` is "parameters" and the layer is global: then a block of
    this mixer and this MLP has as many parameters, within 1 %, as one of mixer nope and an MLP of `mlp_ratio`. A
    memory counts in neither. Builds both mixers on torch's meta device.

    Raises:
        ModelConfigError: the mixer alone has too many parameters.
    """
    plain = config.mlp_ratio * config.d_model
    if config.match == "none" or not config.is_global(layer):
        return plain
    alone = config.model_copy(update={"memory": NO_MEMORY, "memories": {}})
    own = _mixing_parameters(alone)
    target = _mixing_parameters(alone.model_copy(update={"attn_type": REFERENCE, "mixers": {}}))
    channel = 3 * config.d_model + 2 * config.bias  # parameters per hidden channel: two in fc, one in proj
    exact = plain + (target - own) / channel
    reference_size = target + plain * channel
    for multiple in (MULTIPLE, 1):
        width = round(exact / multiple) * multiple
        if width > 0 and abs(own + width * channel - reference_size) <= TOLERANCE * reference_size:
            return width
    raise ModelConfigError(
        "model.match",
        f"mixer {config.attn_type} alone has {own:,} parameters per block, and a block of mixer {REFERENCE} with its MLP "
        f"{reference_size:,}; make the mixer smaller (model.mixers), or the MLP wider (model.mlp_ratio)",
    )


def _mixing_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of one global layer of the network, without its MLP and norms."""
    with torch.device("meta"):
        mix: nn.Module = BlockLayer(config, 0) if uses_block_part(config) else Attention(config)
    return sum(parameter.numel() for parameter in mix.parameters())
