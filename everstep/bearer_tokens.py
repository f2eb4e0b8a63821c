"""Mint, parse and verify bearer tokens, which have four forms.

========================  ==========================================================================================
``role:subject:mac``      minted from the fleet's secret (HMAC-SHA256), without a table; for a private controller,
                          tests, and the first operator of a fleet
``es1.id.secret``         a stored credential: 256 bits, of which the controller keeps the SHA-256; can be listed,
                          expire, and be revoked and rotated individually
``job.job.mac``           a job's trainers: HMAC-SHA256 of a fixed text under the job's own secret
``login.claims.mac``      a person's login on the web page: role, name and end under the fleet's secret, without a table
========================  ==========================================================================================

Give an agent only its own token: any holder of the fleet's secret can mint any token of the first form.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from everstep.errors import AuthenticationError, ConfigurationError

MINIMUM_SECRET_BYTES = 16
STORED_PREFIX = "es1."
JOB_PREFIX = "job."
LOGIN_PREFIX = "login."
_JOB_TEXT = b"everstep/1 a token of this job's trainers"


class TokenRole(StrEnum):
    """The rights of a bearer. AGENT: speak for its own node. TRAINER: read its own job. OPERATOR: read and change.
    VIEWER: read. JOIN: enrol a node, nothing else."""

    AGENT = "agent"
    TRAINER = "trainer"
    OPERATOR = "operator"
    VIEWER = "viewer"
    JOIN = "join"


MINTABLE_ROLES = (TokenRole.AGENT, TokenRole.OPERATOR, TokenRole.VIEWER)
"""Roles that the fleet's secret can mint: a join token is always stored, and a trainer's comes from its job."""


class Identity(msgspec.Struct, frozen=True):
    """The identity that a verified token proves."""

    role: TokenRole
    subject: str  # a node, a job, or a pattern of node names, by role; otherwise the name of a person or program
    credential: str = ""  # id of a stored one, fingerprint of the fleet's secret, or ``certificate``; if asked for
    ends_at: float = math.inf  # wall seconds, of a certificate (``notAfter``) or a login; stored ones are looked up


def looks_like_token(text: str) -> bool:
    """Return whether a file's text may be a token: one ASCII word, and not a key, several secrets or an HTML page."""
    return text.isascii() and text.isprintable() and bool(text) and " " not in text


def _mac(secret: bytes, role: str, subject: str) -> str:
    return hmac.new(secret, f"everstep/1\0{role}\0{subject}".encode(), hashlib.sha256).hexdigest()


def epoch_proof(secret: bytes, epoch: int) -> str:
    """Return the proof that a controller with this secret has led in ``epoch``. No token's role has this name."""
    return _mac(secret, "epoch", str(epoch))


def is_epoch_proof(secrets: Iterable[bytes], epoch: int, proof: str) -> bool:
    """Return whether ``proof`` was made for ``epoch`` under one of the secrets."""
    return any(hmac.compare_digest(proof.encode(), epoch_proof(secret, epoch).encode()) for secret in secrets)


def check_secret(secret: bytes) -> bytes:
    """Return ``secret``. Raises ConfigurationError if it is too short to be safe."""
    if len(secret) < MINIMUM_SECRET_BYTES:
        raise ConfigurationError(
            f"the fleet secret has {len(secret)} bytes, and needs {MINIMUM_SECRET_BYTES}: "
            "make one with `openssl rand -hex 32 > secret`"
        )
    return secret


def split_secrets(content: bytes) -> tuple[bytes, ...]:
    """Return the secrets in a file, one per line: the first mints, all verify. Raises ConfigurationError."""
    lines = tuple(line for line in (line.strip() for line in content.split(b"\n")) if line)
    return tuple(check_secret(line) for line in lines or (b"",))


def mint(secret: bytes, role: TokenRole, subject: str) -> str:
    """Return a token for ``subject`` in ``role``. Raises ValueError if there can be none."""
    if role not in MINTABLE_ROLES:
        raise ValueError(
            f"a {role} token is not minted from the fleet's secret: use one of {', '.join(MINTABLE_ROLES)}"
        )
    if ":" in subject or not subject:
        raise ValueError(f"{subject!r} cannot be a token's subject: it must not be empty or contain a colon")
    return f"{role}:{subject}:{_mac(check_secret(secret), role, subject)}"


def verify_with_secret(secrets: Iterable[bytes], token: str) -> tuple[Identity, bytes]:
    """Return the identity of a minted ``token`` and the secret it was minted under. Raises AuthenticationError."""
    role, _, rest = token.partition(":")
    subject, _, mac = rest.rpartition(":")
    given = mac.encode()
    matching = [secret for secret in secrets if hmac.compare_digest(given, _mac(secret, role, subject).encode())]
    if not subject or not matching:
        raise AuthenticationError(
            "the token does not verify: it was minted under another secret, or is damaged; mint it again with "
            "`everstep-controller token` and the controller's secret file"
        )
    try:
        return Identity(TokenRole(role), subject), matching[0]
    except ValueError:
        raise AuthenticationError(f"the token's role {role!r} is not known here") from None


class _LoginClaims(msgspec.Struct, frozen=True):
    role: TokenRole
    subject: str
    ends_at: float


def mint_login(secret: bytes, role: TokenRole, subject: str, ends_at: float) -> str:
    """Return a token for a person who has logged in, valid until ``ends_at`` (wall seconds)."""
    claims = urlsafe_b64encode(msgspec.json.encode(_LoginClaims(role, subject, ends_at))).decode().rstrip("=")
    return f"{LOGIN_PREFIX}{claims}.{_mac(check_secret(secret), 'login', claims)}"


def verify_login(secrets: Iterable[bytes], token: str) -> tuple[Identity, bytes]:
    """Return the identity of a login's token, whose end is not checked, and the secret it was minted under. Raises
    AuthenticationError."""
    claims, _, mac = token[len(LOGIN_PREFIX) :].rpartition(".")
    given = mac.encode()
    matching = [secret for secret in secrets if hmac.compare_digest(given, _mac(secret, "login", claims).encode())]
    if not matching:
        raise AuthenticationError("the token does not verify: log in again")
    found = msgspec.json.decode(urlsafe_b64decode(claims + "=" * (-len(claims) % 4)), type=_LoginClaims)
    return Identity(found.role, found.subject, ends_at=found.ends_at), matching[0]


def login_proof(secret: bytes, purpose: str, login: str) -> str:
    """Return a text for one purpose of one login in progress, 64 characters that only holders of the secret can tell.
    No token's role has this name."""
    return _mac(secret, f"login-{purpose}", login)


def job_token(job: str, secret: str) -> str:
    """Return the token of a job's trainers; ``secret`` is ``GenerationSpec.secret``."""
    return f"{JOB_PREFIX}{job}.{hmac.new(secret.encode(), _JOB_TEXT, hashlib.sha256).hexdigest()}"


def claimed_job(token: str) -> str:
    """Return the job that a token of the third form names, without proof."""
    return token[len(JOB_PREFIX) :].rpartition(".")[0]


def stored_token(id: str, secret: str) -> str:
    """Return the text of a stored credential's token."""
    return f"{STORED_PREFIX}{id}.{secret}"


def split_stored(token: str) -> tuple[str, str]:
    """Return id and secret of a stored credential's token; both are empty for other tokens."""
    prefix, _, rest = token.partition(".")
    id, dot, secret = rest.partition(".")
    return (id, secret) if f"{prefix}." == STORED_PREFIX and dot else ("", "")


def hash_secret(secret: str) -> str:
    """Return the SHA-256 in hex of a stored credential's secret, which is all that is kept; 256 bits need no salt."""
    return hashlib.sha256(secret.encode()).hexdigest()
