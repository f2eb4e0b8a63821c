"""After the last fault everything comes right: every job runs with all it may have, every machine is healthy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.training import JobSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches

COMMITS_WANTED = 2


class Recovery(Checker):
    """``complaint`` says what is still missing; jobs that ended count as well."""

    name = "recovery"

    def __init__(self) -> None:
        self._committed: dict[str, int] = {}
        self._quiet: dict[str, int] | None = None

    def watches(self) -> Watches:
        return {facts.Durable: self._durable}

    def _durable(self, fact: facts.Durable) -> None:
        for (job, _, _), row in fact.batch.versions.items():
            self._committed[job] = self._committed.get(job, 0) + (row.audited_at is None)

    def complaint(self) -> str:
        if self._quiet is None:
            self._quiet = dict(self._committed)
        leader = self.world.leader()
        if leader is None:
            return "nobody leads"
        state = leader.state
        for name in self.world.machines:
            record = state.nodes.get(name)
            if record is None:
                return f"{name} is unknown"
            if record.state is not NodeState.HEALTHY:
                return f"{name} is {record.state}: {record.sentence}"
        for name, plan in self.world.jobs.items():
            if words := self._job(name, plan.nodes):
                return f"job {name} {words}"
        return ""

    def _job(self, name: str, nodes: tuple[str, ...]) -> str:
        leader = self.world.leader()
        assert leader is not None
        assert self._quiet is not None
        job = leader.state.jobs.get(name)
        if job is None:
            return "is unknown"
        if job.status.state in (JobState.FINISHED, JobState.FAILED):
            return ""
        block = job.spec.block_nodes
        least = -(-job.spec.min_nodes // block) * block
        idle = [node for node in nodes if node not in self._seated()]
        if job.status.state is not JobState.RUNNING or job.generation is None:
            return (
                f"is {job.status.state}: {job.status.sentence}"
                if self._whole_blocks(job.spec, idle) * block >= least
                else ""
            )
        seats = {member.node for member in job.generation.roster}
        free = [
            node for node in idle if node not in job.membership.replaced_stragglers
        ]  # a straggler is taken where the job cannot run without
        best = min(job.spec.max_nodes // block, self._whole_blocks(job.spec, [*seats, *free]))
        if best * block > len(seats):
            return f"runs on {len(seats)} nodes, and {', '.join(idle)} are idle"
        if job.progress.resumed_at is None or job.outgoing_generation is not None:
            return f"has not resumed in generation {job.generation.number}"
        if self._committed.get(name, 0) < self._quiet.get(name, 0) + COMMITS_WANTED:
            return "commits nothing"
        return ""

    def _whole_blocks(self, spec: JobSpec, nodes: Collection[str]) -> int:
        """How many can be made of these nodes, where their machines stand."""
        domains = {node: self.world.machines[node].domain for node in nodes}
        names = {"rack": lambda d: d.rack, "switch": lambda d: d.switch, "": lambda d: "any"}[spec.block_within]
        room = Counter(name for domain in domains.values() if (name := names(domain)))
        return sum(count // spec.block_nodes for count in room.values())

    def _seated(self) -> set[str]:
        """Nodes that some job computes on."""
        leader = self.world.leader()
        assert leader is not None
        specs = [job.generation for job in leader.state.jobs.values() if job.status.state is JobState.RUNNING]
        return {member.node for spec in specs if spec is not None for member in spec.roster}
