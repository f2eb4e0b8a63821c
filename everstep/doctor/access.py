"""Check the way to the controller: TLS files, the token, clocks, and versions of controller and agent."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from everstep import __version__
from everstep.clock import Clock
from everstep.doctor.results import CheckResult, fail, ok, warn
from everstep.errors import EverstepError
from everstep.host.agent_places import local_node_name
from everstep.wire.v1 import operator as op

DAY_S = 86400.0
RENEWAL_DAYS = 14.0
CLOCK_WARNING_S, CLOCK_FAILURE_S = 2.0, 60.0
"""The first is the threshold of the finding host.clock_skew."""


class AccessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller says. ``error``: why it could not be asked. ``ahead_s``: its clock before this machine's.

    ``agent_version``: of the agent of this node; "" if the controller does not know the node.
    """

    url: str
    error: str = ""
    version: str = ""
    identity: op.CallerIdentity | None = None
    ahead_s: float = 0.0
    uncertain_s: float = 0.0
    agent_version: str = ""


def read_access(get: Callable[..., Any], url: str, clock: Clock, node: str = "") -> AccessFacts:
    """Return what the controller at ``url`` says. ``get(path, kind)`` asks it."""
    try:
        get("/v1/identity", op.CallerIdentity)  # the first request also connects
        began, before = clock.monotonic(), clock.wall()
        fleet = get("/v1/status", op.FleetStatus)
        took_s = clock.monotonic() - began
        identity = get("/v1/identity", op.CallerIdentity)
    except EverstepError as error:
        return AccessFacts(url=url, error=str(error))
    agent = ""
    try:
        agent = get(f"/v1/nodes/{node or local_node_name()}", op.NodeDetail).agent_version
    except EverstepError:
        pass  # this machine is no node of the fleet
    return AccessFacts(
        url=url,
        version=fleet.version,
        identity=identity,
        ahead_s=fleet.now - (before + took_s / 2),
        uncertain_s=took_s / 2,
        agent_version=agent,
    )


def check_access(facts: AccessFacts, now: float) -> Iterator[CheckResult]:
    """Check that the controller answers, accepts the token, keeps the same time and has the same version."""
    if facts.error:
        yield fail("controller", facts.error)
        return
    yield ok("controller", f"{facts.url} answers")
    if facts.identity is not None:
        yield _check_expiry("token", f"{facts.identity.role} {facts.identity.subject}", facts.identity.expires_at, now)
    off_s = max(0.0, abs(facts.ahead_s) - facts.uncertain_s)
    direction = "behind" if facts.ahead_s > 0 else "ahead of"
    clocks = f"this machine's clock is {abs(facts.ahead_s):.2f} s {direction} the controller's"
    if off_s < CLOCK_WARNING_S:
        yield ok("clock", clocks)
    else:
        report = fail if off_s >= CLOCK_FAILURE_S else warn
        yield report("clock", f"{clocks}: run a time service (chrony, systemd-timesyncd) on both")
    for name, version in (("controller version", facts.version), ("agent version", facts.agent_version)):
        if version:
            yield _check_version(name, version)


def _check_version(name: str, version: str) -> CheckResult:
    if version == __version__:
        return ok(name, f"{version}, as here")
    theirs, ours = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, __version__))
    near = theirs[:1] == ours[:1] and len(theirs) == 2 and abs(theirs[1] - ours[1]) <= 1
    advice = f"{version}, and {__version__} here"
    if near:
        return warn(name, f"{advice}: that works while you upgrade; then bring both to one version")
    return fail(name, f"{advice}: programs may be one minor version apart; upgrade the older one")


def _check_expiry(check: str, name: str, ends_at: float | None, now: float) -> CheckResult:
    if ends_at is None:
        return ok(check, f"{name}; it does not expire")
    days = (ends_at - now) / DAY_S
    if days <= 0:
        return fail(check, f"{name}; it expired {-days:.1f} days ago: issue another one")
    report = warn if days < RENEWAL_DAYS else ok
    return report(check, f"{name}; it expires in {days:.1f} days" + (": renew it" if days < RENEWAL_DAYS else ""))


def check_secret_file(check: str, file: str) -> Iterator[CheckResult]:
    """Check that a file with a secret can be read, and by its owner only."""
    try:
        about = os.stat(file)
        Path(file).read_bytes()
    except OSError as error:
        yield fail(check, f"{file} cannot be read: {error.strerror}")
        return
    if about.st_mode & 0o077:
        yield warn(check, f"{file} has mode {stat.S_IMODE(about.st_mode):o}, so others can read it: chmod 600 {file}")
    else:
        yield ok(check, f"{file} is readable by its owner only")


def read_end(certificate: str) -> float:
    """Return when a certificate in a PEM file ends, in wall seconds. Raises OSError or ValueError."""
    import ssl  # only here, and below: as long as the imports of all other commands

    decoded = ssl._ssl._test_decode_cert(certificate)  # type: ignore[attr-defined]  # the module has no public way
    return float(ssl.cert_time_to_seconds(decoded["notAfter"]))


def check_tls(ca_file: str, certificate: str, key: str, now: float) -> Iterator[CheckResult]:
    """Check the given TLS files, each "" if it is not used: validity, key and mode of the key's file."""
    for check, file in (("authority", ca_file), ("certificate", certificate)):
        if file:
            try:
                yield _check_expiry(check, file, read_end(file), now)
            except (OSError, ValueError) as error:
                yield fail(check, f"{file} is no certificate that can be read: {error}")
    if not certificate:
        return
    import ssl

    try:
        ssl.create_default_context().load_cert_chain(certificate, key or None, password="")
    except OSError as error:
        yield fail("private key", f"{key or certificate} does not fit the certificate: {error}")
        return
    yield from check_secret_file("private key", key or certificate)
