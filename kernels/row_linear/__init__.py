"""Products of one row with a matrix, for decoding a single text: the ops and their Triton kernels.

Imported by: the model's backbone, blocks and layers while they decode, sweep/bench.
Start at op.py.
"""
