"""Who is in the next roster. Pure choices: nothing here changes a record."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from controller.core.state import FleetState, JobRecord, LauncherRecord
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.training import GenerationSpec, Member


def seats_of(spec: GenerationSpec | None) -> list[str]:
    """The nodes of a roster, in the order of their ranks."""
    return list(dict.fromkeys(member.node for member in spec.roster)) if spec else []


def roster_of(seats: Sequence[str], nproc_per_node: int) -> tuple[Member, ...]:
    """``nproc_per_node`` consecutive ranks on each node."""
    return tuple(
        Member(rank=seat * nproc_per_node + local, node=node, local_rank=local)
        for seat, node in enumerate(seats)
        for local in range(nproc_per_node)
    )


def choose_seats(before: Sequence[str], able: Sequence[str], most: int) -> list[str]:
    """The next roster's nodes, at most ``most``.

    Survivors keep their order; who comes new takes the place, and so the rank numbers, of one that is lost, and only
    then a place at the end. ``able`` are all who may take part, in the order in which spares are to be used.
    """
    may = set(able)
    spares = [node for node in able if node not in set(before)]
    seats: list[str] = []
    survivors = sum(1 for node in before if node in may)
    for node in before:
        if node in may:
            seats.append(node)
        elif spares and survivors < most:
            seats.append(spares.pop(0))
            survivors += 1
    return (seats + spares)[:most]


def store_node(seats: Sequence[str], before: GenerationSpec | None) -> str:
    """Whose launcher hosts the store: where it was if that node stays, else the first that stays, else the first."""
    if before and before.store_node in seats:
        return before.store_node
    stayed = set(seats_of(before))
    return next((node for node in seats if node in stayed), seats[0])


def describe_change(before: Sequence[str], seats: Sequence[str], most: int) -> str:
    """What the roster does, in words: who stays, who leaves, who comes."""
    left = [node for node in before if node not in seats]
    came = [node for node in seats if node not in before]
    if not before:
        return f"forms with {_nodes(len(seats))}"
    if not left and not came:
        return f"keeps {_all(len(seats))}"
    if not left:
        return f"grows to {_nodes(len(seats))} with {', '.join(came)}"
    if len(came) >= len(left):
        return f"takes {', '.join(came)} in place of {', '.join(left)}"
    taken = f"takes {', '.join(came)} and " if came else ""
    return f"{taken}goes on with {len(seats)} of {max(most, len(before))} nodes, without {', '.join(left)}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _all(count: int) -> str:
    return "its node" if count == 1 else f"all {count} nodes"


# --- who may take part -------------------------------------------------------------------------------------------


def most_nodes(job: JobRecord) -> int:
    """The largest roster allowed now."""
    return job.spec.max_nodes if job.size is None else min(job.size, job.spec.max_nodes)


def may_take_part(state: FleetState, job: JobRecord, launcher: LauncherRecord, seated: Collection[str]) -> bool:
    """Whether a launcher's node may be in the next roster.

    A suspect node may stay where it is, but is not chosen anew: a refuted suspicion must leave no trace.
    """
    node = state.nodes.get(launcher.node)
    if node is None or not launcher.able or launcher.node in job.excluded or launcher.node not in state.reachable:
        return False
    if state.live_nodes[launcher.node].gone_at is not None:
        return False
    if launcher.node in seated:
        return node.state is NodeState.HEALTHY or (node.state is NodeState.SUSPECT and job.state is JobState.RUNNING)
    return node.state is NodeState.HEALTHY and launcher.confirmed


def able_nodes(state: FleetState, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """Every node that may be in the job's next roster, in order of joining."""
    seated = set(seats_of(job.generation))
    return [
        node
        for node, launcher in job.launchers.items()
        if node not in without and may_take_part(state, job, launcher, seated)
    ]


def spares(state: FleetState, job: JobRecord) -> list[str]:
    """Able nodes outside the current roster."""
    seated = set(seats_of(job.generation))
    return [node for node in able_nodes(state, job) if node not in seated]


def next_seats(state: FleetState, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """The roster the job would get now, leaving out ``without``."""
    return choose_seats(seats_of(job.generation), able_nodes(state, job, without), most_nodes(job))


def jobs_seated_on(state: FleetState, node: str) -> list[JobRecord]:
    """Jobs whose current, or still running, roster has the node."""
    jobs = (state.jobs[name] for name in state.live_nodes[node].jobs)
    return [job for job in jobs if node in seats_of(job.generation) or node in seats_of(job.leaving)]
