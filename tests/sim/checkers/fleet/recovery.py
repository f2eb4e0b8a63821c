"""Check that after the last fault every job runs on all nodes that it may have, and every machine is healthy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.training import JobSpec
from tests.sim.checkers.checker import Checker, Handlers
from tests.sim.cluster.observations import BatchWritten

REQUIRED_COMMITS = 2
"""Commits of each running job after the last fault."""


class Recovery(Checker):
    """Find the first job or machine that has not recovered. A job that ended has recovered."""

    name = "recovery"

    def __init__(self) -> None:
        self._commits: dict[str, int] = {}
        self._commits_at_end: dict[str, int] | None = None

    def handlers(self) -> Handlers:
        return {BatchWritten: self._on_write}

    def _on_write(self, write: BatchWritten) -> None:
        for (job, _, _), row in write.batch.versions.items():
            self._commits[job] = self._commits.get(job, 0) + (row.audited_at is None)

    def remaining_problem(self) -> str:
        if self._commits_at_end is None:
            self._commits_at_end = dict(self._commits)
        leader = self.world.leader()
        if leader is None:
            return "no controller leads"
        state = leader.state
        for name in self.world.machines:
            record = state.nodes.get(name)
            if record is None:
                return f"{name} is unknown"
            if record.state is not NodeState.HEALTHY:
                return f"{name} is {record.state}: {record.sentence}"
        for name, plan in self.world.jobs.items():
            if problem := self._job_problem(name, plan.nodes):
                return f"job {name} {problem}"
        return ""

    def _job_problem(self, name: str, nodes: tuple[str, ...]) -> str:
        leader = self.world.leader()
        assert leader is not None
        assert self._commits_at_end is not None
        job = leader.state.jobs.get(name)
        if job is None:
            return "is unknown"
        if job.status.state in (JobState.FINISHED, JobState.FAILED):
            return ""
        block = job.spec.block_nodes
        required_nodes = -(-job.spec.min_nodes // block) * block
        idle = [node for node in nodes if node not in self._seated()]
        if job.status.state is not JobState.RUNNING or job.generation is None:
            return (
                f"is {job.status.state}: {job.status.sentence}"
                if self._whole_blocks(job.spec, idle) * block >= required_nodes
                else ""
            )
        seats = {member.node for member in job.generation.roster}
        # A replaced straggler gets a seat only if the job cannot run without it.
        free = [node for node in idle if node not in job.membership.replaced_stragglers]
        possible_blocks = min(job.spec.max_nodes // block, self._whole_blocks(job.spec, [*seats, *free]))
        if possible_blocks * block > len(seats):
            return f"runs on {len(seats)} nodes, and {', '.join(idle)} are idle"
        if job.progress.resumed_at is None or job.outgoing_generation is not None:
            return f"has not resumed in generation {job.generation.number}"
        if self._commits.get(name, 0) < self._commits_at_end.get(name, 0) + REQUIRED_COMMITS:
            return "commits nothing"
        return ""

    def _whole_blocks(self, spec: JobSpec, nodes: Collection[str]) -> int:
        """Return how many whole blocks these nodes can form within the job's domain."""
        domains = {node: self.world.machines[node].domain for node in nodes}
        names = [{"rack": d.rack, "switch": d.switch, "": "any"}[spec.block_within] for d in domains.values()]
        free_nodes = Counter(name for name in names if name)
        return sum(count // spec.block_nodes for count in free_nodes.values())

    def _seated(self) -> set[str]:
        """Return the nodes on which a job computes."""
        leader = self.world.leader()
        assert leader is not None
        specs = [job.generation for job in leader.state.jobs.values() if job.status.state is JobState.RUNNING]
        return {member.node for spec in specs if spec is not None for member in spec.roster}
