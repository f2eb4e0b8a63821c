"""Where machines stand, and what jobs ask of that: power units, blocks within a rack or a switch, a third copy."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from everstep_controller.core.jobs.membership import domain_of, spec_error
from everstep_controller.core.records import min_seats

from everstep.wire.v1.agent import Domain
from tests.sim.faults import FAULTS_BEGIN_S, FAULTS_END_S, Fault

if TYPE_CHECKING:
    from tests.sim.plan import JobPlan, MachinePlan, Plan

TERRAIN_SHARE = 0.25
"""Of worlds in which machines stand, or jobs are placed, as these draws say."""


def settle(rng: random.Random, plan: Plan) -> Plan:
    """The same world on another terrain."""
    machines = plan.machines
    if rng.random() < 0.5:
        machines = _switches(rng, machines)
    if rng.random() < 0.8:
        machines = _powered(rng, machines)
    if rng.random() < 0.15:  # somebody forgot to say where the last one stands
        machines = (*machines[:-1], _moved(machines[-1], switch="", power=""))
    domains = {machine.name: machine.domain for machine in machines}
    jobs = tuple(_third_copy(rng, _within(rng, job, domains)) for job in plan.jobs)
    return type(plan)(**{**plan.__dict__, "machines": machines, "jobs": jobs})


def _moved(machine: MachinePlan, **names: str) -> MachinePlan:
    return type(machine)(**{**machine.__dict__, "domain": msgspec.structs.replace(machine.domain, **names)})


def _switches(rng: random.Random, machines: tuple[MachinePlan, ...]) -> tuple[MachinePlan, ...]:
    """Switches that do not follow the racks."""
    width = rng.randint(2, 4)
    return tuple(_moved(machine, switch=f"switch{at // width}") for at, machine in enumerate(machines))


def _powered(rng: random.Random, machines: tuple[MachinePlan, ...]) -> tuple[MachinePlan, ...]:
    """A few units, each with machines that stand side by side, or with every so-manieth of them."""
    units, aside = rng.randint(2, 4), rng.random() < 0.5
    width = -(-len(machines) // units)
    return tuple(
        _moved(machine, power=f"power{at // width if aside else at % units}") for at, machine in enumerate(machines)
    )


def _within(rng: random.Random, job: JobPlan, domains: dict[str, Domain]) -> JobPlan:
    """Blocks of two nodes that share a rack or a switch, where the job's machines have room for as many as it needs."""
    within, asks = rng.choice(("rack", "switch")), rng.random() < 0.6
    most = max(job.spec.max_nodes, rng.choice((2, min(4, len(job.nodes)), min(6, len(job.nodes)))))
    spec = msgspec.structs.replace(job.spec, block_nodes=2, block_within=within, max_nodes=most)
    if not asks or spec_error(spec):
        return job
    room = Counter(name for node in job.nodes if (name := domain_of(domains[node], within)))
    if 2 * sum(count // 2 for count in room.values()) < min_seats(spec):
        return job
    return type(job)(**{**job.__dict__, "spec": spec})


def _third_copy(rng: random.Random, job: JobPlan) -> JobPlan:
    asks, most = rng.random() < 0.7, max(job.spec.max_nodes, min(len(job.nodes), rng.randint(3, 6)))
    if not asks or job.spec.replicas != 2 or most < 3:
        return job
    return type(job)(**{**job.__dict__, "spec": msgspec.structs.replace(job.spec, replicas=3, max_nodes=most)})


def of_terrain(rng: random.Random, plan: Plan) -> Iterator[Fault]:
    """What fails together: a power unit, or two machines of a job in the same moment."""
    for _ in range(rng.randint(1, 3)):
        at, seconds = rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S), rng.uniform(4.0, 15.0)
        job = rng.choice(plan.jobs)
        seats = job.nodes[: job.spec.max_nodes]
        if rng.random() < 0.4:
            yield Fault(at, "lose_power_unit", rng.choice(seats), seconds)
        else:
            for node in rng.sample(seats, min(2, len(seats))):
                yield Fault(at, "lose_power", node, seconds)
