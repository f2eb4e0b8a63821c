"""The other end of a connection: its address, and who its certificate says it is."""

from __future__ import annotations

import ssl
from asyncio import BaseTransport
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from everstep.tokens import Identity, TokenRole

SCOPE_KEY = "everstep.peer"
"""Where the server's protocol puts the connection's ``Peer`` into each request's ASGI scope."""
HANG_UP_KEY = "everstep.hang_up"
"""Where it puts what ends the connection at once, with all that was not taken: a function without arguments."""
REST_KEY = "everstep.rest"
"""Where it puts what keeps it from reading further requests for so many seconds: a function of these."""
SCHEME = "everstep"
BY_CERTIFICATE = "certificate"
_ROLES = (TokenRole.AGENT, TokenRole.OPERATOR, TokenRole.VIEWER)


class Peer:
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
    def of(cls, transport: BaseTransport) -> Peer:
        """Of a connection that has just been made (its handshake done)."""
        name = transport.get_extra_info("peername")
        tls = transport.get_extra_info("ssl_object")
        return cls(str(name[0]) if isinstance(name, tuple) else "", tls.getpeercert() if tls is not None else None)


NOBODY = Peer()


def identity_of(certificate: Mapping[str, Any]) -> Identity | None:
    """Who a verified certificate (as ``ssl.SSLObject.getpeercert`` shows it) speaks for, until it ends.

    It is named by one URI among its subject's alternative names: ``everstep://agent/NODE``, ``everstep://operator/NAME``
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
    if parts.scheme != SCHEME or parts.netloc not in _ROLES or not name or "/" in name or not name.isprintable():
        return None  # of what is not printable a log would be forged, and a database refuse it
    ends_at = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    return Identity(TokenRole(parts.netloc), name, BY_CERTIFICATE, ends_at)
