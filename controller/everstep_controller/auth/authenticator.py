"""Authenticate and authorize requests, and limit their rate."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType

from everstep import oidc
from everstep.bearer_tokens import (
    JOB_PREFIX,
    LOGIN_PREFIX,
    STORED_PREFIX,
    Identity,
    TokenRole,
    claimed_job,
    hash_secret,
    job_token,
)
from everstep.clock import Clock
from everstep.errors import AuthenticationError, PermissionDenied, RateLimited
from everstep_controller.auth.credentials import CredentialStore, Keyring
from everstep_controller.auth.identity_provider import PROVIDER_CREDENTIAL, IdentityProvider
from everstep_controller.auth.peers import CERTIFICATE_CREDENTIAL, UNKNOWN_PEER, ConnectionPeer
from everstep_controller.config import ControllerSettings, RequestLimitSettings
from everstep_controller.core.records import JobRecord
from everstep_controller.runtime.rate_limits import TokenBuckets

log = logging.getLogger(__name__)

MAX_REPORTS = 1024
"""Maximum reports in one request, as in its message definition."""
LOG_EVERY_S = 10.0
"""Minimum seconds between two log lines about failed authentications."""


class RequestLimits:
    """Rate limits of authenticated clients, as in the settings. The burst of reports exceeds a full request."""

    def __init__(self, settings: RequestLimitSettings, monotonic: Callable[[], float]) -> None:
        burst_s, reports_per_s = settings.request_burst_s, settings.agent_reports_per_s
        reports_burst_s = max(burst_s, (MAX_REPORTS + 1) / reports_per_s)
        self._reports: TokenBuckets[str] = TokenBuckets(reports_per_s, reports_burst_s)
        self._agents: TokenBuckets[str] = TokenBuckets(settings.agent_requests_per_s, burst_s)
        self._others: TokenBuckets[tuple[TokenRole, str]] = TokenBuckets(settings.requests_per_s, burst_s)
        self._monotonic = monotonic

    def charge(self, identity: Identity) -> None:
        """Count one request. Raises RateLimited."""
        role, subject = identity.role, identity.subject
        if role is TokenRole.AGENT:
            wait_s = self._agents.take(subject, self._monotonic())
        elif role is TokenRole.JOIN:
            wait_s = self._agents.take(f"join:{identity.credential}", self._monotonic())
        else:
            wait_s = self._others.take((role, subject), self._monotonic())
        if wait_s:
            raise RateLimited(
                f"too many requests of {role} {subject}: retry in {wait_s:.3g} s, and ask for more per request", wait_s
            )

    def charge_reports(self, node: str, count: int) -> None:
        """Count the reports of one request. Raises RateLimited."""
        wait_s = self._reports.take(node, self._monotonic(), count)
        if wait_s:
            raise RateLimited(f"too many reports of node {node}: send these {count} again in {wait_s:.3g} s", wait_s)


def network_of(address: str) -> str:
    """Return the network of one client: an IPv4 address, or the /64 around an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return address
    return str(ip.ipv4_mapped or ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


class FailedAuthentications:
    """Counts failed authentications per address, for the log and against brute force."""

    def __init__(self, *, per_s: float, burst_s: float, monotonic: Callable[[], float]) -> None:
        self._buckets: TokenBuckets[str] = TokenBuckets(per_s, burst_s)
        self._monotonic = monotonic
        self._unlogged = 0
        self._log_at = 0.0

    def record(self, address: str, error: AuthenticationError) -> None:
        """Record one failure. Raises RateLimited if the address has had too many."""
        self._unlogged += 1
        now = self._monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            log.warning(
                "%d failed authentications since the last line, now from %s: %s", self._unlogged, address, error
            )
            self._unlogged = 0
        wait_s = self._buckets.take(network_of(address), now)
        if wait_s:
            raise RateLimited(f"too many failed authentications from {address}: {error}", wait_s) from error


Headers = Iterable[tuple[bytes, bytes]]

MAX_CACHED_TOKENS = 1 << 18
"""Maximum cached tokens, some 0.4 KiB each: more than the nodes of a million GPUs, which may reconnect at once."""
TRAINER_GRACE_S = 600.0
"""Seconds after a job's end in which its trainers may still read it: their launcher prints the receipt, after the ranks
have finished what follows training."""
MAX_TOKEN_CHARS = 512
MAX_LOGIN_CHARS = 2048
"""Maximum characters of a token of a login, which contains the person's name and the issuer."""
_BEARER = b"bearer "
_BY_JOB = "job-"


class RouteAccess(StrEnum):
    """The token that a route requires."""

    AGENT = "the node's agent"
    READ = "a viewer or an operator"
    JOB = "a viewer, an operator, or the job's trainers"
    CHANGE = "an operator"
    JOIN = "a node that joins"
    OPEN = "none"


ALLOWED_ROLES = MappingProxyType(
    {
        RouteAccess.AGENT: frozenset({TokenRole.AGENT}),
        RouteAccess.READ: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR}),
        RouteAccess.JOB: frozenset({TokenRole.VIEWER, TokenRole.OPERATOR, TokenRole.TRAINER}),
        RouteAccess.CHANGE: frozenset({TokenRole.OPERATOR}),
        RouteAccess.JOIN: frozenset({TokenRole.JOIN}),
    }
)
"""Roles allowed for each kind of route. An agent must also be the route's node, a trainer of the route's job."""


class Authenticator:
    """Identifies a request's sender by token or certificate, and refuses what the sender may not do.

    Every method raises the error for the client: AuthenticationError, PermissionDenied or RateLimited. A verified token
    is cached until it expires, so its next request costs one dictionary lookup. (The lookup is not in constant time,
    but uses a hash keyed per process: a timing attack would need the token.)
    ``now`` returns the wall seconds by which credentials expire. ``provider``: whose tokens people may use; call
    ``prepare`` first, because verifying them may need keys that are not here yet.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        keyring: Keyring,
        credentials: CredentialStore,
        jobs: Mapping[str, JobRecord],
        clock: Clock,
        now: Callable[[], float],
        provider: IdentityProvider | None = None,
    ) -> None:
        limits = settings.request_limits
        self.limits = RequestLimits(limits, clock.monotonic)
        self._failures = FailedAuthentications(
            per_s=limits.failed_authentications_per_s, burst_s=limits.request_burst_s, monotonic=clock.monotonic
        )
        self._keyring = keyring
        self._credentials = credentials
        self._jobs = jobs
        self._clock = clock
        self._now = now
        self._provider = provider
        self._known: dict[bytes, tuple[Identity, float]] = {}
        self._keyring_changes = keyring.changes
        credentials.on_invalidated = self._known.clear

    # --- requests

    def authorize(
        self, access: RouteAccess, headers: Headers, peer: ConnectionPeer | None, *, node: str = "", job: str = ""
    ) -> Identity:
        """Count a request and return its sender, if it may use a route with this access to ``node`` or ``job``."""
        identity = self.authenticate(headers, peer or UNKNOWN_PEER)
        self.limits.charge(identity)
        _check(access, identity, node, job)
        return identity

    async def prepare(self, headers: Headers) -> None:
        """Get the provider's keys if a request's token needs them. Raises Unavailable, or RateLimited."""
        if self._provider is None:
            return
        value = next((value for name, value in headers if name == b"authorization"), b"")
        if (token := _token_in(value)) and oidc.looks_like_jwt(token):
            await self._provider.prepare(token)

    def authorize_agent(self, headers: Headers, node: str, peer: ConnectionPeer | None = None) -> Identity:
        """Return the identity if it is the agent of ``node``."""
        return self.authorize(RouteAccess.AGENT, headers, peer, node=node)

    def charge_frame(self, identity: Identity) -> None:
        """Count a further frame of a session. Raises RateLimited, or AuthenticationError for a dead credential."""
        self.check_valid(identity)
        self.limits.charge(identity)

    def authenticate(self, headers: Headers, peer: ConnectionPeer = UNKNOWN_PEER) -> Identity:
        """Return the identity in the Authorization header, or else in the connection's certificate."""
        try:
            return self._identify(headers, peer)
        except AuthenticationError as error:
            self._failures.record(peer.address, error)
            raise

    def is_known(self, headers: Headers, peer: ConnectionPeer) -> bool:
        """Return whether a request shows a certificate, or a token that was verified before and may have ended."""
        return peer.identity is not None or any(
            name == b"authorization" and value in self._known for name, value in headers
        )

    # --- verification

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
        """Drop cached tokens if the secrets have changed."""
        changes = self._keyring.refresh(self._clock)
        if changes != self._keyring_changes:
            self._keyring_changes = changes
            self._known.clear()

    def _verify(self, value: bytes) -> Identity:
        self._known.pop(value, None)
        token = _token_in(value)
        if token is None:
            raise AuthenticationError("the Authorization header must be `Bearer TOKEN`")
        if self._provider is not None and oidc.looks_like_jwt(token):
            return self._provider.verify(token)  # which has a cache of its own: they are long
        is_login = self._provider is not None and token.startswith(LOGIN_PREFIX)
        if len(token) > (most := MAX_LOGIN_CHARS if is_login else MAX_TOKEN_CHARS):
            raise AuthenticationError(f"a token of {len(token)} characters is invalid: at most {most}")
        if token.startswith(JOB_PREFIX):
            return self._trainer(token)  # not cached: a job's secret ends soon after the job
        if token.startswith(STORED_PREFIX):
            identity, end = self._credentials.verify(token, self._now())
        elif is_login:
            identity = self._keyring.verify_login(token)
            end = identity.ends_at
            if end <= self._now():
                raise AuthenticationError("this login has ended: log in again")
        else:
            identity, end = self._keyring.verify(token), math.inf
        if len(self._known) >= MAX_CACHED_TOKENS:
            self._known.clear()
        self._known[value] = (identity, end)
        return identity

    def _job_secret(self, job: str) -> str | None:
        record = self._jobs.get(job)
        if record is None or (record.is_ended and self._now() > record.status.since + TRAINER_GRACE_S):
            return None
        return record.secret

    def _trainer(self, token: str) -> Identity:
        job = claimed_job(token)
        secret = self._job_secret(job)
        right = job_token(job, secret or "no such job")
        if not hmac.compare_digest(token.encode(), right.encode()) or secret is None:
            raise AuthenticationError("the job's token does not verify: the job has ended, or a new job has its name")
        return Identity(TokenRole.TRAINER, job, _by_job(secret))

    def check_valid(self, identity: Identity) -> None:
        """Raise AuthenticationError once the identity's credential is revoked or has ended."""
        if not self.is_valid(identity):
            if identity.credential == CERTIFICATE_CREDENTIAL:
                raise AuthenticationError("the client certificate has expired: connect with a new one")
            if identity.ends_at < math.inf:
                raise AuthenticationError(f"the login of {identity.subject} has ended: log in again")
            raise AuthenticationError(f"credential {identity.credential} is revoked or expired: use another one")

    def is_valid(self, identity: Identity) -> bool:
        """Return whether the identity's credential is still valid."""
        if identity.role is TokenRole.TRAINER:
            secret = self._job_secret(identity.subject)
            return secret is not None and identity.credential == _by_job(secret)
        if identity.credential == CERTIFICATE_CREDENTIAL:
            return self._clock.wall() < identity.ends_at
        if identity.credential.startswith(PROVIDER_CREDENTIAL):
            return self._provider is not None and self._provider.is_valid(identity)
        if identity.ends_at <= self._now():
            return False
        self._follow_keyring()
        return identity.credential in self._keyring.names or self._credentials.is_valid(
            identity.credential, self._now()
        )


def _token_in(value: bytes) -> str | None:
    """Return the bearer token of an Authorization header's value, None if it has another form."""
    is_bearer = value[: len(_BEARER)].lower() == _BEARER
    return value[len(_BEARER) :].strip().decode("latin-1") if is_bearer else None


def _by_job(secret: str) -> str:
    """Return a name for a job's secret: another run with the same job name has another secret."""
    return _BY_JOB + hash_secret(secret)[:12]


def _check(access: RouteAccess, identity: Identity, node: str, job: str) -> None:
    """Raise PermissionDenied if the identity may not use the route."""
    role, subject = identity.role, identity.subject
    if role not in ALLOWED_ROLES[access]:
        article = "an" if role in (TokenRole.AGENT, TokenRole.OPERATOR) else "a"
        raise PermissionDenied(f"{article} {role} token does not allow this: it needs the token of {access}")
    if role is TokenRole.AGENT and subject != node:
        raise PermissionDenied(f"this token belongs to node {subject} and cannot act for node {node}")
    if role is TokenRole.TRAINER and subject != job:
        requested = f"job {job}" if job else "all jobs"
        raise PermissionDenied(f"this token belongs to job {subject} and cannot read {requested}")
