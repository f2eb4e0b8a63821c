"""Alembic's entry: runs over the connection (and inside the transaction) that controller.store.migrate gives it."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection)
context.run_migrations()
