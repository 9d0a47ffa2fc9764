"""Migrations, oldest first.

Each file stands alone: it never imports the models, which move on; nothing imports it but alembic.
Start at 0001_baseline.py.
"""
