"""Bearer tokens that need no table: ``role:subject:mac``, where mac is HMAC-SHA256 under the fleet's secret.

A controller verifies with the secret alone, so tokens survive its restart and work at every controller. An agent
should be given its own token only; whoever holds the secret can mint any.
"""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum

import msgspec

from everstep.errors import AuthenticationError, ConfigurationError

MINIMUM_SECRET_BYTES = 16


class TokenRole(StrEnum):
    """What a bearer may do: an agent speaks for its own node, an operator changes, a viewer reads."""

    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"


class Identity(msgspec.Struct, frozen=True):
    """Who a verified token speaks for: a node's id for agents, a person's or program's name otherwise."""

    role: TokenRole
    subject: str


def _mac(secret: bytes, role: str, subject: str) -> str:
    return hmac.new(secret, f"everstep/1\0{role}\0{subject}".encode(), hashlib.sha256).hexdigest()


def check_secret(secret: bytes) -> bytes:
    """Returns ``secret``. Raises ConfigurationError where it is too short to hold."""
    if len(secret) < MINIMUM_SECRET_BYTES:
        raise ConfigurationError(
            f"the fleet secret has {len(secret)} bytes, and needs {MINIMUM_SECRET_BYTES}: "
            "make one with `openssl rand -hex 32 > secret`"
        )
    return secret


def mint(secret: bytes, role: TokenRole, subject: str) -> str:
    """A token for ``subject`` in ``role``."""
    if ":" in subject or not subject:
        raise ValueError(f"{subject!r} cannot be a token's subject: it must not be empty or contain a colon")
    return f"{role}:{subject}:{_mac(check_secret(secret), role, subject)}"


def verify(secret: bytes, token: str) -> Identity:
    """Who ``token`` speaks for. Raises AuthenticationError where it does not verify."""
    role, _, rest = token.partition(":")
    subject, _, mac = rest.rpartition(":")
    if not subject or not hmac.compare_digest(mac.encode(), _mac(secret, role, subject).encode()):
        raise AuthenticationError(
            "the token does not verify: it was minted under another secret, or is damaged; mint it again with "
            "`everstep-controller token` and the controller's secret file"
        )
    try:
        return Identity(TokenRole(role), subject)
    except ValueError:
        raise AuthenticationError(f"the token's role {role!r} is not known here") from None
