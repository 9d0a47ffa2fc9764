"""Linear layers with 8-bit products: the ops, casts of rows, and their Triton kernels.

Imported by: model/backbone.py, model/layers.py, sweep/bench.
Start at op.py; rows.py casts a gradient in the kernel that computes it.
"""
