"""FLOPs of the network, peak FLOP/s of GPUs, and both MFU figures; each formula is defined here only."""

from __future__ import annotations

from typing import NamedTuple

from ...model.config import ModelConfig
from ...model.registry import MEMORIES, MIXERS, call_if_defined
from ...model.resolve import NO_MEMORY, NO_MIXER, uses_block_part

MAX_CAPTURE_FLOPS = 1e13
"""FLOPs of a micro-batch up to which `train.graphs: auto` captures CUDA graphs.

Below it, queuing kernels may take longer than running them. At 6 FLOPs per parameter and token it is 16 rows of 512
tokens of a network of 200M parameters, or 64 rows of 50M: about 20 ms of an H100.
"""


class Peak(NamedTuple):
    """Peak dense bf16 tensor FLOP/s of a GPU with fp32 accumulation."""

    names: tuple[str, ...]
    """Full device names as the CUDA driver reports them, without "NVIDIA "; all share the peak."""
    flops: float
    """FLOP/s."""
    source: str
    """NVIDIA's document and its figure; figures "with sparsity" are halved."""


_ADA = "Ada architecture white paper, https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_HOPPER = "H100 architecture white paper, https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
_H100 = "H100 datasheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "H200 datasheet, https://resources.nvidia.com/en-us-data-center-overview-mc/en-us-data-center-overview/hpc-datasheet-sc23-h200"
_BLACKWELL = "Blackwell datasheet, https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
PEAK_BF16: tuple[Peak, ...] = (
    Peak(
        ("A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIE-40GB", "A100 80GB PCIe"),
        312e12,
        "A100 datasheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf: 312 for every form factor",
    ),
    Peak(("L4",), 121e12, "L4 datasheet, https://www.nvidia.com/en-us/data-center/l4/: 242 with sparsity"),
    Peak(("L40S",), 362e12, "L40S datasheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413: 362.05"),
    Peak(("H100 80GB HBM3",), 989e12, f"{_HOPPER}: SXM5 989.4"),
    Peak(("H100 PCIe",), 756e12, f"{_HOPPER}: PCIe 756"),
    Peak(("H100 NVL",), 835e12, f"{_H100}: NVL 1,671 with sparsity"),
    Peak(("H200",), 989e12, f"{_H200}: SXM 1,979 with sparsity"),
    Peak(("H200 NVL",), 835e12, f"{_H200}: NVL 1,671 with sparsity"),
    Peak(("B200",), 2250e12, f"{_BLACKWELL}: HGX B200 4,500 per GPU with sparsity"),
    Peak(("GB200",), 2500e12, f"{_BLACKWELL}: GB200 NVL72 5,000 per GPU with sparsity"),
    Peak(("GeForce RTX 4090",), 165.2e12, f"{_ADA}: 165.2 with FP32 accumulate"),
)
"""Known GPUs. Names must match in full: parts of a GPU (MIG, vGPU), laptop and export models have other peaks."""


def peak_flops(gpu_name: str | None) -> float | None:
    """Return the peak dense bf16 FLOP/s of a GPU by its driver's name; None if it is not in the table.

    The name must match in full, with or without a leading "NVIDIA ". None gives None.
    """
    short = (gpu_name or "").removeprefix("NVIDIA ")
    return next((peak.flops for peak in PEAK_BF16 if short in peak.names), None)


def paper_flops(config: ModelConfig, parameters: int, seq_len: int) -> float:
    """Return training FLOPs (forward and backward) per token by the paper's formula, 6 N + 12 layers d T.

    N counts all parameters (vocabulary matrices too), and every layer counts as non-causal attention, so it overstates.
    Source: docs/reference/mechanisms.md, "Training".

    Args:
        config: network; number of layers and width are read.
        parameters: N.
        seq_len: T, tokens per row.
    """
    return 6.0 * parameters + 12.0 * config.n_layers * config.d_model * seq_len


class ForwardFlops(NamedTuple):
    """Forward FLOPs per token of a network, as far as they are known."""

    total: float
    """Sum over the parts that report their FLOPs; unknown parts count as 0."""
    unknown_parts: tuple[str, ...]
    """Parts that do not report theirs, such as "mixer 'mine'"."""


def forward_flops(config: ModelConfig, seq_len: int, *, counted: float = 1.0) -> float | None:
    """Return the forward FLOPs per token that are really computed, two per multiply-add; None if unknown.

    Counts matrix products and convolution taps: causal or windowed attention on the global layers, projections, MLPs,
    memory and head. Not counted: look-ups of embeddings and positions, elementwise work, Canon, auxiliary losses. None
    if the mixer or the memory of a network with global layers does not report its FLOPs (`unknown_reason` names it).
    Source: docs/reference/mechanisms.md, "Training".

    Args:
        config: network.
        seq_len: tokens per row, 1 or more; the average number of keys per query follows from it.
        counted: fraction of the targets, 0 to 1, that the loss covers; the head is computed for these alone.
    """
    parts = _forward_flops_by_part(config, seq_len, counted)
    return None if parts.unknown_parts else parts.total


def unknown_reason(config: ModelConfig) -> str | None:
    """Return a clause that names the parts (mixer, memory) whose FLOPs are unknown; None if all are known."""
    unknown_parts = _forward_flops_by_part(config, 1).unknown_parts
    if not unknown_parts:
        return None
    verb = "do not define their" if len(unknown_parts) > 1 else "does not define its"
    return f"{' and '.join(unknown_parts)} {verb} FLOPs (forward_flops)"


def estimated_flops(config: ModelConfig, seq_len: int) -> float:
    """Return estimated training FLOPs per token, three times the forward's, to sort cells by.

    Parts of unknown FLOPs count as 0, so it never is None.
    """
    return 3.0 * _forward_flops_by_part(config, seq_len).total


def _forward_flops_by_part(config: ModelConfig, seq_len: int, counted: float = 1.0) -> ForwardFlops:
    """Return the forward FLOPs per token: their known sum, and the names of parts that do not report theirs.

    No name is reported for a network without global layers.

    Args:
        config: network.
        seq_len: tokens per row, from which the average number of visible keys follows (causal, window included).
        counted: fraction of the targets that the loss covers; scales the head's FLOPs.
    """
    d, heads, kv, dh = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
    globals_ = config.n_global_layers
    convs = config.n_layers - globals_
    mlps = 3 * 2 * d * (config.mlp_channels * convs + global_mlp_width(config) * globals_)
    gated_conv = 2 * d * 3 * d + 2 * d * d + 2 * config.conv_taps * d
    # a mixer has an output projection and perhaps a gate, each as large as the projection to queries
    inner = (1 if config.attn_type == NO_MIXER else 3 if config.output_gate else 2) * heads * dh
    projections = 2 * d * inner + 2 * 2 * d * kv * dh
    reach = config.window_size if config.window else seq_len
    full = min(reach, seq_len)  # queries up to this one see all earlier keys, later ones `reach` keys
    keys = (full * (full + 1) // 2 + (seq_len - full) * reach) / seq_len
    part_flops = _part_flops(config, keys)
    projections *= not uses_block_part(config)
    attention = projections + sum(flops for flops in part_flops.values() if flops is not None)
    head = 2 * d * config.vocab_size * counted
    if config.decoder == "row":
        head += 2 * 2 * d * d
    total = mlps + convs * gated_conv + globals_ * attention + head
    return ForwardFlops(total, tuple(name for name, flops in part_flops.items() if flops is None) if globals_ else ())


def global_mlp_width(config: ModelConfig) -> int:
    """Return the hidden width of the MLPs of the global blocks."""
    if config.match == "none":
        return config.mlp_channels
    from ...model.block import block_mlp_channels  # only here, since it imports torch

    return block_mlp_channels(config, config.attn_offset)


def _part_flops(config: ModelConfig, keys: float) -> dict[str, float | None]:
    """Return part ("mixer 'polar'", "memory 'omega'") -> forward FLOPs per token and layer; None where unknown.

    The mixer comes first, if there is one; without a memory it is the only key. Imports the parts.

    Args:
        config: network; settings that are missing have their defaults.
        keys: keys that a query sees on average.
    """
    name = config.attn_type
    flops_by_part: dict[str, float | None] = {}
    if name != NO_MIXER:
        mixer = MIXERS.load(name)
        settings = mixer.Config(**config.mixers.get(name, {}))
        flops_by_part[f"mixer {name!r}"] = call_if_defined(mixer, "forward_flops", config, settings, keys)
    if config.memory != NO_MEMORY:
        memory = MEMORIES.load(config.memory)
        settings = memory.Config(**config.memories.get(config.memory, {}))
        flops_by_part[f"memory {config.memory!r}"] = call_if_defined(memory, "forward_flops", config, settings)
    return flops_by_part


def training_flops(config: ModelConfig, seq_len: int, *, counted: float = 1.0) -> float | None:
    """Return training FLOPs per token, three times those of `forward_flops`; None if these are unknown.

    Args:
        config: network.
        seq_len: tokens per row.
        counted: fraction of the targets that the loss covers.
    """
    forward = forward_flops(config, seq_len, counted=counted)
    return None if forward is None else 3.0 * forward


def mfu(flops_per_token: float | None, tokens_per_second: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation, a fraction of the peak; None without a known peak or known FLOPs.

    Args:
        flops_per_token: training FLOPs per token.
        tokens_per_second: speed of the training.
        peak: peak FLOP/s of the device.
    """
    return None if peak is None or flops_per_token is None else flops_per_token * tokens_per_second / peak
