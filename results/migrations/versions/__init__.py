"""Migrations of the database, oldest first.

Each file is independent: it never imports the models, which change later, and only alembic imports it. Start at
0001_baseline.py.
"""
