"""Head, soft cap and cross-entropy in one op."""
