"""Depthwise causal convolutions: the ops and their Triton kernels."""
