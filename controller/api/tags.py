"""Entity tags: what an order's If-Match is compared with.

A tag changes with whatever a decision could rest on, and not with each heartbeat. It is made of contents, not of a
count of changes, which would begin anew with every controller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from controller import policy_change, views
from controller.api import asgi
from controller.core import events as ev
from controller.core.holds import planned_for
from controller.core.policy import CorePolicy
from controller.core.records import JobRecord, NodeRecord
from everstep.wire.v1 import operator as op


def tag_of(document: Any) -> str:
    """The tag of a document."""
    return f'"{xxhash.xxh3_64_hexdigest(asgi.encode(document))}"'


def of_node(desk: views.Desk, record: NodeRecord) -> str:
    return tag_of((record, planned_for(desk.state, record)))


def of_job(job: JobRecord) -> str:
    numbers = (job.last_number, job.leaving.number if job.leaving else 0)
    return tag_of((job.job, job.created_at, job.state, job.since, job.size, job.sentence, numbers, list(job.launchers)))


def of_shown(job: op.JobDetail) -> str:
    """Of what is shown of a job beside what an order rests on: versions are committed twice a second, and an order that
    was decided a moment before is still meant. How far its ranks are is no part of it."""
    summary = job.summary
    return tag_of((summary.committed, summary.verified, summary.spares, job.recoveries, job.unable))


def node_lines(desk: views.Desk, summaries: Iterable[op.NodeSummary]) -> list[Any]:
    """What the tag of a page of nodes is made of: findings count by their keys, GPUs not at all. To be read in the same
    slice as the summaries."""
    nodes = desk.state.nodes
    return [
        (
            one.node,
            one.state,
            one.since,
            one.reason,
            one.job,
            one.domain,
            one.labels,
            one.hold,
            nodes[one.node].foreign,
            nodes[one.node].held_by,
            nodes[one.node].incarnation,
            list(nodes[one.node].findings),
            list(nodes[one.node].own),
            nodes[one.node].maintenance_until,
            planned_for(desk.state, nodes[one.node]),
        )
        for one in summaries
    ]


def of_nodes(lines: list[Any], total: int, following: str) -> str:
    """Of a page of nodes, with the cursor of the ``following`` one."""
    return tag_of((lines, total, following))


def of_rack(desk: views.Desk, rack: str) -> str:
    """That of ``GET /v1/nodes?rack=``."""
    found = views.nodes_found(desk, views.NodeFilter(rack=rack))
    page, following = views.page_of(found, "", views.LONGEST_PAGE)
    return of_nodes(node_lines(desk, views.node_summaries(desk, page)), len(found), following)


def of_budget(desk: views.Desk) -> str:
    """That of ``GET /v1/budget``: the breaker stands there, with what it holds."""
    return tag_of(views.budget_status(desk))


def of_policy(policy: CorePolicy) -> str:
    return tag_of(policy_change.document(policy))


def of_probes(probes: Iterable[op.ProbeStatus]) -> str:
    """Of all probes that are kept, whatever page is shown."""
    return tag_of(list(probes))


def of_subject(desk: views.Desk, order: ev.OperatorCommand) -> str:
    """Of what the order is about. One that does not exist has none; the order itself will be refused for that."""
    state = desk.state
    if order.kind is ev.OperatorAction.RESET_BREAKER:
        return of_budget(desk)
    if order.rack is not None:
        return of_rack(desk, order.rack)
    if order.node in state.nodes:
        return of_node(desk, state.nodes[order.node])
    return of_job(state.jobs[order.job]) if order.job in state.jobs else ""
