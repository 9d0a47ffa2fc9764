"""Run kernels of flash-linear-attention on the CPU with Triton's interpreter, and print what its layers give as JSON.

A program of its own, because the interpreter is chosen when Triton is imported: python interpreted.py NAME... decodes;
python interpreted.py --cache NAME... only fills fla's cache.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner, driver


class CpuDriver:
    """Driver with as much as fla reads when it is imported without a GPU."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 2**18})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


driver.set_active(CpuDriver())
# the interpreter has nothing to time: take the first configuration
autotuner.Autotuner.run = lambda self, *args, **named: self.fn.run(*args, **named, **self.configs[0].all_kwargs())

SMALL = {
    "d_model": 64, "n_layers": 1, "attn_every": 1, "attn_offset": 0, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32,
    "vocab_size": 40, "mlp_ratio": 1, "init": "llama",
}  # fmt: skip
ARGUMENTS = {"num_heads": 2, "head_dim": 16, "expand_ratio": 32, "state_size": 16, "intermediate_size": 128}
TOKENS = 5


def state_tensors(state: Any) -> list[torch.Tensor]:
    """The tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, tuple | list) else ()
    return [tensor for value in values for tensor in state_tensors(value)]


def measured(name: str) -> dict[str, Any]:
    """Largest difference between decoding and the forward pass of a network of the layer; entries of its state.

    `wanted` are the entries by the closed form: float32 ones count two units of 16 bits there, all others one.
    """
    from atma_sweep.model.backbone import build
    from atma_sweep.model.block_parts.fla_catalogue import fla_layer
    from atma_sweep.model.block_parts.fla_costs import state_bytes
    from atma_sweep.model.config import ModelConfig
    from atma_sweep.model.inference.decode import PagedDecoder

    own = {key: value for key, value in ARGUMENTS.items() if key in fla_layer(name).arguments}
    if name == "Mamba2":
        own["num_heads"] = 8
    config = ModelConfig(**SMALL, attn_type=f"fla:{name}", mixers={f"fla:{name}": own})
    model = build(config, seed=1).eval()
    text = torch.randint(0, 40, (1, TOKENS), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = model(text)
    decoder = PagedDecoder(model, tokens=TOKENS)
    slot, first = decoder.begin(text[0, :2])
    rows = [first, *(decoder.step([slot], token[None])[0] for token in text[0, 2:])]
    (state,) = decoder.states
    recurrent = sum(t.numel() for t in state_tensors(state.states[slot][1]["recurrent_state"]))
    convolved = sum(t.numel() for t in state_tensors(state.states[slot][1]["conv_state"]))
    sizes = state_bytes(name, model.config.mixers[f"fla:{name}"], 64)
    assert sizes is not None
    return {
        "difference": float((torch.stack(rows) - wanted[0, 1:]).abs().max()), "logits": float(wanted.abs().max()),
        "bytes": 4 * recurrent + 2 * convolved, "wanted_bytes": sizes.fixed,
    }  # fmt: skip


CACHED = {
    "d_model": 64, "n_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "num_slots": 16, "topk": 2, "num_memories": 3,
    "block_size": 16, "block_counts": 2, "state_size": 16, "expand_ratio": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "qk_head_dim": 32, "v_head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16, "shared_mem": True, "window_size": 3,
    "moba_chunk_size": 16, "max_cg_step_training": 2, "feature_dim": 8,
}  # fmt: skip
"""Arguments of the layers whose cache is filled, those that a layer has."""


def cached(name: str) -> dict[str, Any]:
    """Entries that fla's cache holds after a prefill, and what the closed form says, in bytes.

    Attention that cannot run here is replaced: it gives zeros of the right shape, and stores nothing.
    """
    from atma_sweep.model.block_parts import fla_part
    from atma_sweep.model.block_parts.fla_catalogue import NEEDS_MASK, fla_layer
    from atma_sweep.model.block_parts.fla_costs import state_bytes

    layer = fla_layer(name)
    module: Any = importlib.import_module(layer.module)
    for function in ("flash_attn_func", "parallel_moba", "parallax_decode"):
        if hasattr(module, function):
            setattr(module, function, lambda q, *args, **named: torch.zeros_like(q))
    if name == "CyclicFlowAttention":  # its kernels need CUDA
        module.fused_recurrent_cyfa = importlib.import_module("fla.ops.cyfa.naive").naive_recurrent_cyfa
    settings = {key: argument.default for key, argument in layer.arguments.items()}
    settings |= {key: value for key, value in CACHED.items() if key in settings}
    if name == "NativeSparseAttention":
        settings |= {"num_heads": 16, "window_size": 0}  # its kernel wants 16 query heads per KV head
    if name == "RodimusAttention":
        settings["mode"] = "fused_recurrent"
    width, tokens = 64, TOKENS
    inner = fla_part.build_layer(name, width, 2, settings).eval()
    cache = importlib.import_module("fla.models.utils").LegacyFLACache(seen_tokens=0)
    mask = torch.ones(1, tokens, dtype=torch.long) if name in NEEDS_MASK else None
    with torch.no_grad():
        inner(torch.randn(1, tokens, width), attention_mask=mask, past_key_values=cache, use_cache=True)
    state = cache.states[0]
    recurrent, convolved, attended = (
        sum(t.numel() for t in state_tensors(state.get(kind)))
        for kind in ("recurrent_state", "conv_state", "attn_state")
    )
    sizes = state_bytes(name, settings, width)
    assert sizes is not None
    return {
        "bytes": 4 * recurrent + 2 * convolved + 2 * attended,
        "wanted_bytes": sizes.fixed + sizes.per_token * tokens,
    }


def main() -> None:
    """Print name -> numbers of the layers that the command line names."""
    measure, names = (cached, sys.argv[2:]) if sys.argv[1] == "--cache" else (measured, sys.argv[1:])
    print(json.dumps({name: measure(name) for name in names}))


if __name__ == "__main__":
    main()
