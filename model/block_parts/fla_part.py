"""Layers of flash-linear-attention (fla) as block parts: `attn_type: fla:GatedDeltaNet` and every other layer class.

An attribute of this module is made for each layer class when it is first read. Letters of shapes: B batch, T length, D
model width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import operator
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field, create_model, field_validator
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...kernels import dispatch
from ...kernels.fla_configs import first_configs
from ..bases import BlockConfig, BlockPart
from ..bounds import MAX_COUNT, MAX_FLOAT
from ..config import Config, Flag, Float, Int, ModelConfig, knob
from ..kv_cache import CacheCapacity, ChunkedStates
from .fla_catalogue import NEEDS_MASK, PREFIX, fla_layer, fla_version
from .fla_costs import cost_of

ENDS = ("o_proj", "out_proj", "down_proj")
"""Attributes that fla's layers have for the projection that ends the branch."""
TRIAL_TOKENS = 128
"""Length of the text on which a layer is tried."""
_KINDS: dict[type, Any] = {
    bool: Flag,
    int: Annotated[Int, Field(ge=-MAX_COUNT, le=MAX_COUNT)],
    float: Annotated[Float, Field(ge=-MAX_FLOAT, le=MAX_FLOAT)],
    str: str,
}


class FlaConfig(BlockConfig):
    """Settings of every layer of fla; its own arguments follow as fields."""

    version: str = knob(
        fla_version() or "", "Version of fla, which is filled in; another than the installed one is refused."
    )

    @field_validator("version")
    @classmethod
    def _is_installed(cls, version: str) -> str:
        """Return the version; ValueError unless it is the installed one, whose layers may compute something else."""
        if version != fla_version():
            raise ValueError(
                f"needs fla-core {version}, and {fla_version()} is installed; pip install fla-core=={version}"
            )
        return version


def _config_class(name: str) -> type[Config]:
    """Return the settings of a layer class: a field per argument, with fla's default."""
    fields: dict[str, Any] = {}
    for argument, (kinds, default, optional) in fla_layer(name).arguments.items():
        kind = functools.reduce(operator.or_, (_KINDS[kind] for kind in kinds))
        doc = f"Argument {argument} of fla's {name}."
        fields[argument] = (kind | None if optional else kind, knob(default, doc))
    config_class: type[Config] = create_model(f"{name}Config", __base__=FlaConfig, **fields)
    config_class.__doc__ = f"Arguments of fla's {name}."
    return config_class


class FlaPart(BlockPart):
    """Layer of fla as a block part. It has weights of float32 and computes under torch's autocast to the activations' type."""

    fla_name: ClassVar[str]
    is_compilable: ClassVar[bool] = False
    is_capturable: ClassVar[bool] = False

    def __init__(self, model: ModelConfig, config: Any) -> None:
        """Build the layer with the network's width; `init` sets its last projection to zero where it does elsewhere."""
        super().__init__(model, config)
        self.inner = build_layer(self.fla_name, model.d_model, model.n_layers, config.model_dump())
        for name in ENDS if model.init != "llama" else ():
            if isinstance(end := getattr(self.inner, name, None), nn.Linear):
                nn.init.zeros_(end.weight)

    @classmethod
    def check(cls, model: ModelConfig, config: Any) -> None:
        """Raise ValueError if the class is no block part, or fla refuses to build it with these arguments."""
        refusal = fla_layer(cls.fla_name).refusal
        if refusal is not None:
            raise ValueError(f"fla's {cls.fla_name} cannot be a block part: {refusal}")
        _projections_flops(cls.fla_name, model.d_model, model.n_layers, tuple(config.model_dump().items()))

    @classmethod
    def layer_flops(cls, model: ModelConfig, config: Any, keys: float) -> float:
        """Return FLOPs per token of one layer: projections and convolutions, and the rest where its cost is known.

        Projections are counted by torch's FLOP counter, which cannot see the Triton kernels of fla.

        Args:
            model: network.
            config: arguments of the layer.
            keys: tokens up to the current one, its own included, on average over a row.
        """
        settings = config.model_dump()
        flops = _projections_flops(cls.fla_name, model.d_model, model.n_layers, tuple(settings.items()))
        cost = cost_of(cls.fla_name, settings, model.d_model)
        return flops if cost is None else flops + cost.total_flops(keys)

    def refusal(self, device: torch.device) -> str | None:
        """Return why fla cannot run the layer on that device, and the remedy; None if it can.

        On a GPU the layer is tried, forward and backward, unless that has passed on this machine before.
        """
        name = f"{PREFIX}:{self.fla_name}"
        if device.type != "cuda":
            return f"{name} runs on a GPU only, and the device is {device.type}; request a GPU with resources.gpus: 1"
        settings = tuple(sorted(self.config.model_dump().items()))
        failure = dispatch.self_test_failure(name, _trial_error, self.fla_name, settings, self.width, device)
        return failure and f"{name} does not run on this GPU: {failure}; use another layer, GPU or Triton"

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the layer's output [B, T, D] for whole sequences, in x's type."""
        return self._call(x_BTD)

    def _call(self, x_BTD: Tensor, mask: Tensor | None = None, **cache: Any) -> Tensor:
        """Return the layer's output [B, T, D] in x's type; `mask` and `cache` are fla's arguments for decoding."""
        with torch.autocast(x_BTD.device.type, x_BTD.dtype, enabled=x_BTD.dtype in dispatch.SIXTEEN_BITS):
            result = self.inner(x_BTD, attention_mask=mask, **cache)
        y_BTD: Tensor = result[0] if isinstance(result, tuple) else result
        return y_BTD.to(x_BTD.dtype)

    def open(self, capacity: CacheCapacity) -> ChunkedStates:
        """Return an empty cache, which holds fla's own state for each slot."""
        return ChunkedStates()

    def begin(self, x_1TD: Tensor, states: ChunkedStates, slots_1: Tensor, *, chunk: int) -> Tensor:
        """Prefill: return the output [1, T, D] of one new sequence; store fla's state in `states` at its slot."""
        y_1TD, states.states[int(slots_1)] = self._continue(x_1TD, None)
        return y_1TD

    def decode(self, x_BD: Tensor, states: ChunkedStates, slots_B: Tensor) -> Tensor:
        """Return the output [B, D] of each sequence's next token, computed one sequence at a time.

        Copies the slots to the host. Rows without a sequence (padding) get zeros.
        """
        y_BD = torch.zeros_like(x_BD)
        for row, slot in enumerate(slots_B.tolist()):
            if slot in states.states:
                y_11D, states.states[slot] = self._continue(x_BD[row, None, None], states.states[slot])
                y_BD[row] = y_11D[0, 0]
        return y_BD

    def _continue(self, x_1TD: Tensor, state: tuple[int, Any] | None) -> tuple[Tensor, tuple[int, Any]]:
        """Return (output [1, T, D], state) of the next tokens of one sequence.

        A state is (tokens read, what fla's cache holds for the layer); None before the first token.
        """
        tokens, content = state or (0, None)
        cache = importlib.import_module("fla.models.utils").LegacyFLACache(seen_tokens=tokens)
        if content is not None:
            cache.states.append(content)
        tokens += x_1TD.shape[1]
        mask = torch.ones(1, tokens, dtype=torch.long, device=x_1TD.device) if self.fla_name in NEEDS_MASK else None
        y_1TD = self._call(x_1TD, mask, past_key_values=cache, use_cache=True)
        return y_1TD, (tokens, cache.states[0])

    def kernel_paths(self, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
        """Return the layer's name -> "fla VERSION (Triton VERSION)"."""
        return {self.fla_name: f"fla {fla_version()} (Triton {dispatch.version('triton')})"}


def build_layer(name: str, width: int, layers: int, settings: Mapping[str, Any]) -> nn.Module:
    """Return a layer of fla on the current device, with fla's initial values.

    Each layer is the first of its own cache.

    Args:
        name: Layer class.
        width: Width of the network.
        layers: Blocks of the network, by which RWKV-7 scales its initial values.
        settings: Arguments of the layer, and others, which are ignored.

    Raises:
        ValueError: fla refuses the arguments; the text has its reason.
    """
    layer = fla_layer(name)
    # RWKV-7 divides by the number of layers less one
    from_network = {"hidden_size": width, "layer_idx": 0, "num_hidden_layers": max(layers, 2)}
    arguments = {key: settings[key] for key in layer.arguments}
    if name == "LogLinearMamba2" and arguments["num_heads"] is None:  # as fla's Mamba2 derives it
        arguments["num_heads"] = arguments["expand"] * width // arguments["head_dim"]
    with _quiet():
        try:
            cls = getattr(importlib.import_module(layer.module), name)
            built: nn.Module = cls(
                **{key: from_network[key] for key in layer.receives & set(from_network)}, **arguments
            )
        except (ImportError, TypeError, ValueError, AssertionError, NotImplementedError, ZeroDivisionError) as error:
            raise ValueError(f"fla refuses {name}: {' '.join(str(error).split()) or type(error).__name__}") from error
    return built


@functools.lru_cache(maxsize=256)
def _projections_flops(name: str, width: int, layers: int, settings: tuple[tuple[str, Any], ...]) -> float:
    """Return the FLOPs per token of a layer's projections and convolutions; ValueError if fla refuses the arguments.

    Builds the layer on torch's meta device, once per process and arguments.
    """
    with torch.device("meta"):
        return sum(_projection_flops(module) for module in build_layer(name, width, layers, dict(settings)).modules())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of fla about this machine; `FlaPart.refusal` says what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _projection_flops(module: nn.Module) -> float:
    """Return the FLOPs per token of a linear layer or depthwise convolution on the meta device, 0 of any other module."""
    if isinstance(module, nn.Conv1d):  # fla's short convolutions too
        return 2.0 * math.prod(module.weight.shape)
    if not isinstance(module, nn.Linear):
        return 0.0
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(1, module.in_features, dtype=module.weight.dtype))
    return float(counter.get_total_flops())


def _trial_error(
    name: str, settings: tuple[tuple[str, Any], ...], width: int, device: torch.device, *, seed: int
) -> float:
    """Run a layer once in bfloat16, forward and backward, kernels untuned; return 0.0 if all results are finite, else NaN.

    Args:
        name: Layer class.
        settings: its arguments, as pairs.
        width: Width of the network.
        device: GPU.
        seed: seed of weights and input.

    Raises:
        RuntimeError: fla lacks a package or function that the layer needs; fla's other errors pass through.
    """
    part = _part_class(name)
    with first_configs(), torch.random.fork_rng(devices=[device]), torch.enable_grad():
        torch.manual_seed(seed)
        layer = part(ModelConfig(d_model=width, n_layers=2), part.Config(**dict(settings))).to(device)
        for parameter in layer.parameters():  # the last projection may be zero
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        x = torch.randn(1, TRIAL_TOKENS, width, device=device, dtype=torch.bfloat16, requires_grad=True)
        try:
            y = layer(x)
            gradients = torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()), allow_unused=True)
        except (ImportError, TypeError, AttributeError) as error:  # what fla does without an optional package
            raise RuntimeError(str(error)) from error
    results = (y, *(gradient for gradient in gradients if gradient is not None))
    return 0.0 if all(bool(result.isfinite().all()) for result in results) else math.nan


@functools.cache
def _part_class(name: str) -> type[FlaPart]:
    """Return the block part of a layer class; it has FLOPs of its own, and a `step` if fla's layer has a cache."""
    members: dict[str, Any] = {
        "__doc__": f"fla's {name}.",
        "__module__": __name__,
        "fla_name": name,
        "Config": _config_class(name),
        "forward_flops": classmethod(lambda cls, model, config, keys: cls.layer_flops(model, config, keys)),
        "step": FlaPart.decode if fla_layer(name).decodes else None,
    }
    return type(name, (FlaPart,), members)


def __getattr__(name: str) -> type[FlaPart]:
    """Return the block part of a layer class of the installed fla; AttributeError for any other name."""
    try:
        return _part_class(name)
    except KeyError:
        raise AttributeError(f"fla has no layer {name!r}") from None
