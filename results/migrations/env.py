"""Alembic's environment script. The caller passes an open connection in a transaction, and the metadata."""

from __future__ import annotations

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=attributes["metadata"],
    render_as_batch=True,  # SQLite cannot alter most of a table in place
    compare_type=True,
    compare_server_default=True,
)
with context.begin_transaction():
    context.run_migrations()
