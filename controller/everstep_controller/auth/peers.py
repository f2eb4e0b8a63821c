"""Identify the peer of a connection by its address, and by its TLS certificate if it shows one."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from everstep.bearer_tokens import Identity, TokenRole

URI_SCHEME = "everstep"
CERTIFICATE_CREDENTIAL = "certificate"
_ROLES = (TokenRole.AGENT, TokenRole.OPERATOR, TokenRole.VIEWER)


class ConnectionPeer:
    """The remote end of one connection: its address, and the identity from a TLS-verified certificate, if any."""

    __slots__ = ("address", "identity")

    def __init__(self, address: str = "", certificate: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self.identity = identity_of(certificate) if certificate else None

    @classmethod
    def from_transport(cls, transport: asyncio.BaseTransport) -> ConnectionPeer:
        """Return the peer of a new connection, after its handshake."""
        name = transport.get_extra_info("peername")
        tls = transport.get_extra_info("ssl_object")
        return cls(str(name[0]) if isinstance(name, tuple) else "", tls.getpeercert() if tls is not None else None)


UNKNOWN_PEER = ConnectionPeer()


def identity_of(certificate: Mapping[str, Any]) -> Identity | None:
    """Return the one ``everstep://ROLE/NAME`` identity in a verified certificate, or None."""
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    found = [identity for uri in uris if (identity := _identity(uri, certificate)) is not None]
    return found[0] if len(found) == 1 else None


def _identity(uri: str, certificate: Mapping[str, Any]) -> Identity | None:
    try:
        parts = urlsplit(uri)
    except ValueError:
        return None
    name = unquote(parts.path[1:])
    if parts.scheme != URI_SCHEME or parts.netloc not in _ROLES or not name or "/" in name or not name.isprintable():
        return None  # an unprintable name could forge log lines, and databases refuse it
    ends_at = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    return Identity(TokenRole(parts.netloc), name, CERTIFICATE_CREDENTIAL, ends_at)
