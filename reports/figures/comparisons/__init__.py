"""Figures of differences: levels, interactions, seeds, power and trials.

They are imported by way of the registry in figures/__init__.py. Start at effects.py.
"""
