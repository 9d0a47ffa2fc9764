"""Products of one row with a matrix: the ops and their Triton kernels."""
