"""Benchmarks that print a table and write JSON: whole training steps, and single kernels beside their rivals."""
