"""Steps to today's schema: alembic's env.py and a file per change in versions/.

Imports alembic alone; only results/store/upgrading.py runs it.
Start at versions/0001_baseline.py; CONTRIBUTING.md, "A migration", says how to add a step.
"""
