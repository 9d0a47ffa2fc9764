"""Partial designs: which cells of a grid stand for all of it, and what can be told from these. NumPy alone."""
