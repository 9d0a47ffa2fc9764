"""PaTH attention: torch, and flash-linear-attention's kernels.

Imported by: model/mixers/path.py.
Start at op.py.
"""
