"""Compiles a small network as an attempt on a GPU does, for the CPU: python compiled_again.py REGIONAL [OTHERS...], folders by the environment.

Prints one JSON object: the hash of its gradients, and what torch's cache of differentiated graphs was asked for.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from atma_sweep.model.backbone import build
from atma_sweep.model.config import ModelConfig
from atma_sweep.sweep.attempt.device import use_shared_compile_cache


def main(regional: str, *rest: str) -> None:
    torch.cuda.get_device_name = lambda device=None: "none"  # type: ignore[assignment]
    use_shared_compile_cache(torch.device("cpu"), *rest)
    from torch._dynamo.utils import counters

    size = {"d_model": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "vocab_size": 29}
    model = build(ModelConfig(**size, attn_type="polar", memory="gated_delta"), seed=0)
    model.compile_blocks(regional=regional == "regional")
    tokens = torch.arange(48).reshape(2, 24) % 29
    model.total_loss(model.features(tokens).hidden_BTD, tokens).backward()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.numpy().tobytes())
    cache_counts = {name.removeprefix("autograd_cache_"): count for name, count in counters["aot_autograd"].items()}
    print(json.dumps({"gradients": digest.hexdigest(), "asked": cache_counts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
