"""Polar attention's heavy kernels for Hopper, in Triton's Gluon."""
