"""Attention of one new token per text over keys and values in pages: the ops and their Triton kernels."""
