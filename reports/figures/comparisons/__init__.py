"""The figures of differences: levels, interactions, seeds, power and trials.

Imported by: reached by way of the registry in figures/__init__.py.
Start at effects.py.
"""
