"""Gated delta rule: the op, its custom ops, and Triton kernels."""
