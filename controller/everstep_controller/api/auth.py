"""Who is asking, and whether they may."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from everstep.bearer_tokens import JOB_PREFIX, STORED_PREFIX, Identity, TokenRole, claimed_job, hash_secret, job_token
from everstep.clock import Clock
from everstep.errors import AuthenticationError, PermissionDenied, RateLimited
from everstep_controller.api.credentials import CredentialBook, Keyring
from everstep_controller.api.routes import RouteAccess
from everstep_controller.config import ControllerSettings
from everstep_controller.core.jobs.membership import ENDED_STATES
from everstep_controller.core.records import JobRecord
from everstep_controller.server.connections import CERTIFICATE_CREDENTIAL, UNKNOWN_PEER, ConnectionPeer

# ---- limits
# How many requests one identity may send, and how many failed authentications one address.
#
# A bucket is one number: the time at which it would be full again if nothing more came (the generic cell rate
# algorithm,
# ITU-T I.371). A bucket whose time is past is the same as none, so that idle ones cost nothing; a request costs one
# look
# and one entry in a dictionary.

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MAX_BUCKETS = 1 << 17
"""Larger than any fleet; some 20 MiB when all of them are in use."""
MAX_REPORTS = 1024
"""In one request, as its message says."""
LOG_EVERY_S = 10.0
"""Seconds between two lines in the log about failed authentications, however many there are."""


class TokenBuckets(Generic[K]):
    """A token bucket for each key.

    Args:
        per_s: how fast each bucket fills.
        burst_s: seconds of filling that each holds.
        monotonic: the clock, seconds.
    """

    def __init__(
        self, per_s: float, burst_s: float, monotonic: Callable[[], float], max_keys: int = MAX_BUCKETS
    ) -> None:
        self._cost_s = 1.0 / per_s
        self._burst_s = burst_s
        self._monotonic = monotonic
        self._most = max_keys
        self._full_at: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, key: K, tokens: int = 1) -> float:
        """Takes ``count`` out of the bucket of ``key``; 0.0, or where it has less the seconds until it has so many."""
        now = self._monotonic()
        full_at = self._full_at.get(key, now)
        if full_at < now:
            full_at = now
        full_at += tokens * self._cost_s
        wait_s = full_at - now - self._burst_s
        if wait_s > 0:
            return wait_s
        self._full_at[key] = full_at
        if len(self._full_at) > self._most:
            self._forget(now)
        return 0.0

    def _forget(self, now: float) -> None:
        """Drops full buckets; where that is not half of them, all: a moment's largesse is better than memory lost."""
        self._full_at = {key: full_at for key, full_at in self._full_at.items() if full_at > now}
        if len(self._full_at) > self._most // 2:
            self._full_at.clear()


class RequestLimits:
    """The limits of those whose token or certificate is good.

    Args:
        agents_per_s: requests (or frames of a session) a second of one agent or join token.
        reports_per_s: reports a second of one agent, of which a request carries up to 1024. One that is slowed keeps
            them, and sends larger requests: none is lost.
        others_per_s: requests a second of one operator, viewer or trainer.
        burst_s: seconds of each that may come at once; of reports more than a full request.
    """

    def __init__(
        self,
        *,
        agents_per_s: float,
        reports_per_s: float,
        others_per_s: float,
        burst_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        reports_burst_s = max(burst_s, (MAX_REPORTS + 1) / reports_per_s)
        self._reports: TokenBuckets[str] = TokenBuckets(reports_per_s, reports_burst_s, monotonic)
        self._agents: TokenBuckets[str] = TokenBuckets(agents_per_s, burst_s, monotonic)
        self._others: TokenBuckets[tuple[TokenRole, str]] = TokenBuckets(others_per_s, burst_s, monotonic)

    def charge(self, identity: Identity) -> None:
        """Counts one request. Raises RateLimited."""
        role, subject = identity.role, identity.subject
        if role is TokenRole.AGENT:
            wait_s = self._agents.take(subject)
        elif role is TokenRole.JOIN:
            wait_s = self._agents.take(f"join:{identity.credential}")
        else:
            wait_s = self._others.take((role, subject))
        if wait_s:
            raise RateLimited(
                f"too many requests of {role} {subject}: come again in {wait_s:.3g} s, and ask for more at a time",
                wait_s,
            )

    def charge_reports(self, node: str, count: int) -> None:
        """Counts the reports of one request. Raises RateLimited."""
        wait_s = self._reports.take(node, count)
        if wait_s:
            raise RateLimited(f"too many reports of node {node}: send these {count} again in {wait_s:.3g} s", wait_s)


def network_of(address: str) -> str:
    """What one attacker holds: an IPv4 address, or the /64 around an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


class FailedAuthentications:
    """Counts what does not verify, for the log and against whoever tries on and on.

    Args:
        per_s: failures a second of one address that are answered with their reason.
    """

    def __init__(self, *, per_s: float, burst_s: float, monotonic: Callable[[], float]) -> None:
        self._buckets: TokenBuckets[str] = TokenBuckets(per_s, burst_s, monotonic)
        self._monotonic = monotonic
        self._unlogged = 0
        self._log_at = 0.0

    def record(self, address: str, error: AuthenticationError) -> None:
        """One failure. Raises RateLimited where the address has had too many."""
        self._unlogged += 1
        now = self._monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            log.warning("%d failed authentications since last said; now from %s: %s", self._unlogged, address, error)
            self._unlogged = 0
        wait_s = self._buckets.take(network_of(address))
        if wait_s:
            raise RateLimited(f"too many failed authentications from {address}: {error}", wait_s) from error


Headers = Iterable[tuple[bytes, bytes]]

MAX_CACHED_TOKENS = 1 << 18
"""Verified tokens that are remembered: more than the nodes of a million GPUs, whose agents may all hang up between
beats and come with their token again. Some 0.4 KiB each."""
MAX_TOKEN_CHARS = 512
_BEARER = b"bearer "
_BY_JOB = "job-"

ALLOWED_ROLES = MappingProxyType(
    {
        RouteAccess.AGENT: frozenset({TokenRole.AGENT}),
        RouteAccess.READ: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR}),
        RouteAccess.JOB: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.TRAINER}),
        RouteAccess.CHANGE: frozenset({TokenRole.OPERATOR}),
        RouteAccess.JOIN: frozenset({TokenRole.JOIN}),
    }
)
"""Which roles each kind of route is for. An agent must be the route's node besides, a trainer of the route's job."""


class Authenticator:
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
        credentials: CredentialBook,
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
        credentials.on_invalidated = self._known.clear

    @classmethod
    def from_settings(
        cls,
        settings: ControllerSettings,
        keyring: Keyring,
        credentials: CredentialBook,
        jobs: Mapping[str, JobRecord],
        clock: Clock,
        now: Callable[[], float],
    ) -> Authenticator:
        """As the settings limit it, for these jobs."""
        burst_s = settings.request_burst_s
        return cls(
            keyring,
            credentials=credentials,
            job_secret=lambda job: jobs[job].secret if job in jobs and jobs[job].state not in ENDED_STATES else None,
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

    def authorize(
        self,
        access: RouteAccess,
        headers: Headers,
        peer: ConnectionPeer | None = None,
        *,
        node: str = "",
        job: str = "",
    ) -> Identity:
        """Who asks for a route of this kind; ``node`` and ``job`` are what it is about. Counts the request."""
        identity = self.authenticate(headers, peer or UNKNOWN_PEER)
        self._limits.charge(identity)
        _check(access, identity, node, job)
        return identity

    def authorize_agent(self, headers: Headers, node: str, peer: ConnectionPeer | None = None) -> Identity:
        """The agent of ``node``, and nobody else."""
        return self.authorize(RouteAccess.AGENT, headers, peer, node=node)

    def charge_reports(self, node: str, count: int) -> None:
        """Counts what a node reports at a time. Raises RateLimited."""
        self._limits.charge_reports(node, count)

    def charge_frame(self, identity: Identity) -> None:
        """For each further frame of a session whose beginning was admitted: counts it as a request.

        Raises RateLimited, and AuthenticationError once what proved the identity has been revoked or has expired; then
        the session should end.
        """
        self.check_valid(identity)
        self._limits.charge(identity)

    def authenticate(self, headers: Headers, peer: ConnectionPeer = UNKNOWN_PEER) -> Identity:
        """Who the Authorization header speaks for, or without one the connection's certificate."""
        try:
            return self._identify(headers, peer)
        except AuthenticationError as error:
            self._failures.record(peer.address, error)
            raise

    # --- knowing -------------------------------------------------------------------------------------------------

    def _identify(self, headers: Headers, peer: ConnectionPeer) -> Identity:
        self._follow_keyring()
        for name, value in headers:
            if name == b"authorization":
                known = self._known.get(value)
                return known[0] if known is not None and self._now() < known[1] else self._verify(value)
        if peer.identity is not None and self.is_valid(peer.identity):
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
        if len(token) > MAX_TOKEN_CHARS:
            raise AuthenticationError(f"a token of {len(token)} characters is none of ours")
        if token.startswith(JOB_PREFIX):
            return self._trainer(token)  # not remembered: a job's secret ends with the job
        if token.startswith(STORED_PREFIX):
            identity, end = self._credentials.verify(token, self._now())
        else:
            identity, end = self._keyring.verify(token), math.inf
        if len(self._known) >= MAX_CACHED_TOKENS:
            self._known.clear()
        self._known[value] = (identity, end)
        return identity

    def _trainer(self, token: str) -> Identity:
        job = claimed_job(token)
        secret = self._job_secret(job)
        right = job_token(job, secret or "no such job")
        if not hmac.compare_digest(token.encode(), right.encode()) or secret is None:
            raise AuthenticationError("the job's token does not verify: the job is over, or another began in its name")
        return Identity(TokenRole.TRAINER, job, _by_job(secret))

    def check_valid(self, identity: Identity) -> None:
        """Raises AuthenticationError once what proved the identity has been revoked or has ended."""
        if not self.is_valid(identity):
            by_certificate = identity.credential == CERTIFICATE_CREDENTIAL
            what = (
                "the certificate has ended" if by_certificate else f"credential {identity.credential} is good no longer"
            )
            raise AuthenticationError(f"{what}: come again with another")

    def is_valid(self, identity: Identity) -> bool:
        """Whether what proved the identity is good still."""
        if identity.role is TokenRole.TRAINER:
            secret = self._job_secret(identity.subject)
            return secret is not None and identity.credential == _by_job(secret)
        if identity.credential == CERTIFICATE_CREDENTIAL:
            return self._clock.wall() < identity.ends_at
        self._follow_keyring()
        return identity.credential in self._keyring.names or self._credentials.is_valid(
            identity.credential, self._now()
        )


def _by_job(secret: str) -> str:
    """Names a job's secret: another run by the job's name has another."""
    return _BY_JOB + hash_secret(secret)[:12]


def _check(access: RouteAccess, identity: Identity, node: str, job: str) -> None:
    """Raises PermissionDenied where the identity may not."""
    role, subject = identity.role, identity.subject
    if role not in ALLOWED_ROLES[access]:
        article = "an" if role in (TokenRole.AGENT, TokenRole.OPERATOR) else "a"
        raise PermissionDenied(f"{article} {role} token is not for this: it needs that of {access}")
    if role is TokenRole.AGENT and subject != node:
        raise PermissionDenied(f"this token belongs to node {subject} and cannot speak for node {node}")
    if role is TokenRole.TRAINER and subject != job:
        asked = f"job {job}" if job else "all jobs"
        raise PermissionDenied(f"this token belongs to job {subject} and cannot read {asked}")
