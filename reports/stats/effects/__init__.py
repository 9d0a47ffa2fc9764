"""Effects of levels by matched pairs, of partial designs by least squares, and of declared contrasts.

Imported by: the rest of stats, tables, figures and the dashboard.
Start at effects.py, whose rows are those of effect_types.py.
"""
