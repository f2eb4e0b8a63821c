"""Schema migrations by Alembic, over a connection that is already in a transaction."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "controller.store:migrations")
    config.set_main_option("path_separator", "os")
    return config


def upgrade(connection: Connection) -> None:
    """Runs the missing migrations in the connection's transaction."""
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def head() -> str:
    """The newest migration there is."""
    newest = ScriptDirectory.from_config(_config()).get_current_head()
    assert newest is not None
    return newest
