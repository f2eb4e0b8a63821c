"""Alembic entry point: runs over the connection, and in the transaction, that ``store.database`` passes to it."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection)
context.run_migrations()
