"""Who is in the next roster, and why others are not. Pure choices: nothing here changes a record."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from controller.core.blocks import choose_seats, domain_of, least_seats, most_seats
from controller.core.records import JobRecord, NodeRecord
from controller.core.state import FleetState
from controller.core.wording import named, nodes
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.training import GenerationSpec

ENDED = (JobState.FINISHED, JobState.FAILED)
Rosters = dict[str, list[str]]
"""By job the roster it would get now."""


# --- rosters -----------------------------------------------------------------------------------------------------


def seats_of(spec: GenerationSpec | None) -> tuple[str, ...]:
    """The nodes of a roster, in the order of their ranks."""
    return spec.seats if spec is not None else ()


def is_seated(job: JobRecord, node: str) -> bool:
    """Whether the node is in the current roster, or in the one that is being left at a boundary."""
    return any(spec is not None and node in spec.seated for spec in (job.generation, job.leaving))


def store_node(seats: Sequence[str], before: GenerationSpec | None) -> str:
    """Whose launcher hosts the store: where it was if that node stays, else the first that stays, else the first."""
    if before is None:
        return seats[0]
    if before.store_node in seats:
        return before.store_node
    return next((node for node in seats if node in before.seated), seats[0])


def moves(before: Sequence[str], seats: Sequence[str]) -> tuple[list[str], list[str]]:
    """Who leaves and who comes, each in the order of seats."""
    was, will = set(before), set(seats)
    return [node for node in before if node not in will], [node for node in seats if node not in was]


def describe_change(before: Sequence[str], seats: Sequence[str], most: int) -> str:
    """What the roster does, in words: who stays, who leaves, who comes."""
    left, came = moves(before, seats)
    if not before:
        return f"forms with {nodes(len(seats))}"
    if not left and not came:
        return "keeps its node" if len(seats) == 1 else f"keeps all {nodes(len(seats))}"
    if not left:
        return f"grows to {nodes(len(seats))} with {named(came)}"
    if len(came) >= len(left):
        return f"takes {named(came)} in place of {named(left)}"
    taken = f"takes {named(came)} and " if came else ""
    return f"{taken}goes on with {len(seats)} of {max(most, len(before))} nodes, without {named(left)}"


# --- who may take part -------------------------------------------------------------------------------------------


def least_nodes(job: JobRecord) -> int:
    """The smallest roster with which the job runs."""
    return least_seats(job.spec)


def most_nodes(job: JobRecord) -> int:
    """The largest roster allowed now: whole blocks, and never less than the smallest."""
    most = most_seats(job.spec)
    if job.size is None:
        return most
    block = job.spec.block_nodes
    return max(least_seats(job.spec), min(job.size // block * block, most))


def obstacle(state: FleetState, job: JobRecord, node: str, staying: Collection[str] = ()) -> str:
    """Why a node cannot be in the job's next roster; empty where it can.

    A node computes for one job at a time; between jobs that want it, ``promised`` decides.
    """
    words = unfit(state, job, node, staying)
    if words or (job.state is JobState.RUNNING and job.generation is not None and node in job.generation.seated):
        return words
    owner = owner_of(state, job, node)
    return f"it computes for job {owner.job}" if owner is not None else ""


def unfit(state: FleetState, job: JobRecord, node: str, staying: Collection[str] = ()) -> str:
    """What in the node or its launcher keeps it out of the job's next roster, whoever else computes on it.

    A suspect node may stay where it is, but is not chosen anew: a refuted suspicion must leave no trace. So may those
    that are ``staying`` in their seats, whatever their state.
    """
    launcher, record = job.launchers.get(node), state.nodes.get(node)
    if launcher is None:
        return f"no launcher on it has joined {job.job}"
    if node in job.excluded:
        return job.excluded[node]
    if not launcher.able:
        return launcher.why_not
    if record is None:
        return "its agent has not registered"
    if node not in state.reachable:
        return record.sentence or "it is out of reach"
    if state.live_nodes[node].gone_at is not None:
        return "its agent's connection is closed"
    seated = job.generation is not None and node in job.generation.seated
    running = seated and job.state is JobState.RUNNING
    if not running and node in state.unmet:
        return "this controller, which has just begun, has not heard it yet"
    stays = node in staying or (running and record.state is NodeState.SUSPECT)
    if record.state is not NodeState.HEALTHY and not stays:
        return record.sentence or f"it is {record.state}"
    if not seated and not launcher.confirmed:
        return "its agent began anew, and the launcher has not said so"
    if job.spec.block_within and not domain_of(record.domain, job.spec.block_within):
        return f"it names no {job.spec.block_within}, and the job's blocks stay within one"
    return ""


def owner_of(state: FleetState, job: JobRecord, node: str) -> JobRecord | None:
    """Another running job whose roster the node is in."""
    name = state.owners.get(node)
    return state.jobs[name] if name is not None and name != job.job else None


def promised(state: FleetState, job: JobRecord, worked_out: Rosters | None = None) -> dict[str, JobRecord]:
    """Nodes that jobs of a higher priority have or take next: those with which such a job runs, or grows."""
    worked_out = {} if worked_out is None else worked_out
    rivals: dict[str, None] = {}
    for node in job.launchers:
        live = state.live_nodes.get(node)
        if live is not None and len(live.open) > 1:
            rivals.update(live.open)
    found: dict[str, JobRecord] = {}
    for name in rivals:
        rival = state.jobs[name]
        if rival.spec.priority <= job.spec.priority:
            continue
        if name not in worked_out:
            worked_out[name] = next_seats(state, rival, worked_out=worked_out)
        seats = worked_out[name]
        if len(seats) >= least_nodes(rival):
            found |= dict.fromkeys(seats, rival)
    return found


def able_nodes(
    state: FleetState,
    job: JobRecord,
    without: Collection[str] = (),
    worked_out: Rosters | None = None,
    staying: Collection[str] = (),
) -> list[str]:
    """Every node that may be in the job's next roster, in the order in which a free seat is given to them.

    Those of the roster come first, a suspect one last. Of spares, those whose eviction is held come after all others,
    the clean go before repeat offenders, and who joined first before who came later.
    """
    seated = job.generation.seated if job.generation is not None else frozenset()
    gone = promised(state, job, worked_out)
    stay: list[str] = []
    others: list[str] = []
    doubted: list[str] = []
    for node in job.launchers:
        if node in without or obstacle(state, job, node, staying):
            continue
        if node in seated and (job.state is JobState.RUNNING or node not in gone):
            (stay if state.nodes[node].state is NodeState.HEALTHY else doubted).append(node)
        elif node not in gone:
            others.append(node)
    half_life_s = state.policy.offender_half_life_s
    others.sort(key=lambda node: (_is_held(state, node), _offences(state.nodes[node], half_life_s)))
    return [*stay, *others, *doubted]


def _is_held(state: FleetState, node: str) -> bool:
    """Whether it is convicted, and serves only since something holds its eviction."""
    return bool(state.nodes[node].overruled)


def _is_held_spare(state: FleetState, job: JobRecord, node: str) -> bool:
    return _is_held(state, node) and (job.generation is None or node not in job.generation.seated)


def _offences(record: NodeRecord, half_life_s: float) -> float:
    """Orders nodes as ``offenders.offender_score`` does at any time: its logarithm, without what all have in common."""
    return math.log2(record.offences) + record.offended_at / half_life_s if record.offences else -math.inf


def spares(state: FleetState, job: JobRecord) -> list[str]:
    """Able nodes outside the current roster."""
    return able_nodes(state, job, without=job.generation.seated if job.generation is not None else ())


def next_seats(
    state: FleetState,
    job: JobRecord,
    without: Collection[str] = (),
    worked_out: Rosters | None = None,
    staying: Collection[str] = (),
) -> list[str]:
    """The roster the job would get now, leaving out ``without``; whole blocks.

    Nodes that were replaced as stragglers are left out too, unless the job would fall below its minimum: one slow node
    costs all others its delay, one that is missing costs only its own share. So are, with more reason, spares whose
    eviction is held: of these the job takes no more than its minimum needs.

    ``worked_out``: what was found for jobs of higher priority on the way here, so that each is asked once. ``staying``:
    as of ``unfit``.
    """
    able = able_nodes(state, job, without, worked_out, staying)
    least, unheld = least_nodes(job), [node for node in able if not _is_held_spare(state, job, node)]
    swift = [node for node in unheld if node not in job.slow]
    seats = seats_among(state, job, swift)
    if len(seats) < least and len(swift) < len(unheld):
        seats = seats_among(state, job, unheld)
    if len(seats) < least and len(unheld) < len(able):
        return seats_among(state, job, able, least)
    return seats


def seats_among(state: FleetState, job: JobRecord, able: Sequence[str], most: int | None = None) -> list[str]:
    """The roster that can be made of ``able``: at most ``most`` nodes, or as many as the job may have."""
    within, domains = job.spec.block_within, None
    if within:
        domains = {node: domain_of(state.nodes[node].domain, within) for node in able}
    most = most_nodes(job) if most is None else most
    return choose_seats(seats_of(job.generation), able, most, job.spec.block_nodes, domains)


def jobs_seated_on(state: FleetState, node: str) -> list[JobRecord]:
    """Jobs whose current, or still running, roster has the node."""
    jobs = (state.jobs[name] for name in state.live_nodes[node].jobs)
    return [job for job in jobs if is_seated(job, node)]


def computes(state: FleetState, node: str) -> bool:
    """Whether a running job has a seat on the node."""
    return any(job.state is JobState.RUNNING for job in jobs_seated_on(state, node))


# --- reasons -----------------------------------------------------------------------------------------------------


def why_not(state: FleetState, job: JobRecord, node: str, promises: Mapping[str, JobRecord] | None = None) -> str:
    """Why the node has no seat in the job's current roster, in words; empty where it has one.

    ``promises``: ``promised`` for the job, where many nodes are asked about.
    """
    if job.generation is not None and node in job.generation.seated and job.state is not JobState.PAUSED:
        return ""
    words = obstacle(state, job, node)
    if words:
        return words
    rival = (promised(state, job) if promises is None else promises).get(node)
    if rival is not None:
        return f"job {rival.job} comes first (priority {rival.spec.priority} over {job.spec.priority})"
    if job.state in ENDED:
        return f"the job is {job.state}"
    seats = next_seats(state, job)
    if len(seats) < least_nodes(job):
        return f"the job needs {nodes(least_nodes(job))} and would have {len(seats)}{_whole_blocks(job)}"
    if node in seats:
        return "it gets a seat at the next boundary" if job.state is JobState.RUNNING else "the job is about to form"
    if node in job.slow:
        return f"{job.slow[node]}; it is taken again only where the job would fall below its minimum"
    if _is_held_spare(state, job, node):
        return "its eviction is held; it is taken only where the job would fall below its minimum"
    if len(seats) < most_nodes(job):
        return f"no further block can be made with it{_whole_blocks(job)}"
    return f"it is a spare: the job has its {nodes(most_nodes(job))}"


def _whole_blocks(job: JobRecord) -> str:
    spec = job.spec
    if spec.block_nodes == 1:
        return ""
    within = f" within one {spec.block_within}" if spec.block_within else ""
    return f" (blocks of {spec.block_nodes} nodes{within} stay whole)"
