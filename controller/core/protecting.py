"""Which version is kept by parity, which is next, and who makes its parity.

When a clean version is committed and none is being protected, groups of nodes are formed anew from the roster and
their domains (``parity_groups``), and the two homes of each group are told to make P and Q of it. The version stays
pinned on its members, whose shards it consists of, until a later one is protected everywhere: then that one is what
parity keeps. Homes are asked again until they answer; what they made of other bytes than the other home did is void.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from controller.core.parity_groups import form_groups, lost_shards
from controller.core.placement import Site
from controller.core.records import JobRecord, Protecting, Shielded
from controller.core.state import FleetState
from controller.core.turn import Turn
from controller.core.wording import named
from everstep.backoff import Backoff
from everstep.errors import StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.vocabulary import FindingKind, JobState
from everstep.wire.v1.directives import ProtectVersion
from everstep.wire.v1.parity import ParityGroup, Protection
from everstep.wire.v1.vault_reports import VersionProtected


def pinned(job: JobRecord) -> tuple[Version, ...]:
    """Versions that ranks go on keeping, since somebody reads them, or parity is of no use without them."""
    held = [job.spilling.version] if job.spilling is not None else []
    held += [one.protection.version for one in (job.shielded, job.protecting) if one is not None]
    return tuple(sorted(set(held)))


# --- ordering ----------------------------------------------------------------------------------------------------


def consider_protection(turn: Turn, job: JobRecord, version: Version) -> None:
    """``version`` was committed, so it is clean as far as anybody could tell: it is protected next, if none is yet."""
    running = job.generation
    if not job.spec.parity or running is None or job.protecting is not None or turn.now < job.protect_not_before:
        return
    sites = {node: Site.of(turn.state.nodes[node]) for node in running.seats}
    grouping = form_groups(running.seats, sites, job.spec.parity)
    if grouping.sentence != job.parity_sentence:
        job.parity_sentence = grouping.sentence
        alone = job.spec.replicas == 1 and grouping.on_copies
        unsafe = f"; {named(grouping.on_copies)} have neither parity nor a copy" if alone else ""
        turn.audit("parity.grouped", f"{grouping.sentence}{unsafe}", job=job.job, generation=running.number)
        turn.job_changed(job.job)
    if not grouping.groups:
        return
    turn.state.live_jobs[job.job].protect_made = {}
    shares = job.homes.shares if job.homes is not None else {}
    job.protecting = Protecting(
        protection=Protection(
            version=version,
            seats=running.seats,
            nproc_per_node=job.spec.nproc_per_node,
            groups=grouping.groups,
        ),
        on_copies={node: shares[node] for node in grouping.on_copies if node in shares},
        begun_at=turn.now,
        trace=turn.trace,
    )
    turn.job_changed(job.job)
    _order(turn, job, job.protecting)


def groups_of_homes(protection: Protection) -> dict[str, list[ParityGroup]]:
    """The groups of shards by the node that makes P or Q of them."""
    found: dict[str, list[ParityGroup]] = defaultdict(list)
    for group in protection.shards():
        for node in group.parity:
            found[node].append(group)
    return found


def _order(turn: Turn, job: JobRecord, protecting: Protecting) -> None:
    """Tells the homes that have not answered, and looks again later."""
    if job.generation is None:
        return
    live = turn.state.live_jobs[job.job]
    for node, groups in groups_of_homes(protecting.protection).items():
        if node not in live.protect_made and node in turn.state.reachable:
            body = ProtectVersion(
                job=job.job,
                generation=job.generation.number,
                version=protecting.protection.version,
                groups=tuple(groups),
                keep=(job.shielded.protection.version,) if job.shielded is not None else (),
            )
            turn.send(node, body)
    live.protect_due = turn.now + turn.policy.order_again_s
    turn.wake(live.protect_due, "job", job.job)


def check_protection(turn: Turn, job: JobRecord) -> None:
    """At a deadline: homes that have not answered are told again; what has lost a node is given up."""
    protecting = job.protecting
    if protecting is None or job.state is not JobState.RUNNING or turn.state.store_away:
        return
    reconsider_protection(turn, job)
    if job.protecting is not None and turn.now >= turn.state.live_jobs[job.job].protect_due:
        _order(turn, job, protecting)


def reconsider_protection(turn: Turn, job: JobRecord) -> None:
    """Nodes may have gone: parity of which a member or a home is missing will not be made; another version's will."""
    protecting = job.protecting
    if not job.spec.parity and (protecting or job.shielded) is not None:
        forget_protection(turn, job)
        return
    if protecting is None:
        return
    gone = [n for group in protecting.protection.groups for n in group.nodes if not holds(turn.state, n, 0.0)]
    if gone:
        give_up_protection(turn, job, f"{named(sorted(set(gone)))} cannot be reached")


def give_up_protection(turn: Turn, job: JobRecord, why: str) -> None:
    """The version that was protected before stays so. The next one waits a while, longer with each in a row."""
    protecting = job.protecting
    if protecting is None:
        return
    job.protecting, job.protect_failures, job.protect_trouble = None, job.protect_failures + 1, why
    waits = Backoff(floor_s=turn.policy.order_again_s, ceiling_s=turn.policy.order_again_max_s)
    job.protect_not_before = turn.now + waits.limit_s(job.protect_failures - 1)
    version = protecting.protection.version
    sentence = f"no parity of version {version} is made: {why}"
    turn.audit("parity.given_up", sentence, job=job.job, trace=protecting.trace, data={"version": str(version)})
    turn.job_changed(job.job)


# --- answers -----------------------------------------------------------------------------------------------------


def version_protected(turn: Turn, job: JobRecord, node: str, report: VersionProtected) -> None:
    """A home has made its parity, or could not."""
    protecting = job.protecting
    if (
        protecting is None
        or report.version != protecting.protection.version
        or not any(node in group.parity for group in protecting.protection.groups)
    ):
        turn.ignore("version_protected.stale")
    elif report.code:
        _failed(turn, job, protecting, node, report)
    else:
        made = turn.state.live_jobs[job.job].protect_made
        made[node] = dict(report.made)
        if len(made) == len(groups_of_homes(protecting.protection)):
            _compare(turn, job, protecting)


def _failed(turn: Turn, job: JobRecord, protecting: Protecting, node: str, report: VersionProtected) -> None:
    if report.code == StaleGeneration.code:
        return  # it is repeated in the newer generation's name
    protecting.failures += 1
    turn.job_changed(job.job)
    if report.code != Unavailable.code or protecting.failures >= turn.policy.order_failures:
        give_up_protection(turn, job, f"{node}: {report.message}")


def _compare(turn: Turn, job: JobRecord, protecting: Protecting) -> None:
    """P and Q are of use together only where they were made of the same bytes."""
    live = turn.state.live_jobs[job.job]
    for group in protecting.protection.shards():
        p, q = (live.protect_made[home].get(group.group) for home in group.parity)
        if p is None or p != q:
            give_up_protection(turn, job, f"P and Q of group {group.group} were made of different shards")
            return
    version, took_s = protecting.protection.version, turn.now - protecting.begun_at
    first = job.shielded is None
    job.shielded = Shielded(protection=protecting.protection, on_copies=protecting.on_copies, at=turn.now)
    job.protecting, job.protect_failures, job.protect_trouble = None, 0, ""
    job.protect_not_before = protecting.begun_at + turn.policy.protect_interval_s
    turn.job_changed(job.job)
    if first:  # every later one would be a line every few seconds
        sentence = f"version {version} is kept by parity after {took_s:.1f} s: {job.parity_sentence}"
        turn.audit("parity.kept", sentence, job=job.job, trace=protecting.trace, data={"version": str(version)})


# --- losses ------------------------------------------------------------------------------------------------------


def doubt_protected(turn: Turn, job: JobRecord, clean: Version | None) -> None:
    """After corruption: what is newer than ``clean`` is not kept any more."""
    for one in (job.protecting, job.shielded):
        if one is not None and (clean is None or one.protection.version > clean):
            if one is job.protecting:
                give_up_protection(turn, job, "it may be corrupt")
            else:
                job.shielded = None
                turn.job_changed(job.job)


def forget_protection(turn: Turn, job: JobRecord) -> None:
    """The job is over, and the memory of its nodes with it."""
    job.protecting, job.shielded, job.protect_not_before, job.protect_failures = None, None, 0.0, 0
    job.parity_sentence, job.protect_trouble = "", ""
    turn.job_changed(job.job)


def protection_of(job: JobRecord) -> Protection | None:
    """What a generation may go back to where nothing newer is whole."""
    return job.shielded.protection if job.shielded is not None else None


def lost_of_protected(state: FleetState, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """Nodes whose shards of the protected version would be gone without these nodes, and without those that are gone
    already; in the order of seats."""
    shielded = job.shielded
    if shielded is None:
        return []
    protection = shielded.protection
    concerned = {node for group in protection.groups for node in group.nodes}
    concerned |= {other for node, share in shielded.on_copies.items() for other in (node, *share.copies)}
    gone = {node for node in concerned if not holds(state, node, shielded.at)} | set(without)
    lost = set(lost_shards(protection.groups, gone))
    grouped = {node for group in protection.groups for node in group.members}
    for node in protection.seats:
        if node not in grouped and node in gone:
            share = shielded.on_copies.get(node)
            if share is None or all(copy in gone for copy in share.copies):
                lost.add(node)
    return [node for node in protection.seats if node in lost]


def holds(state: FleetState, node: str, since: float) -> bool:
    """Whether the node's memory still holds what it held at ``since``, as far as is known."""
    record = state.nodes.get(node)
    return (
        record is not None
        and node in state.reachable
        and not record.condemned
        and not record.booted_at > since > 0
        and all(finding.kind is not FindingKind.VAULT_LOST for finding in record.findings.values())
    )
