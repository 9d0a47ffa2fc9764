"""Head, soft cap and cross-entropy in one op, and its Triton kernel."""
