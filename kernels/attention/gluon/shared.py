"""Device code that the Gluon kernels share: imports, tile order of persistent programs, stages and their barriers."""

from __future__ import annotations

from typing import Any

try:
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_init,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    # 3.6 calls it thread_barrier, 3.7 barrier
    _barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    _missing = None
except (ImportError, AttributeError) as error:
    gluon = gl = mbarrier = tma = fence_async_shared = None
    warpgroup_mma = warpgroup_mma_init = warpgroup_mma_wait = TensorDescriptor = _barrier = None
    _missing = f"this Triton has no Gluon for Hopper: {error}"

TINY = 1e-6
LN2 = 0.6931471805599453
HIDDEN = -1e30
TILE = 128
HALF = 64
FORWARD_STAGES, DQ_STAGES, DKV_STAGES = 2, 4, 3


def _jit(kernel: Any) -> Any:
    return kernel if _missing else gluon.jit(kernel)


if _missing is None:
    _LN2 = tl.constexpr(LN2)
    _TINY = tl.constexpr(TINY)
    _HIDDEN = tl.constexpr(HIDDEN)
    _TILE = tl.constexpr(TILE)
    _HALF = tl.constexpr(HALF)


@_jit
def _num_program_tiles(tiles):
    """Return the number of tiles that this program handles, of `tiles` in all.

    Programs take turns, in odd rounds in reverse order; those that a last round does not reach have one tile less.
    """
    programs = gl.num_programs(0)
    full_rounds = tiles // programs
    at = gl.program_id(0) + (full_rounds % 2) * (programs - 1 - 2 * gl.program_id(0))
    return full_rounds + gl.where(at < tiles - full_rounds * programs, 1, 0)


@_jit
def _tile_of_round(r):
    """Return the index of this program's tile in round r; odd rounds run through the programs backwards."""
    programs = gl.num_programs(0)
    return r * programs + gl.program_id(0) + (r % 2) * (programs - 1 - 2 * gl.program_id(0))


@_jit
def _log1p(x):
    return gl.where(x < 1e-3, x * (1.0 - x * (0.5 - x * 0.33333334)), gl.log(1.0 + x))


@_jit
def _tanh(x):
    # for small x >= 0 the fraction would lose digits
    square = x * x
    e = gl.exp(-2.0 * x)
    return gl.where(x < 0.05, x * (1.0 - square * (0.33333334 - square * 0.13333334)), (1.0 - e) / (1.0 + e))


@_jit
def _release_stages(full, empty, steps, count, STAGES: gl.constexpr):
    """Release `count` stages unread and return the new step count.

    The stages hold blocks that only the other warpgroup needs. Waits until each is filled before it is released.

    Args:
        full: mbarriers that signal a filled stage.
        empty: mbarriers that signal a free stage.
        steps: Stages consumed so far.
        count: Stages to release; none for a count of 0.
        STAGES: constexpr, number of stages.
    """
    for _ in range(count):
        # arriving before the stage is full could count for its previous round
        mbarrier.wait(full.index(steps % STAGES), (steps // STAGES) & 1)
        mbarrier.arrive(empty.index(steps % STAGES))
        steps += 1
    return steps


@_jit
def _barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return (full, empty): initialised mbarriers of STAGES stages, with one writer and READERS readers each."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty
