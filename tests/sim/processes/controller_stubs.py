"""Stand-ins for parts of a simulated controller: promises, the session's transport, credentials and metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from everstep.bearer_tokens import Identity
from everstep.errors import EverstepError
from everstep_controller.server.session import AgentSession
from tests.sim.cluster.network import Connection
from tests.sim.cluster.timeline import Timeline


class NoMetrics:
    """Ignore the controller's Prometheus metrics."""

    heartbeats = 0

    def observe_event(self, kind: str, seconds: float) -> None: ...
    def observe_recovery(self, job: str, reason: str, seconds: float) -> None: ...
    def count_reports(self, taken: int, repeated: int) -> None: ...
    def count_refused(self, route: str, code: str) -> None: ...


METRICS: Any = NoMetrics()
"""The metrics of every simulated controller."""


class Promise:
    """Stand in for the future that ``FleetLoop.enqueue`` returns. Callbacks run as soon as the outcome is set."""

    def __init__(self) -> None:
        self._outcome: tuple[Any, EverstepError | None] | None = None
        self._callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def set(self, result: Any, error: EverstepError | None) -> None:
        self._outcome = result, error
        for callback in self._callbacks:
            callback(self)

    def exception(self) -> EverstepError | None:
        assert self._outcome is not None
        return self._outcome[1]

    def result(self) -> Any:
        assert self._outcome is not None
        return self._outcome[0]

    def cancelled(self) -> bool:
        return False


class AdmitAll:
    """Admit every agent. Credentials have their own tests."""

    def charge_frame(self, identity: Identity) -> None: ...

    def check_valid(self, identity: Identity) -> None: ...


class SessionTransport:
    """The controller's end of a connection, as the asyncio transport of the real session."""

    def __init__(self, connection: Connection, timeline: Timeline) -> None:
        self._connection = connection
        self._timeline = timeline
        self.session: AgentSession | None = None

    def write(self, data: bytes) -> None:
        self._connection.send(1, data)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self._connection.send(1, b"".join(parts))

    def close(self) -> None:
        self._connection.close(1)
        self._timeline.after(0.0, self.end_session)

    abort = close

    def end_session(self) -> None:
        """Notify the session that the connection has ended."""
        session, self.session = self.session, None
        if session is not None:
            session.connection_lost(None)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
