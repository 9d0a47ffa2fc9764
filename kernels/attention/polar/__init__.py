"""Polar attention: the op, naive references, Triton kernels, and Gluon kernels for Hopper."""
