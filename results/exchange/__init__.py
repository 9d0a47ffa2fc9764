"""Exchange with others: bundles, tables for other programs, exporters to trackers, parts of installed packages.

This package imports results/store, results/paper and results/studies; commands and results/shipped may import it. Start
with bundles.py and row_validation.py for the format of a bundle, then read importing.py; trackers/ lists the exporters.
"""
