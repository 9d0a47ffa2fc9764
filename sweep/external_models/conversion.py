"""Weights in the Hugging Face format as tensors of this program's network: Llama, Mistral, Qwen2, Qwen3, exported cells."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hub_checkpoint import (
    EXPORTED,
    PICKLES,
    InvalidCheckpoint,
    WeightsUnavailable,
    check_all_shards,
    check_export,
    hash_files,
    open_tensors,
    read_config,
)

if TYPE_CHECKING:
    from torch import Tensor

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type whose networks `rope` transformers can express."""
_EXPORTED_PREFIX = "network."
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_BLOCK_PARTS = {
    "input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.q_proj": "mix.w_q",
    "self_attn.k_proj": "mix.w_k", "self_attn.v_proj": "mix.w_v", "self_attn.o_proj": "mix.proj",
    "self_attn.q_norm": "mix.q_norm", "self_attn.k_norm": "mix.k_norm", "mlp.down_proj": "mlp.proj",
}  # fmt: skip
"""Module of a layer in transformers -> module of a block; the MLP's other two matrices become one."""
_GATE, _UP, _FC = "mlp.gate_proj", "mlp.up_proj", "mlp.fc"
_ENDS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_IGNORED = "rotary_emb.inv_freq"
"""End of the name of a buffer that old checkpoints hold and that follows from the config."""


@dataclass(frozen=True)
class HubWeights:
    """A folder of safetensors and a config.json whose network this program can build."""

    folder: Path
    config: Mapping[str, Any]
    """Contents of config.json."""
    digests: Mapping[Path, str] = field(default_factory=dict)
    """SHA-256 in hex of files that were hashed when the folder was checked."""

    @property
    def is_exported(self) -> bool:
        """True for a cell that this program exported."""
        return self.config["model_type"] == EXPORTED

    def sha256(self) -> str:
        """Return the SHA-256 in hex over names and contents of the weight files."""
        return hash_files(self.folder, self._files(), self.digests)

    def model_settings(self) -> dict[str, Any]:
        """Return the settings of the model section that the network has, as JSON values.

        Raises:
            InvalidCheckpoint: The network has something that the settings cannot express; it is named.
        """
        if self.is_exported:
            return dict(self.config["network"])
        return _llama_settings(self.folder, self.config, self.names())

    def state(self) -> dict[str, Tensor]:
        """Return the tensors by name in this program's network, in their stored types, on the CPU.

        Raises:
            InvalidCheckpoint: A tensor has no counterpart; it is named.
        """
        with ExitStack() as files:
            tensors: dict[str, Callable[[], Tensor]] = {}
            for path in self._files():
                file = files.enter_context(open_tensors(path))
                tensors |= {name: lambda name=name, file=file: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if self.is_exported:
                return {name.removeprefix(_EXPORTED_PREFIX): read() for name, read in tensors.items()}
            return dict(_converted(self.folder, self.config, self.model_settings(), tensors))

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))

    def names(self) -> set[str]:
        """Return the names of the tensors in all files.

        Raises:
            InvalidCheckpoint: A file is damaged or incomplete.
        """
        names: set[str] = set()
        for path in self._files():
            with open_tensors(path) as file:
                names |= set(file.keys())
        return names


def open_hub_weights(folder: Path) -> HubWeights:
    """Return the weights of a folder after checking that its files are complete and of a family that can be converted.

    Neither the package transformers nor code of the folder is used.

    Raises:
        WeightsUnavailable: The folder has no weights, or lacks some of the files that its index names.
        InvalidCheckpoint: It is no checkpoint, its weights can run code, or its family has another network.
    """
    config = read_config(folder)
    if config["model_type"] not in (*FAMILIES, EXPORTED):
        raise InvalidCheckpoint(
            f"{folder}: models of type {config['model_type']!r} cannot be converted; types that can: "
            f"{', '.join((*FAMILIES, EXPORTED))}"
        )
    digests = check_export(folder)
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if pickled:
            raise InvalidCheckpoint(
                f"{folder} holds its weights only as {pickled[0]}, a format that can run code; convert it to safetensors"
            )
        raise WeightsUnavailable(f"{folder} holds no weights; put the model's *.safetensors next to its config.json")
    check_all_shards(folder)
    weights = HubWeights(folder, config, digests)
    weights.names()  # reads the header of each file
    return weights


def _llama_settings(folder: Path, config: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the settings of the model section for a Llama-shaped network, as JSON values.

    Args:
        folder: Folder of the checkpoint, for messages.
        config: Contents of config.json.
        names: Names of its tensors, which tell the projections with biases.

    Raises:
        InvalidCheckpoint: A setting of config.json cannot be expressed.
    """
    try:
        heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        windows = config.get("layer_types") or ()
        is_windowed = config["model_type"] == "mistral" or config.get("use_sliding_window")
        refused = {
            "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
            "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
            "partial_rotary_factor": config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1)) != 1,
            "sliding_window": bool(is_windowed and config.get("sliding_window")),
            "layer_types": any(kind != "full_attention" for kind in windows),
            "quantization_config": config.get("quantization_config") is not None,
        }
        wrong = [name for name, is_refused in refused.items() if is_refused]
        if wrong:
            values = ", ".join(f"{name}: {json.dumps(config.get(name, rope))}" for name in wrong)
            raise InvalidCheckpoint(f"{folder}: rope transformers cannot express {values}")
        biased = {name.removesuffix(".bias").rpartition(".")[2] for name in names if name.endswith(".bias")}
        return {
            "d_model": width, "n_layers": int(config["num_hidden_layers"]), "n_heads": heads,
            "n_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or width // heads), "vocab_size": int(config["vocab_size"]),
            "attn_every": 1, "attn_offset": 0, "mlp": "swiglu", "mlp_width": int(config["intermediate_size"]),
            "canon": False, "qk_norm": config["model_type"] == "qwen3", "qk_norm_weight": config["model_type"] == "qwen3",
            "output_gate": False, "bias": bool(biased), **({"qkv_bias": "q_proj" in biased, "head_bias": False} if biased else {}),
            "norm_eps": float(config["rms_norm_eps"]), "residual": "pre-norm", "logit_cap": "none",
            "tie_head": bool(config.get("tie_word_embeddings", False)), "attn_type": "rope", "memory": "none",
            "positions": "none",
            "mixers": {
                "rope": {"rotary": "full", "base": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)}
            },
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidCheckpoint(f"{folder / 'config.json'}: missing or invalid setting: {error}") from error


def _converted(
    folder: Path, config: Mapping[str, Any], settings: Mapping[str, Any], tensors: Mapping[str, Callable[[], Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of this program's network from those of a Llama-shaped one.

    The rotation here turns in the other direction. Queries and keys whose second half of channels changes sign give the
    same scores, bit for bit. Biases of the network that the source lacks are zeros.

    Args:
        folder: Folder of the checkpoint, for messages.
        config: Contents of config.json.
        settings: Result of `_llama_settings`.
        tensors: Functions that read the tensors, by name in transformers.

    Raises:
        InvalidCheckpoint: A tensor has no counterpart, or one is missing.
    """
    import torch

    counterparts: dict[str, str] = {}
    for name in tensors:
        layer = _LAYER.fullmatch(name)
        module, _, kind = (layer[2] if layer else name).rpartition(".")
        if name in _ENDS:
            counterparts[name] = _ENDS[name]
        elif layer and module in _BLOCK_PARTS and kind in ("weight", "bias"):
            counterparts[name] = f"blocks.{layer[1]}.{_BLOCK_PARTS[module]}.{kind}"
        elif layer and module == _GATE and kind in ("weight", "bias"):
            counterparts[name] = f"blocks.{layer[1]}.{_FC}.{kind}"
        elif not (layer and module == _UP) and not name.endswith(_IGNORED):
            raise InvalidCheckpoint(f"{folder}: tensor {name} has no counterpart in rope transformers")
    if settings["tie_head"]:
        counterparts.pop("lm_head.weight", None)  # some files repeat the embedding
    rows: dict[str, int] = {}
    for name, ours in counterparts.items():
        tensor = tensors[name]()
        if _GATE in name:
            up = name.replace(_GATE, _UP)
            if up not in tensors:
                raise InvalidCheckpoint(f"{folder}: tensor {up} is missing")
            tensor = torch.cat([tensor, tensors[up]()])
        elif ".mix.w_q." in ours or ".mix.w_k." in ours:
            halves = tensor.unflatten(0, (-1, 2, int(settings["head_dim"]) // 2)).clone()
            halves[:, 1].neg_()
            tensor = halves.flatten(0, 2)
        rows[ours] = len(tensor)
        yield ours, tensor.contiguous()
    if not settings["bias"]:
        return
    for name in [
        name for name in rows if name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
    ]:
        bias = name.removesuffix("weight") + "bias"
        if bias not in rows and (settings.get("qkv_bias") or ".mix.w_" not in name):
            yield bias, torch.zeros(rows[name])
