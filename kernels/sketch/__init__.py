"""Projections on a few directions: the op and its Triton kernels."""
