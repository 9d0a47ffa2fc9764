"""Statistics of measured numbers: effects, intervals, noise between runs, claims, whether cells may be compared.

Imported by: tables, figures, the dashboard, table_builder.py and best_values.py.
Start at effects/effects.py; docs/statistics.md has the formulas.
"""
