"""One decoding step of the causal convolutions: the ops and their Triton kernels."""
