"""Effects of levels from matched pairs, from partial designs by least squares, and of declared contrasts.

Imported by: the rest of stats, tables, figures and the dashboard.
Start at effects.py, whose rows are the classes of effect_types.py.
"""
