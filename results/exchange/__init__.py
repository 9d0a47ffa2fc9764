"""Sweeps for other places and programs: bundles out and in, tables, trackers.

Imports results/store, results/paper and results/studies; commands and results/shipped may import it.
Start with bundles.py and row_validation.py for what a bundle is, then importing.py; trackers/ lists the exporters.
"""
