"""Define how a node gets its own credential, and how operators issue, list, revoke and rotate credentials.

``POST /v1/enrol`` needs a join token, the routes below ``/v1/credentials`` an operator's. A token's text is
``es1.ID.SECRET`` (``everstep.bearer_tokens``).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.bearer_tokens import TokenRole
from everstep.ids import JobId, NodeId, TraceId, full_match
from everstep.wire.v1.base import Message, OperatorRequest

CredentialId = Annotated[str, full_match(r"[0-9a-f]{16}")]
SecretHash = Annotated[str, full_match(r"[0-9a-f]{64}")]
"""SHA-256, in hex, of a token's secret part."""
PersonName = Annotated[str, full_match(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}")]
"""A person or a program, as the event log shows it."""
NodePattern = Annotated[str, full_match(r"[A-Za-z0-9.*?_-]{1,128}")]
"""Node names, with ``*`` for any letters and ``?`` for one."""
Note = Annotated[str, msgspec.Meta(max_length=256)]

_YEAR_S = 365 * 86400.0
MAX_LIFETIME_S = 10 * _YEAR_S
MAX_GRACE_S = 30 * 86400.0
MAX_USES = 1_000_000


class Enrol(Message, frozen=True, kw_only=True):
    """A node's request for its own credential, with a join token.

    The agent makes the secret (256 random bits in hex), keeps it and sends only its hash. So no answer carries the
    secret, and after a lost answer the agent asks again: the same hash for the same node gets the same answer.
    """

    node: NodeId
    secret_hash: SecretHash


class Enrolled(Message, frozen=True, kw_only=True):
    """The node's token is ``es1.{credential}.{the agent's secret}``."""

    credential: CredentialId
    node: NodeId


class _IssueRequest(OperatorRequest, frozen=True, kw_only=True, tag_field="role"):
    """Base: ``expires_in_s`` is the credential's lifetime in seconds (None: until revoked), ``note`` is for people."""

    expires_in_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_LIFETIME_S)] | None = None
    note: Note = ""


class IssueAgent(_IssueRequest, frozen=True, kw_only=True, tag="agent"):
    """A credential that speaks for one node."""

    subject: NodeId


class IssueTrainer(_IssueRequest, frozen=True, kw_only=True, tag="trainer"):
    """A credential that reads one job."""

    subject: JobId


class IssueOperator(_IssueRequest, frozen=True, kw_only=True, tag="operator"):
    """A credential that reads and changes everything, under this name."""

    subject: PersonName


class IssueViewer(_IssueRequest, frozen=True, kw_only=True, tag="viewer"):
    """A credential that reads everything but credentials."""

    subject: PersonName


class IssueJoin(_IssueRequest, frozen=True, kw_only=True, tag="join"):
    """A join token: enrols nodes whose names match ``subject``, and does nothing else.

    Attributes:
        uses: Number of nodes; None: any.
        replace: A node that is enrolled already may enrol again, which revokes its previous credential.
    """

    subject: NodePattern = "*"
    uses: Annotated[int, msgspec.Meta(ge=1, le=MAX_USES)] | None = 1
    replace: bool = False


IssueRequest = IssueAgent | IssueTrainer | IssueOperator | IssueViewer | IssueJoin


class Credential(Message, frozen=True, kw_only=True):
    """A credential, without its secret.

    Attributes:
        created_by: The operator who issued it, or ``join:ID`` of the join token used to enrol.
        uses_left: Of a join token; None: any number.
        replace: Of a join token.
    """

    id: CredentialId
    role: TokenRole
    subject: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    uses_left: int | None = None
    replace: bool = False
    note: str = ""


class Issued(Message, frozen=True, kw_only=True):
    """A new credential; ``token`` is shown only here. ``trace`` finds it in the event log."""

    credential: Credential
    token: str
    trace: TraceId


class CredentialList(Message, frozen=True, kw_only=True):
    """Live credentials and recently ended ones, oldest first; ``next`` is the ``cursor`` of the next page."""

    credentials: tuple[Credential, ...]
    next: str = ""


class Rotate(OperatorRequest, frozen=True, kw_only=True):
    """Issue a second credential for the same subject; the first lives for ``grace_s`` seconds more."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_S)] = 3600.0
