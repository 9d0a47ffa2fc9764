"""Every kernel is compiled for a Hopper GPU, which need not be there: the interpreter lets pass what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import long_form

pytest.importorskip("triton", reason="needs Triton: pip install -e '.[train]', on Linux x86-64")

SCRIPT = Path(__file__).parents[1] / "testing" / "compiled.py"
KERNELS = {
    "softmax": "_forward _row_products _dq _dkv",
    "polar": "_forward _rows _dq _dkv",
    "polar_on_hopper": "_forward _rows _dq _dkv",
    "forgetting": "_prefix_sums _forward _row_products _dq _dkv _suffix_sums",
    "forgetting_on_hopper": "_prefix_sums _forgetting_forward",
    "threshold": "_forward _row_products _dq _count _dkv",
    "contextual": "_forward _row_products _dq _dkv",
    "relative": "_forward _row_products _dq _dkv",
    "polysketch": "_half_sketches _block_sums _scan _forward _row_products _dq _dkv",
    "wall": "_gate _edges _forward _row_products _dkv _dq _suffix_sums _ungate",
    "wall_on_hopper": "_gate _edges _wall_forward",
    "gated_delta": "_inverse _scan_states _readout _scan_states_backward _pair_gradients _key_gradients _sum_heads",
    "gated_delta_fla": (
        "l2norm_fwd_kernel l2norm_bwd_kernel chunk_local_cumsum_scalar_kernel "
        "chunk_gated_delta_rule_fwd_kkt_solve_kernel recompute_w_u_fwd_kernel prepare_wy_repr_bwd_kernel "
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64 chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64 "
        "chunk_fwd_kernel_o chunk_bwd_kernel_dv_local chunk_bwd_kernel_dqkwg"
    ),
    "channelwise_fla": (
        "chunk_local_cumsum_vector_kernel chunk_kda_fwd_kernel_intra_token_parallel "
        "chunk_kda_fwd_kernel_inter_solve_fused chunk_kda_bwd_kernel_intra recompute_w_u_fwd_kda_kernel "
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64 chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64 "
        "chunk_gla_fwd_kernel_o chunk_kda_bwd_kernel_dAv chunk_kda_bwd_kernel_wy_dqkg_fused"
    ),
    "path_fla": (
        "chunk_scaled_dot_kkt_fwd_kernel merge_16x16_to_64x64_inverse_kernel intra_chunk_preprocess_fwd_kernel "
        "parallel_path_fwd_kernel parallel_attn_bwd_kernel_preprocess chunk_transform_qk_bwd_kernel_prepare "
        "chunk_cumprod_householder_fwd_kernel transform_q_fwd_kernel parallel_path_bwd_dkv_kernel "
        "parallel_path_bwd_dq_kernel chunk_cumprod_householder_bwd_kernel parallel_path_bwd_intra_chunk_kernel "
        "intra_chunk_preprocess_bwd_kernel"
    ),
    "omega": "_scan _readout _scan_backward _orthogonal_scan _orthogonal_scan_backward _gradients _sum_over_chunks",
    "convolutions": "_gated_forward _gated_backward _canon_forward _canon_backward",
    "cross_entropy": "_capped_rows",
    "eight_bits": "_cast _gate_backward",
    "sketch": "_forward _squares _backward",
    "steps": "_attend_range merge_ranges _put _step _conv _heads",
    "row_products": "_row_kernel _row_conv_kernel",
}
"""Case of compiled.py -> names of the kernels that it launches."""

LONG = "polar_on_hopper", "gated_delta", "gated_delta_fla", "channelwise_fla", "path_fla", "omega", "wall", "threshold"
"""They take half a minute each, and have not changed for long, or share their code with others."""
SHORT = [op for op in KERNELS if op not in LONG]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "form"),
    [*((op, "short") for op in SHORT), *long_form(*((op, form) for op in KERNELS for form in ("short", "long")))],
)
def test_the_compiler_takes_every_kernel(op: str, form: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, op, form],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == set(KERNELS[op].split())
