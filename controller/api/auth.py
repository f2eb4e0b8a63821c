"""Who is asking, and whether they may."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from controller.api.limits import FailedAuthentications, RequestLimits
from controller.api.peers import BY_CERTIFICATE, NOBODY, Peer
from controller.api.routes import Access
from controller.config import ControllerSettings
from controller.core.membership import ENDED
from controller.core.records import JobRecord
from controller.credentials import Credentials
from controller.secret_file import Keyring
from everstep.clock import Clock
from everstep.errors import AuthenticationError, PermissionDenied
from everstep.tokens import JOB_PREFIX, STORED_PREFIX, Identity, TokenRole, hash_secret, job_of, job_token

Headers = Iterable[tuple[bytes, bytes]]

MOST_REMEMBERED = 1 << 18
"""Verified tokens that are remembered: more than the nodes of a million GPUs, whose agents may all hang up between
beats and come with their token again. Some 0.4 KiB each."""
LONGEST_TOKEN = 512
_BEARER = b"bearer "
_BY_JOB = "job-"

MAY = MappingProxyType(
    {
        Access.AGENT: frozenset({TokenRole.AGENT}),
        Access.READ: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR}),
        Access.JOB: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.TRAINER}),
        Access.CHANGE: frozenset({TokenRole.OPERATOR}),
        Access.JOIN: frozenset({TokenRole.JOIN}),
    }
)
"""Which roles each kind of route is for. An agent must be the route's node besides, a trainer of the route's job."""


class Gate:
    """Knows a request's sender by token or certificate, and refuses what is not theirs to ask.

    Every method raises what the caller should be told: AuthenticationError, PermissionDenied, RateLimited. A token
    that was verified is remembered until it dies, so that the next request with it costs a look in a dictionary. (The
    look is not in constant time, but by a hash keyed per process: to time it one would need the token.)

    Args:
        keyring: the fleet's secrets, for minted tokens.
        credentials: the stored ones.
        job_secret: a job's secret, for its trainers' tokens; None where there is no such job, or it is over.
        now: wall seconds by which credentials expire.
    """

    def __init__(
        self,
        keyring: Keyring,
        *,
        credentials: Credentials,
        job_secret: Callable[[str], str | None],
        limits: RequestLimits,
        failures: FailedAuthentications,
        clock: Clock,
        now: Callable[[], float],
    ) -> None:
        self._keyring = keyring
        self._credentials = credentials
        self._job_secret = job_secret
        self._limits = limits
        self._failures = failures
        self._clock = clock
        self._now = now
        self._known: dict[bytes, tuple[Identity, float]] = {}
        self._keyring_changes = keyring.changes
        credentials.on_death = self._known.clear

    @classmethod
    def of(
        cls,
        settings: ControllerSettings,
        keyring: Keyring,
        credentials: Credentials,
        jobs: Mapping[str, JobRecord],
        clock: Clock,
        now: Callable[[], float],
    ) -> Gate:
        """As the settings limit it, for these jobs."""
        burst_s = settings.request_burst_s
        return cls(
            keyring,
            credentials=credentials,
            job_secret=lambda job: jobs[job].secret if job in jobs and jobs[job].state not in ENDED else None,
            limits=RequestLimits(
                agents_per_s=settings.agent_requests_per_s,
                reports_per_s=settings.agent_reports_per_s,
                others_per_s=settings.requests_per_s,
                burst_s=burst_s,
                monotonic=clock.monotonic,
            ),
            failures=FailedAuthentications(
                per_s=settings.failed_authentications_per_s, burst_s=burst_s, monotonic=clock.monotonic
            ),
            clock=clock,
            now=now,
        )

    # --- what routes ask -----------------------------------------------------------------------------------------

    def admit(
        self, access: Access, headers: Headers, peer: Peer | None = None, *, node: str = "", job: str = ""
    ) -> Identity:
        """Who asks for a route of this kind; ``node`` and ``job`` are what it is about. Counts the request."""
        identity = self.identify(headers, peer or NOBODY)
        self._limits.charge(identity)
        _check(access, identity, node, job)
        return identity

    def agent(self, headers: Headers, node: str, peer: Peer | None = None) -> Identity:
        """The agent of ``node``, and nobody else."""
        return self.admit(Access.AGENT, headers, peer, node=node)

    def reports(self, node: str, count: int) -> None:
        """Counts what a node reports at a time. Raises RateLimited."""
        self._limits.charge_reports(node, count)

    def again(self, identity: Identity) -> None:
        """For each further frame of a session whose beginning was admitted: counts it as a request.

        Raises RateLimited, and AuthenticationError once what proved the identity has been revoked or has expired; then
        the session should end.
        """
        self.check_holds(identity)
        self._limits.charge(identity)

    def identify(self, headers: Headers, peer: Peer = NOBODY) -> Identity:
        """Who the Authorization header speaks for, or without one the connection's certificate."""
        try:
            return self._identify(headers, peer)
        except AuthenticationError as error:
            self._failures.note(peer.address, error)
            raise

    # --- knowing -------------------------------------------------------------------------------------------------

    def _identify(self, headers: Headers, peer: Peer) -> Identity:
        self._follow_keyring()
        for name, value in headers:
            if name == b"authorization":
                known = self._known.get(value)
                return known[0] if known is not None and self._now() < known[1] else self._verify(value)
        if peer.identity is not None and self.holds(peer.identity):
            return peer.identity
        raise AuthenticationError(
            "no token: send `Authorization: Bearer TOKEN`; an operator issues one with `everstep token issue`, or the "
            "holder of the fleet's secret with `everstep-controller token`"
        )

    def _follow_keyring(self) -> None:
        """Forgets what was verified under other secrets than those that hold now."""
        changes = self._keyring.refresh(self._clock)
        if changes != self._keyring_changes:
            self._keyring_changes = changes
            self._known.clear()

    def _verify(self, value: bytes) -> Identity:
        self._known.pop(value, None)
        if value[: len(_BEARER)].lower() != _BEARER:
            raise AuthenticationError("the Authorization header must be `Bearer TOKEN`")
        token = value[len(_BEARER) :].strip().decode("latin-1")
        if len(token) > LONGEST_TOKEN:
            raise AuthenticationError(f"a token of {len(token)} characters is none of ours")
        if token.startswith(JOB_PREFIX):
            return self._trainer(token)  # not remembered: a job's secret ends with the job
        if token.startswith(STORED_PREFIX):
            identity, end = self._credentials.verify(token, self._now())
        else:
            identity, end = self._keyring.verify(token), math.inf
        if len(self._known) >= MOST_REMEMBERED:
            self._known.clear()
        self._known[value] = (identity, end)
        return identity

    def _trainer(self, token: str) -> Identity:
        job = job_of(token)
        secret = self._job_secret(job)
        right = job_token(job, secret or "no such job")
        if not hmac.compare_digest(token.encode(), right.encode()) or secret is None:
            raise AuthenticationError("the job's token does not verify: the job is over, or another began in its name")
        return Identity(TokenRole.TRAINER, job, _by_job(secret))

    def check_holds(self, identity: Identity) -> None:
        """Raises AuthenticationError once what proved the identity has been revoked or has ended."""
        if not self.holds(identity):
            by_certificate = identity.credential == BY_CERTIFICATE
            what = (
                "the certificate has ended" if by_certificate else f"credential {identity.credential} is good no longer"
            )
            raise AuthenticationError(f"{what}: come again with another")

    def holds(self, identity: Identity) -> bool:
        """Whether what proved the identity is good still."""
        if identity.role is TokenRole.TRAINER:
            secret = self._job_secret(identity.subject)
            return secret is not None and identity.credential == _by_job(secret)
        if identity.credential == BY_CERTIFICATE:
            return self._clock.wall() < identity.ends_at
        self._follow_keyring()
        return identity.credential in self._keyring.names or self._credentials.alive(identity.credential, self._now())


def _by_job(secret: str) -> str:
    """Names a job's secret: another run by the job's name has another."""
    return _BY_JOB + hash_secret(secret)[:12]


def _check(access: Access, identity: Identity, node: str, job: str) -> None:
    """Raises PermissionDenied where the identity may not."""
    role, subject = identity.role, identity.subject
    if role not in MAY[access]:
        article = "an" if role in (TokenRole.AGENT, TokenRole.OPERATOR) else "a"
        raise PermissionDenied(f"{article} {role} token is not for this: it needs that of {access}")
    if role is TokenRole.AGENT and subject != node:
        raise PermissionDenied(f"this token belongs to node {subject} and cannot speak for node {node}")
    if role is TokenRole.TRAINER and subject != job:
        asked = f"job {job}" if job else "all jobs"
        raise PermissionDenied(f"this token belongs to job {subject} and cannot read {asked}")
