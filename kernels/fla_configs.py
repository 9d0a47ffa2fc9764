"""Pinned launch configurations of the kernels of flash-linear-attention (fla), which replace its autotuner.

The delta rules and PaTH attention launch these kernels. fla's autotuner compiles every configuration for each number of
heads: 133 of the rule with a retention per channel, minutes on one core, and 39 of two kernels of PaTH attention on
Hopper. It also picks the fastest by measured time, so two processes may round differently.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class KernelConfig(NamedTuple):
    """Wanted launch configuration of one fla kernel: warps, pipeline stages, and (name, size) of its tiles.

    fla may list no such configuration; `pin_configs` then takes the nearest that it lists.
    """

    warps: int
    stages: int = 3  # Triton's default for configurations that do not set it
    tiles: tuple[tuple[str, int], ...] = ()


KernelConfigs = dict[str, KernelConfig]
"""Wanted configurations by kernel, "module below fla:name of the kernel"."""


def shared_configs(head_dim: int) -> KernelConfigs:
    """Return the wanted configurations of the two kernels that carry the state across chunks in both delta rules.

    Keys are "module below fla:name of the kernel", for the forward and the backward. Both take 4 warps and 2 stages. A
    program handles BV rows of the state: 64 for heads of up to 128, else 32. `pin_configs` takes the nearest
    configurations that fla lists.
    """
    # on Hopper, at d = 128 and B16 H8, these are one and two waves of programs; at 256, tiles of 64 need over 227 KB
    # backward and over 99 KB forward
    tile = (("BV", 64 if head_dim <= 128 else 32),)
    return {
        "ops.common.chunk_delta_h:chunk_gated_delta_rule_fwd_kernel_h_blockdim64": KernelConfig(4, 2, tile),
        "ops.common.chunk_delta_h:chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": KernelConfig(4, 2, tile),
    }


def channelwise_configs(head_dim: int) -> KernelConfigs:
    """Return the wanted configuration of each kernel that the channelwise delta rule launches, by "module:name".

    The module's path is relative to fla. These are the kernels of `channelwise_delta.op.fla_forward` and
    `fla_backward`, those of `shared_configs` included. `pin_configs`, which takes this function itself, pins for each
    kernel the nearest configuration that fla lists on this GPU.
    """
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
        # two warps spill up to 45 KB per thread; on Hopper fla does not list BK 32, so 64 is taken
        "ops.kda.chunk_bwd:chunk_kda_bwd_kernel_wy_dqkg_fused": KernelConfig(4, 2, (("BK", 32), ("BV", 64))),
    }


def gated_delta_configs(head_dim: int) -> KernelConfigs:
    """Return the wanted configuration of each kernel that the gated delta rule launches, by "module:name".

    The module's path is relative to fla. These are the kernels of `gated_delta.torch_op.fla_forward` and
    `fla_backward`, those of `shared_configs` included. `pin_configs`, which takes this function itself, pins for each
    kernel the nearest configuration that fla lists on this GPU.
    """
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
    """Return the wanted configuration of each kernel of PaTH attention that fla would tune, by "module:name".

    The module's path is relative to fla. The kernels compute the products of the keys of a chunk and the inverse of
    that matrix. The argument, a head size, is ignored. `pin_configs`, which takes this function itself, pins for each
    kernel the nearest configuration that fla lists on this GPU.
    """
    return {
        "ops.common.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel": KernelConfig(4, 3, (("BK", 64),)),
        # chunks of 64 on Hopper, of 32 elsewhere
        "ops.utils.solve_tril:merge_16x16_to_64x64_inverse_kernel": KernelConfig(4, 3),
        "ops.utils.solve_tril:merge_16x16_to_32x32_inverse_kernel": KernelConfig(4, 3),
    }


@contextlib.contextmanager
def first_configs() -> Iterator[None]:
    """Let Triton's autotuners take the first configuration that runs, without timing any, in this process.

    For a trial of kernels: tuning takes minutes, and what it chose for a short text would be kept for long ones. Nothing
    is stored in the autotuners or on disk.
    """
    autotuner: Any = importlib.import_module("triton.runtime.autotuner")
    errors = importlib.import_module("triton.compiler.errors")
    refusals = (autotuner.OutOfResources, autotuner.PTXASError, errors.CompileTimeAssertionFailure)
    tuned_run = autotuner.Autotuner.run

    def run(tuner: Any, *args: Any, **named: Any) -> Any:
        """Launch the kernel of an autotuner; raises the last configuration's error if none runs."""
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        configs = tuner.prune_configs(named) if len(tuner.configs) > 1 else tuner.configs
        for config in configs:
            chosen = named | config.all_kwargs()
            if config.pre_hook is not None:
                config.pre_hook(tuner.nargs | chosen)
            try:
                return tuner.fn.run(*args, **chosen)
            except refusals:
                if config is configs[-1]:
                    raise
        return None

    autotuner.Autotuner.run = run
    try:
        yield
    finally:
        autotuner.Autotuner.run = tuned_run


def pin_configs(configs_for: Callable[[int], KernelConfigs], head_dim: int) -> None:
    """Restrict fla's autotuners to one configuration per kernel, the listed one nearest to that for `head_dim`.

    Call it before each call of fla: it overwrites the `configs` of fla's module-level autotuners for the whole process,
    until the next call. Imports fla's modules at the first call.

    Args:
        configs_for: Function of the head size that returns the wanted configurations: `gated_delta_configs`,
            `channelwise_configs` or `path_configs`.
        head_dim: Head size.
    """
    for tuner, pinned in _pinned_configs(configs_for, head_dim):
        tuner.configs = pinned


@functools.cache
def _pinned_configs(configs_for: Callable[[int], KernelConfigs], head_dim: int) -> list[tuple[Any, list[Any]]]:
    """Return pairs (autotuner, list of its one pinned configuration), one per kernel of `configs_for`; cached.

    The pinned configuration is the one of fla's own list that is nearest to the wanted one (`_distance`). Imports fla's
    modules; nothing is changed.
    """
    # fla lists only configurations that suit the GPU and compile correctly there, so the pinned one comes from its list
    return [
        (tuner, [min(listed, key=functools.partial(_distance, wanted))])
        for (tuner, listed), wanted in (
            (_autotuner_configs(kernel), wish) for kernel, wish in configs_for(head_dim).items()
        )
    ]


@functools.cache
def _autotuner_configs(kernel: str) -> tuple[Any, list[Any]]:
    """Return (autotuner, configurations that fla lists) of a kernel "module below fla:name"; cached.

    The list is the one of the first call, before anything is pinned. Imports the module.
    """
    module, name = kernel.split(":")
    tuner = getattr(importlib.import_module(f"fla.{module}"), name)
    while not hasattr(tuner, "configs"):  # unwrap triton.heuristics
        tuner = tuner.fn
    return tuner, tuner.configs


def _distance(wanted: KernelConfig, config: Any) -> tuple[float, ...]:
    """Return a sort key for the distance of a configuration from the wanted one.

    It compares warps first, then tiles, then stages: the first two by the absolute log2 of the ratio, summed over the
    tiles, the stages by the absolute difference. Of two equally distant ones the smaller comes first.

    Args:
        wanted: Wanted configuration; tiles that it does not name do not count.
        config: Configuration of Triton's autotuner, which must have the named tiles.
    """
    tiles = sum(abs(math.log2(config.kwargs[name] / size)) for name, size in wanted.tiles)
    warps, stages = abs(math.log2(config.num_warps / wanted.warps)), abs(config.num_stages - wanted.stages)
    return (warps, tiles, stages, config.num_warps, *config.kwargs.values(), config.num_stages)
