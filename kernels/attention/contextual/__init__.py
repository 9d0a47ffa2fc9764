"""Attention with contextual positions (CoPE): the op and its Triton kernels."""
