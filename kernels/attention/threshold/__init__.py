"""Threshold relative attention: the op and its Triton kernels."""
