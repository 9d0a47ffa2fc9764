"""Studies: trials that are proposed one after another, based on the results of earlier ones.

This package imports results/store; the orchestrator, results/exchange and reports may import it. Start with search.py
for the section of a grid, then optuna_study.py and study_store.py.
"""
