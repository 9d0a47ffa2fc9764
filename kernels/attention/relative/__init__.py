"""Attention with a learned relative bias: the op and its Triton kernels."""
