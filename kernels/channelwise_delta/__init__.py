"""Delta rule with a retention per channel of the keys: torch, and flash-linear-attention's kernels."""
