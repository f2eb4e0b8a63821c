"""What stands for asyncio under a simulated controller: promises for futures, a line's end for a transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from everstep_controller.server.session import AgentSession

from everstep.bearer_tokens import Identity
from everstep.errors import EverstepError
from tests.sim.timeline import Timeline
from tests.sim.wires import Line


class NoMetrics:
    """What the shell tells Prometheus goes nowhere."""

    heartbeats = 0

    def observe_event(self, kind: str, seconds: float) -> None: ...
    def observe_recovery(self, job: str, reason: str, seconds: float) -> None: ...
    def count_reports(self, taken: int, repeated: int) -> None: ...
    def count_refused(self, route: str, code: str) -> None: ...


METRICS: Any = NoMetrics()


class Promise:
    """What ``FleetLoop.enqueue`` returns, without an event loop: callbacks run when the outcome is there."""

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


class Gate:
    """Every agent that connects is admitted: who may speak for whom is proved elsewhere (tests/unit/security)."""

    def charge_frame(self, identity: Identity) -> None: ...

    def check_valid(self, identity: Identity) -> None: ...


class Wire:
    """The controller's end of a line, as asyncio's transport; behind it the real session."""

    def __init__(self, line: Line, timeline: Timeline) -> None:
        self._line = line
        self._timeline = timeline
        self.session: AgentSession | None = None

    def write(self, data: bytes) -> None:
        self._line.send(1, data)

    def writelines(self, parts: Sequence[bytes]) -> None:
        self._line.send(1, b"".join(parts))

    def close(self) -> None:
        self._line.close(1)
        self._timeline.after(0.0, self.lost)

    abort = close

    def lost(self) -> None:
        """The connection has ended, from whichever side."""
        session, self.session = self.session, None
        if session is not None:
            session.connection_lost(None)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
