"""What a controller answers while another one leads: that it is there, and who to ask instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.types import Receive, Scope, Send

from controller.api import asgi, problems
from controller.api.auth import Gate
from controller.api.peers import SCOPE_KEY
from controller.api.routes import PLAIN
from controller.config import ControllerSettings
from controller.credentials import Credentials
from controller.lease import NotLeading
from controller.secret_file import Keyring
from controller.store.records import CredentialRow
from everstep import __version__
from everstep.clock import Clock
from everstep.errors import EverstepError

LEADER_HEADER = b"everstep-leader"


class Standby:
    """An ASGI application. It keeps no connection open, so that everybody is at the leader's port soon.

    Args:
        leader: the leader's address as far as it is known, else empty.
    """

    def __init__(self, settings: ControllerSettings, keyring: Keyring, clock: Clock, leader: Callable[[], str]) -> None:
        self._settings = settings
        self._keyring = keyring
        self._clock = clock
        self._leader = leader
        self._gate = self._gate_of(())
        registry = self._registry = CollectorRegistry()
        Gauge("everstep_controller_info", "The program.", ["version"], registry=registry).labels(__version__).set(1)
        Gauge("everstep_controller_leader", "1 where this controller leads.", registry=registry).set(0)

    def admit(self, credentials: Iterable[CredentialRow]) -> None:
        """Stored credentials as they are now: who may read the metrics."""
        self._gate = self._gate_of(credentials)

    def _gate_of(self, credentials: Iterable[CredentialRow]) -> Gate:
        return Gate.of(self._settings, self._keyring, Credentials(credentials), {}, self._clock, self._clock.wall)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        try:
            if path == "/healthz":
                await asgi.answer(send, b'{"ok":true,"role":"standby"}')
            elif path == "/readyz":
                body = msgspec.json.encode({"ok": False, "role": "standby", "leader": self._leader()})
                await asgi.answer(send, body, 503)
            elif path == "/metrics":
                self._gate.admit(PLAIN["metrics"].access, scope["headers"], scope.get(SCOPE_KEY))
                text = CONTENT_TYPE_LATEST.encode()
                await asgi.answer(send, generate_latest(self._registry), media_type=text)
            else:
                raise self.refusal()
        except NotLeading as error:
            await _refuse(send, error)
        except EverstepError as error:
            await asgi.refuse(send, error)

    def refusal(self) -> NotLeading:
        """What whoever wants a leader is told."""
        leader = self._leader()
        where = f"ask {leader}" if leader else "which one does is being settled: ask again"
        return NotLeading(f"this controller stands by, another one leads: {where}", leader)


async def _refuse(send: Send, error: NotLeading) -> None:
    """The problem with one field more, and a header that says the same to who reads no bodies."""
    said = msgspec.json.decode(problems.problem_of(error))
    headers = [*asgi.error_headers(error), (b"connection", b"close")]
    said["role"] = "standby"
    if error.leader:
        said["leader"] = error.leader
        headers.append((LEADER_HEADER, error.leader.encode()))
    await asgi.answer(send, msgspec.json.encode(said), error.status, headers, problems.MEDIA_TYPE.encode())
