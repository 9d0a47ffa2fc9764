"""Softmax attention: the op, and the Triton kernels that polar and forgetting attention build on."""
