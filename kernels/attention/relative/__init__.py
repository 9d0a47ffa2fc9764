"""Attention with a learned relative bias: the op and its Triton kernels.

Imported by: model/mixers/biased.py, sweep/bench.
Start at op.py.
"""
