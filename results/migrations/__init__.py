"""Migrations to the current schema: alembic's env.py, and one file per change in versions/.

This package imports alembic alone; only results/store/upgrading.py runs it. Start at versions/0001_baseline.py;
docs/how-to/add-a-part.md explains how to add one.
"""
