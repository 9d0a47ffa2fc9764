"""How much electricity a GPU's board takes at most."""

from __future__ import annotations

BOARD_WATTS: dict[str, float] = {
    "A100-SXM4-40GB": 400, "A100-SXM4-80GB": 400, "A100-PCIE-40GB": 250, "A100 80GB PCIe": 300,
    "L4": 72, "L40S": 350, "H100 80GB HBM3": 700, "H100 PCIe": 350, "H100 NVL": 400,
    "H200": 700, "H200 NVL": 600, "B200": 1000, "GB200": 1200, "GeForce RTX 4090": 450,
}  # fmt: skip
"""By name as the CUDA driver reports it, "NVIDIA " left out; the datasheets that flops.PEAK_BF16 names."""


def board_watts(gpu_name: str | None) -> float | None:
    """Of a GPU by its driver's name, None for one that is not in the table."""
    return BOARD_WATTS.get((gpu_name or "").removeprefix("NVIDIA "))
