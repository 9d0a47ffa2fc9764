"""Decoding step of the causal convolutions: the ops and their Triton kernels.

Imported by: kernels/row_linear, the model's blocks and layers while they decode.
Start at op.py; kernels/conv has the same over whole texts.
"""
