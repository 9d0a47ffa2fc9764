"""PaTH attention: torch, and flash-linear-attention's kernels."""
