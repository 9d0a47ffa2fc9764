"""When further seeds are enough: rules that a grid states, looks at what is there so far, and the levels that keep them honest.

Imports results/store and results/designs; the orchestrator and reports may import it.
Start with stopping_rule.py, then interim_analysis.py.
"""
