"""How many connections this process holds, against how many file descriptors it may have."""

from __future__ import annotations

import resource
import ssl
from asyncio import BaseTransport
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from everstep.bearer_tokens import Identity, TokenRole

RESERVED = 256
"""File descriptors kept for everything that is no agent's connection: the database, logs, libraries, operators."""
SCARCE_SHARE = 0.75
"""Of the descriptors, from which on agents whose nodes no job waits for hang up between beats."""
CROWDED_SHARE = 0.8
"""From which on a connection that comes makes others leave. Above the share from which on new ones are not held, or a
fleet that stands there with all it has open would lose two sessions to each beat, and open each again for the next."""
EXHAUSTED_SHARE = 0.85
"""From which on all agents hang up: better that directives come with the next beat than that an agent is refused. Of a
fleet of a million GPUs that beats every 20 s, thousands of connections are on their way in a bad half second."""


CLOSE_PER_CONNECTION = 2
"""Sessions that are let go for each new connection then: more leave than come."""
SCAN_PER_CONNECTION = 8
"""Sessions that are looked at for that: where all are needed, a connection costs no more than this."""


class ClosableSession(Protocol):
    """A session, as far as its descriptor is concerned."""

    def request_close(self) -> bool:
        """Asks the agent to hang up, where the session can be done without. Returns whether it was asked."""


class DescriptorBudget:
    """Counts connections, and asks those to leave that are needed least.

    A fleet has more agents than a process may have files: when thousands of them have news in the same moment (their
    jobs start, a switch fails), those that only wait for their next beat make room.

    Args:
        limit: connections that may be open at once; further ones are closed on arrival.
    """

    __slots__ = ("_sessions", "crowded_from", "exhausted_from", "limit", "open", "scarce_from")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.scarce_from = round(limit * SCARCE_SHARE)
        self.crowded_from = round(limit * CROWDED_SHARE)
        self.exhausted_from = round(limit * EXHAUSTED_SHARE)
        self._sessions: OrderedDict[ClosableSession, None] = OrderedDict()

    @property
    def is_scarce(self) -> bool:
        return self.open >= self.scarce_from

    @property
    def is_exhausted(self) -> bool:
        return self.open >= self.exhausted_from

    @property
    def is_over_limit(self) -> bool:
        """Whether no further connection may be taken."""
        return self.open > self.limit

    def add(self, session: ClosableSession) -> None:
        """A session was opened."""
        self._sessions[session] = None

    def remove(self, session: ClosableSession) -> None:
        """It has ended."""
        self._sessions.pop(session, None)

    def make_room(self) -> None:
        """A connection has come: where they crowd, lets others go, those first that were opened first."""
        if self.open < self.crowded_from:
            return
        left = CLOSE_PER_CONNECTION
        for _ in range(min(SCAN_PER_CONNECTION, len(self._sessions))):
            session, _ = self._sessions.popitem(last=False)
            if not session.request_close():
                self._sessions[session] = None
            elif not (left := left - 1):
                return


@cache
def process_descriptors() -> DescriptorBudget:
    """The process's own: as many as its limit leaves, when this is first asked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DescriptorBudget(max(soft - RESERVED, soft // 2))


# ---- peers
# The other end of a connection: its address, and who its certificate says it is.

SCOPE_KEY = "everstep.peer"
"""Where the server's protocol puts the connection's ``Peer`` into each request's ASGI scope."""
HANG_UP_KEY = "everstep.hang_up"
"""Where it puts what ends the connection at once, with all that was not taken: a function without arguments."""
REST_KEY = "everstep.rest"
"""Where it puts what keeps it from reading further requests for so many seconds: a function of these."""
URI_SCHEME = "everstep"
CERTIFICATE_CREDENTIAL = "certificate"
_ROLES = (TokenRole.AGENT, TokenRole.OPERATOR, TokenRole.VIEWER)


class ConnectionPeer:
    """One connection's other end. Make it once per connection.

    Attributes:
        address: its IP address; empty where there is none.
        identity: who its certificate, which TLS has verified, speaks for; None where there is none, or none of ours.
    """

    __slots__ = ("address", "identity")

    def __init__(self, address: str = "", certificate: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self.identity = identity_of(certificate) if certificate else None

    @classmethod
    def from_transport(cls, transport: BaseTransport) -> ConnectionPeer:
        """Of a connection that has just been made (its handshake done)."""
        name = transport.get_extra_info("peername")
        tls = transport.get_extra_info("ssl_object")
        return cls(str(name[0]) if isinstance(name, tuple) else "", tls.getpeercert() if tls is not None else None)


UNKNOWN_PEER = ConnectionPeer()


def identity_of(certificate: Mapping[str, Any]) -> Identity | None:
    """Who a verified certificate (as ``ssl.SSLObject.getpeercert`` shows it) speaks for, until it ends.

    It is named by one URI among its subject's alternative names: ``everstep://agent/NODE``,
    ``everstep://operator/NAME``
    or ``everstep://viewer/NAME``. None where there is no such name, or more than one.
    """
    found = [
        identity
        for kind, value in certificate.get("subjectAltName", ())
        if kind == "URI" and (identity := _identity(value, certificate)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _identity(uri: str, certificate: Mapping[str, Any]) -> Identity | None:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    name = unquote(parts.path[1:])
    if parts.scheme != URI_SCHEME or parts.netloc not in _ROLES or not name or "/" in name or not name.isprintable():
        return None  # of what is not printable a log would be forged, and a database refuse it
    ends_at = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    return Identity(TokenRole(parts.netloc), name, CERTIFICATE_CREDENTIAL, ends_at)
