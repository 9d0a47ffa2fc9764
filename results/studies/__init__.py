"""Studies: trials that are proposed one after the other, from the results of those before.

Imports results/store; the orchestrator, results/exchange and reports may import it.
Start with search.py for what a grid says, then optuna_study.py and study_store.py.
"""
