"""Linear layers with 8-bit products: the ops, casts of rows, and their Triton kernels."""
