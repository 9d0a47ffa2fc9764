"""Every kernel is compiled for a Hopper GPU, which need not be there: the interpreter lets pass what the compiler refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import long_form

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "helpers" / "compiled.py"
KERNELS = {
    "softmax": {"_forward", "_row_products", "_dq", "_dkv"},
    "polar": {"_forward", "_rows", "_dq", "_dkv"},
    "polar_on_hopper": {"_forward", "_rows", "_dq", "_dkv"},
    "forgetting": {"_sums", "_forward", "_row_products", "_dq", "_dkv", "_sums_from_the_end"},
    "threshold": {"_forward", "_row_products", "_dq", "_count", "_dkv"},
    "wall": {"_gate", "_edges", "_forward", "_row_products", "_dkv", "_dq", "_later", "_ungate"},
    "gated_delta": {"_inverse", "_scan", "_readout", "_scan_back", "_pair_gradients", "_key_gradients", "_sum_heads"},
    "omega": {
        "_scan",
        "_readout",
        "_scan_back",
        "_orthogonal_scan",
        "_orthogonal_scan_back",
        "_gradients",
        "_over_chunks",
    },
    "convolutions": {"_gated_forward", "_gated_backward", "_canon_forward", "_canon_backward"},
    "cross_entropy": {"_capped_rows"},
    "sketch": {"_forward", "_squares", "_backward"},
    "steps": {"_ranges", "_merge", "_put", "_step", "_conv", "_heads"},
    "row_products": {"_one", "_several", "_one_conv", "_several_conv"},
}

SHORT = [op for op in KERNELS if op not in ("polar_on_hopper", "gated_delta")]
"""Those two take half a minute, and have not changed for long."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "form"),
    [*((op, "short") for op in SHORT), *long_form(*((op, form) for op in KERNELS for form in ("short", "long")))],
)
def test_the_compiler_takes_every_kernel(op: str, form: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, op, form],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == KERNELS[op]
