"""Statistics of a sweep: effects, significance, run-to-run noise, claims of papers, audits and study analyses.

Imported by: tables, figures, the dashboard and the root modules of reports.
Start at effects/effects.py; docs/explanation/statistics.md has the methods.
"""
