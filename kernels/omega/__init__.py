"""Omega memory: the op, a step-by-step reference, custom ops, and Triton kernels."""
