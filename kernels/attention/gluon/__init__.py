"""Polar attention's heavy kernels and forgetting attention's forward for Hopper, in Triton's Gluon."""
