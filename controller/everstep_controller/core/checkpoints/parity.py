"""Protect versions by parity: form groups of nodes, order parity and track its state.

Each clean commit gets parity unless a protection is pending. The version stays pinned on its members until a later
one is fully protected. Parity made of other bytes than its counterpart is void.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from everstep.clock import Backoff
from everstep.errors import StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.vocabulary import FindingKind
from everstep.wire.v1.directives import ProtectVersion
from everstep.wire.v1.vault_reports import NodeGroup, ParityGroup, Protection, VersionProtected
from everstep_controller.core.checkpoints.placement import FailureDomains
from everstep_controller.core.records import ActiveProtection, JobParity, JobRecord, PendingProtection
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

# Grouping: sets of k member nodes and two other nodes that hold their parities P and Q.
#
# A group survives the loss of any two of its k + 2 nodes and takes 2/k of its members' memory; a copy takes all of it.
# No two nodes of a group share a rack, switch or power unit, so the loss of a domain costs it one node. Nodes without
# such a group stay on copies. A domain that contains every node is ignored. Members come from the most crowded domains
# first: if domains are nested, no other order makes more groups.

MIN_MEMBERS = 2
"""With one member, two parities take twice a copy's memory; with two, as much, and a second loss is survived."""
TOLERATED_LOSSES = 2
"""Number of losses that a group survives, with P and Q."""
NamedDomain = tuple[str, str]
"""Kind and name of a domain."""
NamedDomains = tuple[NamedDomain, ...]
ParityLoad = tuple[int, int, str]
"""Number of parities held, seat, node."""


class ParityGrouping(msgspec.Struct, frozen=True):
    """Partition of the seats into groups and nodes that stay on copies."""

    groups: tuple[NodeGroup, ...]
    copy_only_nodes: tuple[str, ...]
    explanation: str


def form_groups(seats: Sequence[str], failure_domains: Mapping[str, FailureDomains], parity: int) -> ParityGrouping:
    """Return the largest equal groups of at most ``parity`` members that leave the fewest nodes without one."""
    domains = _domains(seats, failure_domains)
    best: tuple[NodeGroup, ...] = ()
    ungrouped = seats
    for k in range(min(parity, len(seats) - TOLERATED_LOSSES), MIN_MEMBERS - 1, -1):
        for sizes in (_even_sizes(len(seats), k), [k] * (len(seats) // k)):
            if len(seats) - sum(sizes) < len(ungrouped):
                groups = _form_groups(seats, domains, sizes)
                grouped = {node for group in groups for node in group.members}
                if len(seats) - len(grouped) < len(ungrouped):
                    best, ungrouped = groups, [node for node in seats if node not in grouped]
    return ParityGrouping(best, tuple(ungrouped), _explain_grouping(best, ungrouped, parity, len(seats)))


def _even_sizes(nodes: int, k: int) -> list[int]:
    """Return the sizes of the fewest groups of at most ``k`` that take all nodes; [] if one would be too small."""
    count = -(-nodes // k)
    least, larger = divmod(nodes, count)
    return [least + 1] * larger + [least] * (count - larger) if least >= MIN_MEMBERS else []


def _explain_grouping(
    groups: Sequence[NodeGroup], ungrouped_nodes: Sequence[str], requested_size: int, seats: int
) -> str:
    if not groups:
        least = MIN_MEMBERS + TOLERATED_LOSSES
        why = f"parity needs {least} nodes of which no two share a rack, switch or power unit"
        return f"all {seats} nodes keep copies: {why}"
    sizes = sorted({len(group.members) for group in groups})
    k = " or ".join(map(str, sizes))
    of = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {k} nodes and 2 parities"
    if requested_size not in sizes:
        of += f" (up to {requested_size} were asked for; the roster and its domains allow {k})"
    if not ungrouped_nodes:
        return f"{of}: each survives any 2 lost nodes"
    s = "s" if len(ungrouped_nodes) == 1 else ""
    return (
        f"{of}: each survives any 2 lost nodes; {join_names(ungrouped_nodes)} share{s} failure domains with too "
        f"many others and keep{s} copies"
    )


def _domains(seats: Sequence[str], sites: Mapping[str, FailureDomains]) -> dict[str, NamedDomains]:
    """Return the domains that each node shares with some of the other nodes, but not with all."""
    named: dict[str, NamedDomains] = {}
    for node in seats:
        power, switch, rack = sites[node].power, sites[node].switch, sites[node].rack
        named[node] = tuple(domain for domain in (("power", power), ("switch", switch), ("rack", rack)) if domain[1])
    size = Counter(domain for domains in named.values() for domain in domains)
    return {node: tuple(d for d in domains if 1 < size[d] < len(seats)) for node, domains in named.items()}


def _form_groups(
    seats: Sequence[str], domains: Mapping[str, NamedDomains], sizes: Iterable[int]
) -> tuple[NodeGroup, ...]:
    """Return groups of these sizes, up to the first that is impossible."""
    crowds = _UngroupedNodes(seats, domains)
    parity_nodes = _ParityNodes(seats, domains)
    groups: list[NodeGroup] = []
    for size in sizes:
        members = crowds.take(size)
        parity = parity_nodes.take(members) if members else None
        if parity is None:
            break
        groups.append(NodeGroup(members=members, parity=parity))
    return tuple(groups)


class _UngroupedNodes:
    """Nodes without a group by domain, most crowded domains first."""

    def __init__(self, seats: Sequence[str], domains: Mapping[str, NamedDomains]) -> None:
        self._left = Counter(domain for node in seats for domain in domains[node])
        self._nodes: dict[NamedDomains, deque[str]] = {}
        for node in seats:
            self._nodes.setdefault(domains[node], deque()).append(node)
        self._heap = [(-self._max_domain_size(place), at, place) for at, place in enumerate(self._nodes)]
        heapq.heapify(self._heap)

    def _max_domain_size(self, domains: NamedDomains) -> int:
        return max((self._left[domain] for domain in domains), default=1)

    def take(self, k: int) -> tuple[str, ...]:
        """Return ``k`` nodes that share no domain with each other; () if there are none."""
        taken: list[str] = []
        used: set[NamedDomain] = set()
        aside: list[tuple[int, int, NamedDomains]] = []
        while self._heap and len(taken) < k:
            domain_size, at, place = heapq.heappop(self._heap)
            now = self._max_domain_size(place)
            if now < -domain_size:  # other nodes of its domains have been grouped since
                heapq.heappush(self._heap, (-now, at, place))
                continue
            aside.append((domain_size, at, place))
            if used.isdisjoint(place):
                room = 1 if place else k - len(taken)
                taken += [self._nodes[place].popleft() for _ in range(min(room, len(self._nodes[place])))]
                used.update(place)
                self._left.subtract(place)
        for entry in aside:
            if self._nodes[entry[2]]:
                heapq.heappush(self._heap, entry)
        return tuple(taken) if len(taken) == k else ()


class _ParityNodes:
    """All nodes by domain as candidates for parity, least loaded first."""

    def __init__(self, seats: Sequence[str], domains: Mapping[str, NamedDomains]) -> None:
        self._nodes: dict[NamedDomains, list[ParityLoad]] = {}
        for seat, node in enumerate(seats):
            self._nodes.setdefault(domains[node], []).append((0, seat, node))
        self._heap = [(loads[0], place) for place, loads in self._nodes.items()]
        heapq.heapify(self._heap)
        self._domains = domains

    def take(self, members: Sequence[str]) -> tuple[str, str] | None:
        """Return two nodes outside ``members`` that share no domain with a member or with each other."""
        used = {domain for node in members for domain in self._domains[node]}
        aside: list[NamedDomains] = []
        chosen: list[str] = []
        while self._heap and len(chosen) < TOLERATED_LOSSES:
            _, place = heapq.heappop(self._heap)
            aside.append(place)
            if used.isdisjoint(place):
                chosen += self._least(place, members, 1 if place else TOLERATED_LOSSES - len(chosen))
                used.update(place)
        for place in aside:
            heapq.heappush(self._heap, (self._nodes[place][0], place))
        return (chosen[0], chosen[1]) if len(chosen) == TOLERATED_LOSSES else None

    def _least(self, domains: NamedDomains, members: Sequence[str], count: int) -> list[str]:
        loads, aside, found = self._nodes[domains], [], list[str]()
        while loads and len(found) < count:
            load, seat, node = heapq.heappop(loads)
            if node in members:
                aside.append((load, seat, node))
            else:
                aside.append((load + 1, seat, node))
                found.append(node)
        for entry in aside:
            heapq.heappush(loads, entry)
        return found


def lost_shards(groups: Collection[NodeGroup], gone: Collection[str]) -> tuple[str, ...]:
    """Return the nodes whose shards no group can rebuild without the nodes in ``gone``."""
    return tuple(
        node
        for group in groups
        if sum(other in gone for other in group.nodes) > TOLERATED_LOSSES
        for node in group.members
        if node in gone
    )


def consider_protection(transition: Transition, job: JobRecord, version: Version) -> None:
    """Protect ``version``, which has just been committed, if no protection is pending."""
    running, size, parity = job.generation, job.spec.parity_group_size, job.parity
    if not size or running is None or parity.pending is not None or transition.now < parity.not_before:
        return
    sites = {node: FailureDomains.of(transition.state.nodes[node]) for node in running.seats}
    grouping = form_groups(running.seats, sites, size)
    if grouping.explanation != job.parity.summary:
        job.parity.summary = grouping.explanation
        alone = job.spec.replicas == 1 and grouping.copy_only_nodes
        unsafe = f"; {join_names(grouping.copy_only_nodes)} have neither parity nor a copy" if alone else ""
        transition.log_event(
            "parity.grouped", f"{grouping.explanation}{unsafe}", job=job.job, generation=running.number
        )
        transition.mark_job_changed(job.job)
    if not grouping.groups:
        return
    transition.state.job_runtime[job.job].vault_orders.made_parity = {}
    shares = job.commits.locations.shares if job.commits.locations is not None else {}
    job.parity.pending = PendingProtection(
        protection=Protection(
            version=version, seats=running.seats, nproc_per_node=job.spec.nproc_per_node, groups=grouping.groups
        ),
        copy_only_shares={node: shares[node] for node in grouping.copy_only_nodes if node in shares},
        started_at=transition.now,
        trace=transition.trace,
    )
    transition.mark_job_changed(job.job)
    _send_parity_order(transition, job, job.parity.pending)


def groups_by_parity_node(protection: Protection) -> dict[str, list[ParityGroup]]:
    """Return the groups of shards by the node that makes P or Q of them."""
    found: dict[str, list[ParityGroup]] = defaultdict(list)
    for group in protection.shards():
        for node in group.parity:
            found[node].append(group)
    return found


def _send_parity_order(transition: Transition, job: JobRecord, protecting: PendingProtection) -> None:
    """Send the order to parity nodes that have not answered, and schedule the next check."""
    if job.generation is None:
        return
    live = transition.state.job_runtime[job.job]
    for node, groups in groups_by_parity_node(protecting.protection).items():
        if node not in live.vault_orders.made_parity and node in transition.state.liveness.reachable_nodes:
            body = ProtectVersion(
                job=job.job,
                generation=job.generation.number,
                version=protecting.protection.version,
                groups=tuple(groups),
                keep=(job.parity.active.protection.version,) if job.parity.active is not None else (),
            )
            transition.send(node, body)
    live.vault_orders.parity_due = transition.now + transition.policy.checkpoints.vault_order_retry_s
    transition.schedule_job(live.vault_orders.parity_due, job.job)


def advance_protection(transition: Transition, job: JobRecord) -> None:
    """At a deadline, repeat the order to nodes that have not answered; give up if a node of it is lost."""
    protecting = job.parity.pending
    if protecting is None or not job.is_running or transition.state.database.outage:
        return
    reconsider_protection(transition, job)
    due = transition.state.job_runtime[job.job].vault_orders.parity_due
    if job.parity.pending is not None and transition.now >= due:
        _send_parity_order(transition, job, protecting)


def reconsider_protection(transition: Transition, job: JobRecord) -> None:
    """Give up a pending protection if a member or parity node has gone; a later version will be protected."""
    protecting = job.parity.pending
    if not job.spec.parity_group_size and (protecting or job.parity.active) is not None:
        drop_protection(transition, job)
        return
    if protecting is None:
        return
    nodes = {node for group in protecting.protection.groups for node in group.nodes}
    gone = sorted(node for node in nodes if not still_holds_data(transition.state, node, 0.0))
    if gone:
        give_up_protection(transition, job, f"{join_names(gone)} cannot be reached")


def renew_protection_order(transition: Transition, job: JobRecord) -> None:
    """Repeat the pending order at once in the name of the generation that begins."""
    if job.parity.pending is not None:
        transition.state.job_runtime[job.job].vault_orders.parity_due = transition.now
        transition.schedule_job(transition.now, job.job)


def give_up_protection(transition: Transition, job: JobRecord, reason: str) -> None:
    """Give up the pending protection; the earlier one stays. The wait for the next grows with each failure in a row."""
    protecting = job.parity.pending
    if protecting is None:
        return
    job.parity.pending, job.parity.failures_in_row, job.parity.error = None, job.parity.failures_in_row + 1, reason
    waits = Backoff(
        floor_s=transition.policy.checkpoints.vault_order_retry_s,
        ceiling_s=transition.policy.checkpoints.vault_order_retry_max_s,
    )
    job.parity.not_before = transition.now + waits.limit_s(job.parity.failures_in_row - 1)
    version = protecting.protection.version
    sentence = f"no parity of version {version} is made: {reason}"
    transition.log_event(
        "parity.given_up", sentence, job=job.job, trace=protecting.trace, data={"version": str(version)}
    )
    transition.mark_job_changed(job.job)


def handle_version_protected(transition: Transition, job: JobRecord, node: str, report: VersionProtected) -> None:
    """Handle a parity node's report that it made its parity, or could not."""
    protecting = job.parity.pending
    if (
        protecting is None
        or report.version != protecting.protection.version
        or not any(node in group.parity for group in protecting.protection.groups)
    ):
        transition.count_ignored("version_protected.stale")
    elif report.code:
        _failed(transition, job, protecting, node, report)
    else:
        made = transition.state.job_runtime[job.job].vault_orders.made_parity
        made[node] = dict(report.members_digests)
        if len(made) == len(groups_by_parity_node(protecting.protection)):
            _activate_if_equal(transition, job, protecting)


def _failed(
    transition: Transition, job: JobRecord, protecting: PendingProtection, node: str, report: VersionProtected
) -> None:
    if report.code == StaleGeneration.code:
        return  # repeated in the name of the newer generation
    protecting.failures += 1
    transition.mark_job_changed(job.job)
    if report.code != Unavailable.code or protecting.failures >= transition.policy.checkpoints.vault_order_failures:
        give_up_protection(transition, job, f"{node}: {report.message}")


def _activate_if_equal(transition: Transition, job: JobRecord, protecting: PendingProtection) -> None:
    """Activate the protection if P and Q of each group were made of the same bytes."""
    live = transition.state.job_runtime[job.job]
    for group in protecting.protection.shards():
        p, q = (live.vault_orders.made_parity[parity_node].get(group.group) for parity_node in group.parity)
        if p is None or p != q:
            give_up_protection(
                transition, job, f"the parity blocks P and Q of group {group.group} were computed from different shards"
            )
            return
    version, took_s = protecting.protection.version, transition.now - protecting.started_at
    first = job.parity.active is None
    job.parity.active = ActiveProtection(
        protection=protecting.protection, copy_only_shares=protecting.copy_only_shares, protected_at=transition.now
    )
    job.parity.pending, job.parity.failures_in_row, job.parity.error = None, 0, ""
    job.parity.not_before = protecting.started_at + transition.policy.checkpoints.parity_interval_s
    transition.mark_job_changed(job.job)
    if first:  # a log entry for each later version would come every few seconds
        sentence = f"parity of version {version} is complete after {took_s:.1f} s: {job.parity.summary}"
        transition.log_event(
            "parity.kept", sentence, job=job.job, trace=protecting.trace, data={"version": str(version)}
        )


def drop_corrupt_protection(transition: Transition, job: JobRecord, clean: Version | None) -> None:
    """After corruption, drop the protection of versions newer than ``clean``."""
    for state in (job.parity.pending, job.parity.active):
        if state is not None and (clean is None or state.protection.version > clean):
            if state is job.parity.pending:
                give_up_protection(transition, job, "it may be corrupt")
            else:
                job.parity.active = None
                transition.mark_job_changed(job.job)


def drop_protection(transition: Transition, job: JobRecord) -> None:
    """Drop all protection of a job that has ended or no longer asks for parity."""
    job.parity = JobParity()
    transition.mark_job_changed(job.job)


def lost_protected_nodes(state: FleetState, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """Return the nodes, in seat order, whose protected shards are lost without ``without`` and those already gone."""
    shielded = job.parity.active
    if shielded is None:
        return []
    protection = shielded.protection
    concerned = {node for group in protection.groups for node in group.nodes}
    concerned |= {other for node, share in shielded.copy_only_shares.items() for other in (node, *share.full_copies)}
    gone = {node for node in concerned if not still_holds_data(state, node, shielded.protected_at)} | set(without)
    lost = set(lost_shards(protection.groups, gone))
    grouped = {node for group in protection.groups for node in group.members}
    for node in protection.seats:
        if node not in grouped and node in gone:
            share = shielded.copy_only_shares.get(node)
            if share is None or all(copy in gone for copy in share.full_copies):
                lost.add(node)
    return [node for node in protection.seats if node in lost]


def still_holds_data(state: FleetState, node: str, since: float) -> bool:
    """Return whether the node's memory still holds its content of time ``since``, as far as is known."""
    record = state.nodes.get(node)
    return (
        record is not None
        and node in state.liveness.reachable_nodes
        and not record.health.defective_gpus
        and not record.identity.booted_at > since > 0
        and all(finding.kind is not FindingKind.VAULT_LOST for finding in record.health.agent_findings.values())
    )
