"""One configuration for each kernel of flash-linear-attention that delta rules and PaTH attention launch, instead of its autotuner.

The autotuner compiles every configuration that fla lists, for each number of heads anew: 133 of the rule with a retention for
each channel, minutes on one core, and 39 of two kernels of PaTH attention on Hopper. And it takes the fastest by the clock, so that two processes may round otherwise.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple


class KernelConfig(NamedTuple):
    """The configuration wanted of a kernel: warps, stages, tiles."""

    warps: int
    stages: int = 3  # as Triton has it where a kernel's configurations do not say
    tiles: tuple[tuple[str, int], ...] = ()


KernelConfigs = dict[str, KernelConfig]
"""Of kernels "module of fla:name in it"."""


def shared_configs(head_dim: int) -> KernelConfigs:
    """Kernels that carry the state along the chunks, a program for each tile BV of the state's rows."""
    # on Hopper, at d = 128 and B16 H8, these are one and two waves of programs; at 256, tiles of 64 take over 227 KB back,
    # and over 99 forth
    tile = (("BV", 64 if head_dim <= 128 else 32),)
    return {
        "ops.common.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": KernelConfig(4, 2, tile),
        "ops.common.chunk_delta_h:chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": KernelConfig(4, 2, tile),
    }


def channelwise_configs(head_dim: int) -> KernelConfigs:
    """What `channelwise_configs.fla_forward` and `fla_backward` launch for heads of size d."""
    return shared_configs(head_dim) | {
        "ops.utils.cumsum:chunk_local_cumsum_vector_kernel": KernelConfig(4, 3, (("BS", 32),)),
        # one warp sums each row without shared memory
        "ops.kda.chunk_intra_token_parallel:chunk_kda_fwd_kernel_intra_token_parallel": KernelConfig(
            1, 3, (("BH", 2),)
        ),
        # BK 64 spills here; on an H100 one warp takes 0.23 ms where four take 0.58, at B16 T2048 H8
        "ops.kda.chunk_intra:chunk_kda_fwd_kernel_inter_solve_fused": KernelConfig(1, 3, (("BK", 32),)),
        "ops.kda.chunk_intra:chunk_kda_bwd_kernel_intra": KernelConfig(2, 2),
        "ops.kda.wy_fast:recompute_w_u_fwd_kda_kernel": KernelConfig(4, 2),
        "ops.gla.chunk:chunk_gla_fwd_kernel_o": KernelConfig(4, 3, (("BK", 64), ("BV", min(head_dim, 128)))),
        "ops.kda.chunk_bwd:chunk_kda_bwd_kernel_dAv": KernelConfig(4, 2),
        # two warps spill up to 45 KB a thread; on Hopper fla leaves out BK 32, and 64 it is, which spills on Ampere
        "ops.kda.chunk_bwd:chunk_kda_bwd_kernel_wy_dqkg_fused": KernelConfig(4, 2, (("BK", 32), ("BV", 64))),
    }


def gated_delta_configs(head_dim: int) -> KernelConfigs:
    """What `ops.fla_forward` and `fla_backward` launch for heads of size d."""
    return shared_configs(head_dim) | {
        "modules.norm.l2norm:l2norm_fwd_kernel": KernelConfig(4, 3, (("BT", 32),)),
        "modules.norm.l2norm:l2norm_bwd_kernel": KernelConfig(4, 3, (("BT", 32),)),
        "ops.utils.cumsum:chunk_local_cumsum_scalar_kernel": KernelConfig(1),
        "ops.gated_delta_rule.chunk_fwd:chunk_gated_delta_rule_fwd_kkt_solve_kernel": KernelConfig(4, 3, (("BK", 32),)),
        "ops.gated_delta_rule.wy_fast:recompute_w_u_fwd_kernel": KernelConfig(4, 2),
        "ops.gated_delta_rule.wy_fast:prepare_wy_repr_bwd_kernel": KernelConfig(4, 2),
        "ops.common.chunk_o:chunk_fwd_kernel_o": KernelConfig(4, 3, (("BK", 64), ("BV", 64))),
        "ops.common.chunk_o:chunk_bwd_kernel_dv_local": KernelConfig(4, 2),
        "ops.common.chunk_o:chunk_bwd_kernel_dqkwg": KernelConfig(4, 2),
    }


def path_configs(_head_dim: int) -> KernelConfigs:
    """What PaTH attention launches that fla would tune: the products of keys of a chunk, and their inverse."""
    return {
        "ops.common.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel": KernelConfig(4, 3, (("BK", 64),)),
        # of chunks of 64 on Hopper, of 32 elsewhere
        "ops.utils.solve_tril:merge_16x16_to_64x64_inverse_kernel": KernelConfig(4, 3),
        "ops.utils.solve_tril:merge_16x16_to_32x32_inverse_kernel": KernelConfig(4, 3),
    }


def pin_configs(configs_for: Callable[[int], KernelConfigs], head_dim: int) -> None:
    """Before each call of fla: from here on its kernels have one configuration each, that for heads of size d."""
    for tuner, pinned in _pinned_configs(configs_for, head_dim):
        tuner.configs = pinned


@functools.cache
def _pinned_configs(configs_for: Callable[[int], KernelConfigs], head_dim: int) -> list[tuple[Any, list[Any]]]:
    # fla lists what suits the GPU and leaves out what the compiler gets wrong there, so the one taken is of its list
    return [
        (tuner, [min(listed, key=functools.partial(_distance, wanted))])
        for (tuner, listed), wanted in (
            (_autotuner_configs(kernel), wish) for kernel, wish in configs_for(head_dim).items()
        )
    ]


@functools.cache
def _autotuner_configs(kernel: str) -> tuple[Any, list[Any]]:
    """A kernel's autotuner, and its configurations as fla lists them."""
    module, name = kernel.split(":")
    tuner = getattr(importlib.import_module(f"fla.{module}"), name)
    while not hasattr(tuner, "configs"):  # heuristics around it
        tuner = tuner.fn
    return tuner, tuner.configs


def _distance(wanted: KernelConfig, config: Any) -> tuple[float, ...]:
    """How far a configuration is from the wish: warps first, then tiles, then stages; of two as far, the smaller one."""
    tiles = sum(abs(math.log2(config.kwargs[name] / size)) for name, size in wanted.tiles)
    warps, stages = abs(math.log2(config.num_warps / wanted.warps)), abs(config.num_stages - wanted.stages)
    return (warps, tiles, stages, config.num_warps, *config.kwargs.values(), config.num_stages)
