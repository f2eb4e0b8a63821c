"""Plan failure domains: power units, switches, blocks within a rack or a switch, and a third copy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from everstep.wire.v1.agent import Domain
from everstep_controller.core.records import min_seats
from everstep_controller.core.seats.membership import domain_of, spec_error
from tests.sim.faults.kinds import FAULTS_BEGIN_S, FAULTS_END_S, Fault

if TYPE_CHECKING:
    from tests.sim.faults.plan import JobPlan, MachinePlan, Plan

TOPOLOGY_SHARE = 0.25
"""Share of the worlds with these failure domains."""


def with_topology(rng: random.Random, plan: Plan) -> Plan:
    """Return the same world with other failure domains, blocks and copies."""
    machines = plan.machines
    if rng.random() < 0.5:
        machines = _with_switches(rng, machines)
    if rng.random() < 0.8:
        machines = _with_power_units(rng, machines)
    if rng.random() < 0.15:  # the last machine's switch and power unit are not configured
        machines = (*machines[:-1], _with_domain(machines[-1], switch="", power=""))
    domains = {machine.name: machine.domain for machine in machines}
    jobs = tuple(_with_third_copy(rng, _with_blocks(rng, job, domains)) for job in plan.jobs)
    return type(plan)(**{**plan.__dict__, "machines": machines, "jobs": jobs})


def _with_domain(machine: MachinePlan, **names: str) -> MachinePlan:
    return type(machine)(**{**machine.__dict__, "domain": msgspec.structs.replace(machine.domain, **names)})


def _with_switches(rng: random.Random, machines: tuple[MachinePlan, ...]) -> tuple[MachinePlan, ...]:
    """Assign switches that do not follow the racks."""
    width = rng.randint(2, 4)
    return tuple(_with_domain(machine, switch=f"switch{index // width}") for index, machine in enumerate(machines))


def _with_power_units(rng: random.Random, machines: tuple[MachinePlan, ...]) -> tuple[MachinePlan, ...]:
    """Assign a few power units, each to adjacent machines or to every n-th machine."""
    units, are_adjacent = rng.randint(2, 4), rng.random() < 0.5
    width = -(-len(machines) // units)
    return tuple(
        _with_domain(machine, power=f"power{index // width if are_adjacent else index % units}")
        for index, machine in enumerate(machines)
    )


def _with_blocks(rng: random.Random, job: JobPlan, domains: dict[str, Domain]) -> JobPlan:
    """Ask for blocks of two nodes within a rack or a switch, if the job's machines can form enough blocks."""
    within, has_blocks = rng.choice(("rack", "switch")), rng.random() < 0.6
    most = max(job.spec.max_nodes, rng.choice((2, min(4, len(job.nodes)), min(6, len(job.nodes)))))
    spec = msgspec.structs.replace(job.spec, block_nodes=2, block_within=within, max_nodes=most)
    if not has_blocks or spec_error(spec):
        return job
    free_nodes = Counter(name for node in job.nodes if (name := domain_of(domains[node], within)))
    if 2 * sum(count // 2 for count in free_nodes.values()) < min_seats(spec):
        return job
    return type(job)(**{**job.__dict__, "spec": spec})


def _with_third_copy(rng: random.Random, job: JobPlan) -> JobPlan:
    has_third_copy, most = rng.random() < 0.7, max(job.spec.max_nodes, min(len(job.nodes), rng.randint(3, 6)))
    if not has_third_copy or job.spec.replicas != 2 or most < 3:
        return job
    return type(job)(**{**job.__dict__, "spec": msgspec.structs.replace(job.spec, replicas=3, max_nodes=most)})


def topology_faults(rng: random.Random, plan: Plan) -> Iterator[Fault]:
    """Yield faults of several machines at once: of a power unit, or of two machines of a job."""
    for _ in range(rng.randint(1, 3)):
        at, seconds = rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S), rng.uniform(4.0, 15.0)
        job = rng.choice(plan.jobs)
        seats = job.nodes[: job.spec.max_nodes]
        if rng.random() < 0.4:
            yield Fault(at, "lose_power_unit", rng.choice(seats), seconds)
        else:
            for node in rng.sample(seats, min(2, len(seats))):
                yield Fault(at, "lose_power", node, seconds)
