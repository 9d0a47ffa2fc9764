"""FLOPs of the model, peak FLOP/s of GPUs, and both MFU figures. Each formula stands here only."""

from __future__ import annotations

import re

from ...model.config import ModelConfig

PEAK_BF16: tuple[tuple[str, float], ...] = (
    (r"\bA100\b", 312e12),
    (r"\bL4\b", 121e12),
    (r"\bL40S\b", 362e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bH200 NVL\b", 835e12),
    (r"\bH200\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"\bRTX 4090\b", 165.2e12),
)
"""Dense bf16 tensor FLOP/s with fp32 accumulation, from NVIDIA's data sheets (half of the figure "with sparsity")."""


def peak_flops(gpu_name: str | None) -> float | None:
    """Peak dense bf16 FLOP/s of a GPU by its driver's name, or None when it is not in the table."""
    return next((peak for pattern, peak in PEAK_BF16 if gpu_name and re.search(pattern, gpu_name)), None)


def paper_flops(config: ModelConfig, parameters: int, seq_len: int) -> float:
    """Training FLOPs per token by the paper's formula, 6 N + 12 layers d T (MECHANISMS F).

    N counts all parameters and every layer counts as non-causal attention, so it overstates.
    """
    return 6.0 * parameters + 12.0 * config.n_layers * config.d_model * seq_len


def forward_flops(config: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs per token that are really done, two per multiply-add (MECHANISMS A, B, D Cost).

    Causal or windowed attention on the global layers only, no embedding lookup, elementwise work left out.
    """
    d, heads, kv, dh = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    globals_ = sum(config.is_global(layer) for layer in range(config.n_layers))
    convs = config.n_layers - globals_
    mlp = 2 * d * (2 * config.mlp_ratio * d) + 2 * (config.mlp_ratio * d) * d
    gated_conv = 2 * d * 3 * d + 2 * d * d + 2 * config.conv_taps * d
    projections = 2 * d * (2 * heads * dh) + 2 * 2 * d * kv * dh + 2 * heads * dh * d
    reach = config.window_size if config.window else seq_len
    keys = sum(min(i + 1, reach) for i in range(seq_len)) / seq_len
    attention = projections + 4 * heads * dh * keys
    if config.memory != "none":
        attention += 2 * (2 * d * heads + 2 * d * heads * dh) + 7 * heads * dh * dh
    return config.n_layers * mlp + convs * gated_conv + globals_ * attention + 2 * d * config.vocab_size


def training_flops(config: ModelConfig, seq_len: int) -> float:
    """Training FLOPs per token: the forward pass and twice as much for the backward."""
    return 3.0 * forward_flops(config, seq_len)


def mfu(flops_per_token: float, tokens_per_second: float, peak: float | None) -> float | None:
    """Share of the peak that was used, or None without a known peak."""
    return None if peak is None else flops_per_token * tokens_per_second / peak
