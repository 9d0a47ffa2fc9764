"""Delta rule with a decay per channel of the keys: torch, and flash-linear-attention's kernels.

Imported by: model/memory/gated_delta.py, sweep/bench.
Start at op.py.
"""
