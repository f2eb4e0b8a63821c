"""Who is asking, and whether they may."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.errors import AuthenticationError, PermissionDenied
from everstep.tokens import Identity, TokenRole, check_secret, verify

_BEARER = b"bearer "


class Gate:
    """Checks bearer tokens against the fleet's secret. Every method raises what the caller should be told."""

    def __init__(self, secret: bytes) -> None:
        self._secret = check_secret(secret)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """Who the request's Authorization header speaks for. Raises AuthenticationError."""
        for name, value in headers:
            if name == b"authorization":
                if value[: len(_BEARER)].lower() != _BEARER:
                    raise AuthenticationError("the Authorization header must be `Bearer TOKEN`")
                return verify(self._secret, value[len(_BEARER) :].strip().decode("latin-1"))
        raise AuthenticationError(
            "no token: send `Authorization: Bearer TOKEN`; `everstep-controller token --role viewer --subject YOU "
            "--secret-file F` prints one"
        )

    def agent(self, headers: Iterable[tuple[bytes, bytes]], node: str) -> Identity:
        """A token that may speak for ``node``: its agent's. Raises AuthenticationError or PermissionDenied."""
        identity = self.identify(headers)
        if identity.role is TokenRole.OPERATOR:
            return identity
        if identity.role is not TokenRole.AGENT:
            raise PermissionDenied(f"a {identity.role} token cannot speak for node {node}: use the node's agent token")
        if identity.subject != node:
            raise PermissionDenied(
                f"this token belongs to node {identity.subject} and cannot speak for node {node}: "
                f"mint one with `everstep-controller token --role agent --subject {node}`"
            )
        return identity

    def reader(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """A viewer or operator. Raises AuthenticationError or PermissionDenied."""
        identity = self.identify(headers)
        if identity.role is TokenRole.AGENT:
            raise PermissionDenied("an agent token reads only its own node's directives: use a viewer token")
        return identity

    def operator(self, headers: Iterable[tuple[bytes, bytes]]) -> Identity:
        """An operator. Raises AuthenticationError or PermissionDenied."""
        identity = self.identify(headers)
        if identity.role is not TokenRole.OPERATOR:
            raise PermissionDenied(f"a {identity.role} token cannot change anything: use an operator token")
        return identity
