"""Choose the nodes of the next roster and explain why others have no seat, without changing records."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence

import msgspec

from everstep.ids import storage_url_error
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import JobSpec
from everstep_controller.core.records import JobRecord, max_seats, min_seats
from everstep_controller.core.state import FleetState
from everstep_controller.core.wording import format_node_count, join_names

# Blocks: runs of ``block_nodes`` consecutive seats whose nodes compute one tensor x pipeline replica together.
#
# A roster is a whole number of blocks. A job may require the nodes of a block to share a failure domain.


def spec_error(spec: JobSpec) -> str:
    """Return why no roster satisfies the specification, with advice; "" if one can."""
    if spec.min_nodes > spec.max_nodes:
        return f"min_nodes {spec.min_nodes} is above max_nodes {spec.max_nodes}: lower min_nodes or raise max_nodes"
    if min_seats(spec) > max_seats(spec):
        return (
            f"no whole number of blocks of {spec.block_nodes} nodes lies between {spec.min_nodes} and "
            f"{spec.max_nodes} nodes: give bounds with a multiple of {spec.block_nodes} between them"
        )
    if spec.block_within and spec.block_nodes == 1:
        return f"a block of one node is in one {spec.block_within} anyway: give block_nodes, or leave out block_within"
    return (storage_url_error(spec.spill.url) if spec.spill else "") or _parity_error(spec)


def _parity_error(spec: JobSpec) -> str:
    """Return why no roster can have the requested parity; "" if one can."""
    if spec.parity_group_size == 1:
        return "parity of one member would take twice what a copy takes: give 2 members or more, or none"
    if spec.parity_group_size and max_seats(spec) < 4:
        return (
            f"parity needs 4 nodes (2 members, and one more for P and for Q each), and the job has at most "
            f"{max_seats(spec)}: give it more nodes, or no parity"
        )
    if spec.parity_group_size and spec.replicas == 1 and min_seats(spec) < 4:
        return (
            f"with one copy and parity, no data would be safe on fewer than 4 nodes (2 members, P and Q), and the job "
            f"continues with {min_seats(spec)}: give min_nodes of 4 or more, or 2 copies beside the parity"
        )
    return ""


def domain_of(domain: Domain, within: str) -> str:
    """Return the domain that a block must not leave; "" if the node names none."""
    return domain.rack if within == "rack" else domain.switch


class _RosterBlock(msgspec.Struct):
    """A block of the previous roster."""

    index: int
    """Number of the block."""
    domain: str
    """Failure domain of its nodes."""
    seats: list[str | None]
    """Remaining nodes in their places; None for a lost one."""

    @property
    def missing(self) -> int:
        return self.seats.count(None)


def choose_seats(
    previous: Sequence[str],
    able: Sequence[str],
    max_count: int,
    block: int = 1,
    domains: Mapping[str, str] | None = None,
) -> list[str]:
    """Choose the next roster: as many whole blocks as possible, with as few changes as possible.

    Complete blocks stay as they are. Blocks with the fewest losses are refilled first; a new node takes the place, and
    so the rank numbers, of a lost one. Blocks that cannot be refilled are broken up, and their nodes refill others. A
    new block takes the seats of a lost one, and only then seats at the end. Linear in the number of nodes.
    ``able`` is in the order in which nodes fill free seats. With ``domains``, the nodes of a block must share one, and
    nodes without a domain get no seat.
    """
    if block == 1 and domains is None:
        return _choose_single_nodes(previous, able, max_count)
    region = {node: domains.get(node, "") if domains is not None else "any" for node in able}
    region = {node: domain for node, domain in region.items() if domain}
    room = {domain: count // block for domain, count in Counter(region.values()).items()}
    total = min(max_count // block, sum(room.values()))
    old = [_survivors(at // block, previous[at : at + block], region, block) for at in range(0, len(previous), block)]
    kept = _blocks_to_keep(old, room, total)
    placed = {node for kept_block in kept.values() for node in kept_block.seats if node is not None}
    free: dict[str, deque[str]] = {domain: deque() for domain in room}
    for node, domain in region.items():
        if node not in placed:
            free[domain].append(node)
    mended = {index: _filled(kept_block.seats, free[kept_block.domain]) for index, kept_block in kept.items()}
    fresh = _new_blocks(region, free, room, total - len(kept), block)
    return _in_order(len(old), mended, fresh)


def _choose_single_nodes(previous: Sequence[str], able: Sequence[str], max_count: int) -> list[str]:
    """Choose the next roster for blocks of one node."""
    may, was = set(able), set(previous)
    spares = deque(node for node in able if node not in was)
    room = max_count - sum(1 for node in previous if node in may)
    seats: list[str] = []
    for node in previous:
        if node in may:
            seats.append(node)
        elif spares and room > 0:
            seats.append(spares.popleft())
            room -= 1
    return [*seats, *spares][:max_count]


def _survivors(index: int, seats: Sequence[str], region: Mapping[str, str], block: int) -> _RosterBlock:
    """Return what remains of a block. Nodes outside the domain of its majority no longer belong to it."""
    here = Counter(region[node] for node in seats if node in region)
    domain = max(here, key=here.__getitem__) if here else ""
    left = [node if region.get(node) == domain else None for node in seats]
    return _RosterBlock(index, domain, [*left, *[None] * (block - len(left))])


def _blocks_to_keep(old: list[_RosterBlock], room: dict[str, int], total: int) -> dict[int, _RosterBlock]:
    """Return up to ``total`` blocks, most complete first, and reduce the ``room`` in their domains."""
    kept: dict[int, _RosterBlock] = {}
    for block in sorted((b for b in old if b.domain), key=lambda b: (b.missing, b.index)):
        if len(kept) < total and room[block.domain] > 0:
            room[block.domain] -= 1
            kept[block.index] = block
    return kept


def _filled(seats: list[str | None], free: deque[str]) -> list[str]:
    return [node if node is not None else free.popleft() for node in seats]


def _new_blocks(
    region: Mapping[str, str], free: dict[str, deque[str]], room: dict[str, int], count: int, block: int
) -> deque[list[str]]:
    """Return ``count`` blocks of free nodes; the order of use decides on the domain."""
    blocks: deque[list[str]] = deque()
    for node, domain in region.items():
        if len(blocks) < count and room[domain] > 0 and free[domain] and free[domain][0] == node:
            room[domain] -= 1
            blocks.append([free[domain].popleft() for _ in range(block)])
    return blocks


def _in_order(places: int, mended: dict[int, list[str]], fresh: deque[list[str]]) -> list[str]:
    seats: list[str] = []
    for index in range(places):
        seats += mended[index] if index in mended else (fresh.popleft() if fresh else [])
    return seats + [node for block in fresh for node in block]


RostersByJob = dict[str, list[str]]
"""Roster that each job would get now."""


def seat_changes(previous: Sequence[str], seats: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the nodes that leave and those that come, each in seat order."""
    was, will = set(previous), set(seats)
    return [node for node in previous if node not in will], [node for node in seats if node not in was]


def describe_change(previous: Sequence[str], seats: Sequence[str], max_count: int) -> str:
    """Describe the change of roster: nodes that stay, leave and come."""
    left, came = seat_changes(previous, seats)
    if not previous:
        return f"forms with {format_node_count(len(seats))}"
    if not left and not came:
        return "keeps its node" if len(seats) == 1 else f"keeps all {format_node_count(len(seats))}"
    if not left:
        return f"grows to {format_node_count(len(seats))} with {join_names(came)}"
    if len(came) >= len(left):
        return f"takes {join_names(came)} in place of {join_names(left)}"
    taken = f"takes {join_names(came)} and " if came else ""
    return f"{taken}goes on with {len(seats)} of {max(max_count, len(previous))} nodes, without {join_names(left)}"


def ineligible_reason(state: FleetState, job: JobRecord, node: str, keep_seated: Collection[str] = ()) -> str:
    """Return why a node cannot be in the job's next roster; "" if it can. A node computes for one job at a time."""
    words = unfit_reason(state, job, node, keep_seated)
    if words or (job.is_running and job.has_seat(node)):
        return words
    owner = other_owner(state, job, node)
    return f"it computes for job {owner.job}" if owner is not None else ""


def unfit_reason(state: FleetState, job: JobRecord, node: str, keep_seated: Collection[str] = ()) -> str:
    """Return what in the node or its launcher keeps it out of the next roster, whatever other jobs do; "" for nothing.

    A suspect node may keep its seat but gets no new one. Nodes in ``keep_seated`` may keep theirs in any state.
    """
    launcher, record = job.membership.launchers.get(node), state.nodes.get(node)
    if launcher is None:
        return f"no launcher on it has joined {job.job}"
    if node in job.membership.excluded_nodes:
        return job.membership.excluded_nodes[node]
    if not launcher.usable:
        return launcher.unusable_reason
    if record is None:
        return "its agent has not registered"
    if node not in state.liveness.reachable_nodes:
        return record.sentence or "it is out of reach"
    if state.node_runtime[node].disconnected_at is not None:
        return "its agent's connection is closed"
    seated = job.has_seat(node)
    running = seated and job.is_running
    if not running and node in state.rejoin_window.unseen_nodes:
        return "it has not contacted this controller since the controller started"
    stays = node in keep_seated or (running and record.state is NodeState.SUSPECT)
    if record.state is not NodeState.HEALTHY and not stays:
        return record.sentence or f"it is {record.state}"
    if not seated and not launcher.has_rejoined:
        return "its agent restarted, and its launcher has not rejoined yet"
    if job.spec.block_within and not domain_of(record.identity.domain, job.spec.block_within):
        return f"it names no {job.spec.block_within}, and the job's blocks stay within one"
    return ""


def other_owner(state: FleetState, job: JobRecord, node: str) -> JobRecord | None:
    """Return another running job whose roster contains the node."""
    name = state.job_by_node.get(node)
    return state.jobs[name] if name is not None and name != job.job else None


def claimed_by_priority(state: FleetState, job: JobRecord, rosters: RostersByJob | None = None) -> dict[str, JobRecord]:
    """Return the nodes that jobs of higher priority have or take next, with these jobs."""
    rosters = {} if rosters is None else rosters
    rivals: dict[str, None] = {}
    for node in job.membership.launchers:
        live = state.node_runtime.get(node)
        if live is not None and len(live.open_jobs) > 1:
            rivals.update(live.open_jobs)
    found: dict[str, JobRecord] = {}
    for name in rivals:
        rival = state.jobs[name]
        if rival.spec.priority <= job.spec.priority:
            continue
        if name not in rosters:
            rosters[name] = next_seats(state, rival, rosters=rosters)
        seats = rosters[name]
        if len(seats) >= rival.min_seats:
            found |= dict.fromkeys(seats, rival)
    return found


def eligible_nodes(
    state: FleetState,
    job: JobRecord,
    without: Collection[str] = (),
    rosters: RostersByJob | None = None,
    keep_seated: Collection[str] = (),
) -> list[str]:
    """Return nodes for the next roster as they fill free seats: members first, then spares, doubtful ones last."""
    seated = job.generation.seated_nodes if job.generation is not None else frozenset()
    gone = claimed_by_priority(state, job, rosters)
    stay: list[str] = []
    others: list[str] = []
    doubted: list[str] = []
    for node in job.membership.launchers:
        if node in without or ineligible_reason(state, job, node, keep_seated):
            continue
        if node in seated and (job.is_running or node not in gone):
            (stay if state.nodes[node].state is NodeState.HEALTHY else doubted).append(node)
        elif node not in gone:
            others.append(node)

    def order(node: str) -> tuple[bool, float]:
        """Return the key by deferral and by the logarithm of ``offences.offender_score``, up to a constant."""
        history, half_life_s = state.nodes[node].history, state.policy.offenders.half_life_s
        score = math.log2(history.offence_score) if history.offence_score else -math.inf
        return _is_eviction_deferred(state, node), score + history.offence_score_at / half_life_s

    return [*stay, *sorted(others, key=order), *doubted]


def _is_eviction_deferred(state: FleetState, node: str) -> bool:
    """Return whether the node serves only because something defers its eviction."""
    return bool(state.nodes[node].health.deferred_eviction_key)


def spares(state: FleetState, job: JobRecord) -> list[str]:
    """Return eligible nodes outside the current roster."""
    seated = job.generation.seated_nodes if job.generation is not None else frozenset()
    if job.membership.launchers.keys() <= seated:  # the usual case, and asked for by every look at the fleet
        return []
    return eligible_nodes(state, job, without=seated)


def next_seats(
    state: FleetState,
    job: JobRecord,
    without: Collection[str] = (),
    rosters: RostersByJob | None = None,
    keep_seated: Collection[str] = (),
) -> list[str]:
    """Return the roster of whole blocks that the job would get now, without the nodes in ``without``.

    Replaced stragglers, and spares with a deferred eviction, are used only up to the minimum: a slow node delays all
    others, a missing one costs only its own share. ``rosters`` caches the rosters of jobs with higher priority;
    ``keep_seated`` is as in ``unfit_reason``.
    """
    able = eligible_nodes(state, job, without, rosters, keep_seated)
    least = job.min_seats
    unheld = [node for node in able if job.has_seat(node) or not _is_eviction_deferred(state, node)]
    swift = [node for node in unheld if node not in job.membership.replaced_stragglers]
    seats = seats_among(state, job, swift)
    if len(seats) < least and len(swift) < len(unheld):
        seats = seats_among(state, job, unheld)
    if len(seats) < least and len(unheld) < len(able):
        return seats_among(state, job, able, least)
    return seats


def seats_among(state: FleetState, job: JobRecord, eligible: Sequence[str], max_count: int | None = None) -> list[str]:
    """Return the roster made of ``eligible``: at most ``max_count`` nodes, or as many as the job may have."""
    within, domains = job.spec.block_within, None
    if within:
        domains = {node: domain_of(state.nodes[node].identity.domain, within) for node in eligible}
    max_count = job.max_seats if max_count is None else max_count
    return choose_seats(job.seats, eligible, max_count, job.spec.block_nodes, domains)


def jobs_seated_on(state: FleetState, node: str) -> list[JobRecord]:
    """Return the jobs whose current or outgoing roster contains the node."""
    jobs = (state.jobs[name] for name in state.node_runtime[node].jobs)
    return [job for job in jobs if job.is_seated(node)]


def is_computing(state: FleetState, node: str) -> bool:
    """Return whether a running job has a seat on the node."""
    return any(job.is_running for job in jobs_seated_on(state, node))


def no_seat_reason(state: FleetState, job: JobRecord, node: str, claims: Mapping[str, JobRecord] | None = None) -> str:
    """Return why the node has no seat in the current roster ("" if it has one), for known ``claims`` of others."""
    if job.has_seat(node) and job.status.state is not JobState.PAUSED:
        return ""
    words = ineligible_reason(state, job, node)
    if words:
        return words
    rival = (claimed_by_priority(state, job) if claims is None else claims).get(node)
    if rival is not None:
        return f"job {rival.job} comes first (priority {rival.spec.priority} over {job.spec.priority})"
    if job.is_ended:
        return f"the job is {job.status.state}"
    seats = next_seats(state, job)
    if len(seats) < job.min_seats:
        return f"the job needs {format_node_count(job.min_seats)} and would have {len(seats)}{_whole_blocks(job)}"
    if node in seats:
        return "it gets a seat at the next boundary" if job.is_running else "the job is about to form"
    if node in job.membership.replaced_stragglers:
        reason = job.membership.replaced_stragglers[node]
        return f"{reason}; it is used again only if the job would otherwise fall below its minimum"
    if _is_eviction_deferred(state, node) and not job.has_seat(node):
        return "its eviction is deferred; it is used only if the job would otherwise fall below its minimum"
    if len(seats) < job.max_seats:
        return f"no further block can be made with it{_whole_blocks(job)}"
    return f"it is a spare: the job has its {format_node_count(job.max_seats)}"


def _whole_blocks(job: JobRecord) -> str:
    spec = job.spec
    if spec.block_nodes == 1:
        return ""
    within = f" within one {spec.block_within}" if spec.block_within else ""
    return f" (blocks of {spec.block_nodes} nodes{within} stay whole)"
