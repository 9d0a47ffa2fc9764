"""Decoding step of Wall attention over keys that hold their own decay: the op and its Triton kernel.

Imported by: model/mixers/wall.py while it decodes, sweep/bench.
Start at op.py; kernels/attention/wall has the same over whole texts.
"""
