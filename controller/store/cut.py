"""Breaking off what hangs in a database's driver."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from sqlalchemy import Connection


def cut(connection: Connection) -> None:
    """Ends a connection under the thread that waits on it. Any thread may call this."""
    with contextlib.suppress(Exception):  # it may be closing, or closed, in its own thread at this moment
        driver: Any = connection.connection.dbapi_connection
        if connection.dialect.name == "sqlite":
            driver.interrupt()
            return
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
