"""Forgetting attention: the op, its Triton kernels, and a forward in Gluon for Hopper."""
