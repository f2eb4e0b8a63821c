"""Schema migrations by Alembic, over a connection that is already in a transaction."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def config() -> Config:
    """Alembic's configuration; give it the connection under ``attributes["connection"]``."""
    made = Config()
    made.set_main_option("script_location", "controller.store:migrations")
    made.set_main_option("path_separator", "os")
    return made


def upgrade(connection: Connection) -> None:
    """Runs the missing migrations in the connection's transaction."""
    made = config()
    made.attributes["connection"] = connection
    command.upgrade(made, "head")


def head() -> str:
    """The newest migration there is."""
    newest = ScriptDirectory.from_config(config()).get_current_head()
    assert newest is not None
    return newest
