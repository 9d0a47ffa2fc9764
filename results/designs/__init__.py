"""Partial designs: selection of a grid's cells, and the effects that can be estimated from them. Needs NumPy only.

This package imports nothing of results but options and text; plans, results/stopping and reports may import it. Start
with design_space.py, then read design_choice.py for the selection of cells.
"""
