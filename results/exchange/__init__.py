"""Exchange with others: bundles, tables, trackers, and parts of installed packages.

This package imports results/store, results/paper and results/studies; commands and results/shipped may import it. Start
with bundles.py and row_validation.py for the format of a bundle, then read importing.py; trackers/ lists the exporters.
"""
