"""How many requests one identity may send, and how many failed authentications one address.

A bucket is one number: the time at which it would be full again if nothing more came (the generic cell rate algorithm,
ITU-T I.371). A bucket whose time is past is the same as none, so that idle ones cost nothing; a request costs one look
and one entry in a dictionary.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from everstep.errors import AuthenticationError, RateLimited
from everstep.tokens import Identity, TokenRole

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

MOST_BUCKETS = 1 << 17
"""Larger than any fleet; some 20 MiB when all of them are in use."""
MOST_REPORTS = 1024
"""In one request, as its message says."""
LOG_EVERY_S = 10.0
"""Seconds between two lines in the log about failed authentications, however many there are."""


class Buckets(Generic[K]):
    """A token bucket for each key.

    Args:
        per_s: how fast each bucket fills.
        burst_s: seconds of filling that each holds.
        monotonic: the clock, seconds.
    """

    def __init__(self, per_s: float, burst_s: float, monotonic: Callable[[], float], most: int = MOST_BUCKETS) -> None:
        self._cost_s = 1.0 / per_s
        self._burst_s = burst_s
        self._monotonic = monotonic
        self._most = most
        self._full_at: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, key: K, count: int = 1) -> float:
        """Takes ``count`` out of the bucket of ``key``; 0.0, or where it has less the seconds until it has so many."""
        now = self._monotonic()
        full_at = self._full_at.get(key, now)
        if full_at < now:
            full_at = now
        full_at += count * self._cost_s
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
        reports_burst_s = max(burst_s, (MOST_REPORTS + 1) / reports_per_s)
        self._reports: Buckets[str] = Buckets(reports_per_s, reports_burst_s, monotonic)
        self._agents: Buckets[str] = Buckets(agents_per_s, burst_s, monotonic)
        self._others: Buckets[tuple[TokenRole, str]] = Buckets(others_per_s, burst_s, monotonic)

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
        self._buckets: Buckets[str] = Buckets(per_s, burst_s, monotonic)
        self._monotonic = monotonic
        self._unsaid = 0
        self._say_at = 0.0

    def note(self, address: str, error: AuthenticationError) -> None:
        """One failure. Raises RateLimited where the address has had too many."""
        self._unsaid += 1
        now = self._monotonic()
        if now >= self._say_at:
            self._say_at = now + LOG_EVERY_S
            log.warning("%d failed authentications since last said; now from %s: %s", self._unsaid, address, error)
            self._unsaid = 0
        wait_s = self._buckets.take(network_of(address))
        if wait_s:
            raise RateLimited(f"too many failed authentications from {address}: {error}", wait_s) from error
