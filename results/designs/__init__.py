"""Partial designs: which cells of a grid stand for all of it, and what can be told from these. NumPy alone.

Imports nothing of results but options and text; plans, results/stopping and reports may import it.
Start with design_space.py, then design_choice.py for how cells are chosen.
"""
