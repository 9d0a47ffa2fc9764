"""Effects of partial designs, and of contrasts whose seeds were added one by one.

Imported by: stats/effects.py and the tables of effects alone.
Start at partial_design_effects.py.
"""
