"""Stopping rules for seeds: rules in a grid, interim analyses of the results so far, and corrected significance levels.

This package imports results/store and results/designs; the orchestrator and reports may import it. Start with
stopping_rule.py, then interim_analysis.py.
"""
