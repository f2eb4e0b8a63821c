"""Run probes of nodes, choose partners for them and isolate blame between suspects."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice

import msgspec

from everstep.vocabulary import Finding, NodeState, ProbeKind, Severity
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import HistoryKind, NodeRecord
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.state import BlameCase, DeadlineKind, FleetState, Probe
from everstep_controller.core.transition import Transition

MAX_PARTNERS_COMPARED = 32
"""Number of good partners compared; bounds the work for fleets of any size."""
LARGE_FLEET_NODES = 512
"""Above this size, the search for a partner does not always start at the first node."""
NO_PARTNER_CACHE_S = 0.5
"""Seconds for which the whole fleet is not searched again after no partner was free."""


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a probe."""

    probe_id: str
    probe: Probe
    failure: str = ""
    """Description of the failure; empty if the probe passed."""
    has_wrong_result: bool = False
    """True if the work was done with a wrong result."""
    timed_out: bool = False
    """True if a node did not answer in time, which proves nothing."""
    incapable_node: str = ""
    """Node that could not run the probe, which proves nothing either; empty for none."""
    is_slow: bool = False
    """True if the probe passed too slowly."""


def start_probe(
    transition: Transition,
    nodes: tuple[str, ...],
    *,
    tested_node: str | None,
    backend: str = "gloo",
    kind: ProbeKind = ProbeKind.ALL_REDUCE,
    case_id: str = "",
) -> str:
    """Send a probe to all of ``nodes``; the first one hosts its store. Return the probe's id."""
    state = transition.state
    state.fleet.probe_count += 1
    transition.mark_fleet_changed()
    name = f"probe-{state.fleet.probe_count}"
    due = transition.now + transition.policy.probes.timeout_s
    state.diagnostics.probes[name] = Probe(
        nodes=nodes, tested_node=tested_node, due=due, trace=transition.trace, kind=kind, case_id=case_id
    )
    host = state.nodes[nodes[0]].identity.vault.rpartition(":")[0]
    body = RunProbe(
        probe=name,
        nodes=nodes,
        store=f"{host}:0",
        backend=backend,
        timeout_s=transition.policy.probes.timeout_s / 2,
        trace=transition.trace,
        kind=kind,
    )
    if tested_node is not None:
        body = msgspec.structs.replace(body, sizes=transition.policy.probes.sizes)
    for node in nodes:
        transition.send(node, body)
    what = "all-reduce between" if kind is ProbeKind.ALL_REDUCE else f"{kind} check of"
    transition.log_event("probe.started", f"{name}: {what} {', '.join(nodes)}", node=tested_node)
    transition.schedule(due, DeadlineKind.PROBE, name)
    return name


def record_probe_result(transition: Transition, node: str, report: ProbeFinished) -> ProbeOutcome | None:
    """Record a node's result, and return the outcome once certain: failures only when every node has reported."""
    probe = transition.state.diagnostics.probes.get(report.probe)
    if probe is None or node not in probe.nodes:
        transition.count_ignored("probe_finished.unknown")
        return None
    rows = {f"{size}": f"{latency:.6f} s, {rate / 1e9:.3f} GB/s" for size, latency, rate in report.rows}
    slow = _describe_slow_link(transition, probe, report)
    unable = not (report.ok or report.started or report.wrong_result)
    how = "passed" if report.ok and not slow else f"failed: {slow or report.detail}"
    if unable:
        how = f"could not run the probe: {report.detail}"
    sentence = f"{report.probe}: {node} {how}"
    transition.log_event("probe.result", sentence, node=node, trace=probe.trace, data=rows)
    transition.append_history(node, HistoryKind.PROBE, sentence, rows)
    if report.ok and not slow:
        probe.passed.add(node)
    else:
        probe.failed.setdefault(node, sentence)
    if not (unable or slow or report.wrong_result) and len(probe.passed | probe.failed.keys()) < len(probe.nodes):
        return None
    del transition.state.diagnostics.probes[report.probe]
    first = sentence if unable else next(iter(probe.failed.values()), "")
    return ProbeOutcome(
        probe_id=report.probe,
        probe=probe,
        failure=first and f"{first} ({' with '.join(probe.nodes)})",
        has_wrong_result=report.wrong_result,
        incapable_node=node if unable else "",
        is_slow=bool(slow),
    )


def _describe_slow_link(transition: Transition, probe: Probe, report: ProbeFinished) -> str:
    least = transition.policy.probes.slow_link_bytes_per_s
    if not report.ok or not report.rows or probe.kind is not ProbeKind.ALL_REDUCE:
        return ""
    size, _, rate = max(report.rows)
    return f"slow, {rate / 1e9:.3f} GB/s of {least / 1e9:g} at {size} bytes" if rate < least else ""


def time_out_probe(transition: Transition, probe_id: str) -> ProbeOutcome | None:
    """At a probe's deadline, return the outcome that names the nodes without an answer; None if the probe has ended."""
    probe = transition.state.diagnostics.probes.get(probe_id)
    if probe is None or transition.now < probe.due:
        return None
    del transition.state.diagnostics.probes[probe_id]
    mute = ", ".join(node for node in probe.nodes if node not in probe.passed and node not in probe.failed)
    sentence = f"{probe_id}: no result from {mute} within {transition.policy.probes.timeout_s:g} s"
    transition.log_event("probe.overdue", sentence, node=probe.tested_node, trace=probe.trace)
    for node in probe.nodes:
        transition.append_history(node, HistoryKind.PROBE, sentence)
    return ProbeOutcome(probe_id=probe_id, probe=probe, failure=sentence, timed_out=True)


def is_known_good(state: FleetState, record: NodeRecord) -> bool:
    """Return whether a node can serve as reference: healthy, connected, no critical finding, not suspected."""
    if record.state is not NodeState.HEALTHY or not record.liveness.reachable:
        return False
    if state.node_runtime[record.node].disconnected_at is not None or record.health.undecided_findings:
        return False
    if any(finding.severity is Severity.CRITICAL for finding in record.all_findings()):
        return False
    return not any(record.node in case.suspects for case in state.diagnostics.blame_cases.values())


def find_partner(
    transition: Transition, node: str, attempt: int, avoid: Collection[str] = ()
) -> tuple[str | None, bool]:
    """Return a good node, preferably idle and in another rack, and whether all candidates are busy in probes."""
    state = transition.state
    if transition.now < state.diagnostics.no_partner_until:
        return None, True
    taken = {member for probe in state.diagnostics.probes.values() for member in probe.nodes}
    names = list(state.nodes)
    start = state.fleet.probe_count * MAX_PARTNERS_COMPARED % len(names) if len(names) > LARGE_FLEET_NODES else 0
    rack, busy, ideal, attempt = state.nodes[node].identity.domain.rack, False, 0, attempt % MAX_PARTNERS_COMPARED
    choice: list[tuple[bool, bool, int, str]] = []
    for other in chain(islice(names, start, None), islice(names, start)):
        if other == node or other in avoid or not is_known_good(state, state.nodes[other]):
            continue
        if other in taken:
            busy = True
            continue
        seated = any(job.is_running for job in jobs_seated_on(state, other))
        near = bool(rack) and state.nodes[other].identity.domain.rack == rack
        choice.append((near, seated, len(choice), other))
        ideal += not near and not seated
        if ideal > attempt or len(choice) == MAX_PARTNERS_COMPARED:
            break
    if not choice and busy:
        state.diagnostics.no_partner_until = transition.now + NO_PARTNER_CACHE_S
    if not choice:
        return None, busy
    ordered = sorted(choice)
    return ordered[attempt % len(ordered)][3], False


# Blame isolation
#
# Each suspect is tried separately against a known reference: after a failed pair with another partner known to be good,
# after differing digests by work with a known result.

MAX_TRIES = 3
"""Number of probes per suspect, because a partner may fail during one."""


def is_suspect(transition: Transition, node: str) -> bool:
    """Return whether the node is a suspect of an open case."""
    return any(node in case.suspects for case in transition.state.diagnostics.blame_cases.values())


def open_blame_case(
    transition: Transition,
    kind: BlameIsolationMethod,
    findings: dict[str, Finding],
    summary: str,
    job: str = "",
    incapable_partner: str = "",
) -> BlameCase | None:
    """Open a case on the nodes of ``findings``; return None if one of them is in a case already."""
    if any(is_suspect(transition, node) for node in findings):
        return None
    case = BlameCase(
        kind=kind,
        suspects=tuple(findings),
        findings=findings,
        summary=summary,
        due=transition.now + MAX_TRIES * transition.policy.probes.timeout_s,
        trace=transition.trace,
        job=job,
        incapable_partners={incapable_partner: None} if incapable_partner else {},
    )
    # the node's name keeps ids unique: two cases may begin before the next probe does
    name = f"case-{transition.state.fleet.probe_count + 1}-{next(iter(findings))}"
    transition.state.diagnostics.blame_cases[name] = case
    sentence = f"{summary}: {', '.join(findings)} are probed again to find the one at fault"
    transition.log_event("blame_isolation.started", sentence, job=job or None, data={"case": name})
    transition.schedule(case.due, DeadlineKind.BLAME_CASE, name)
    for node in findings:
        _probe_suspect(transition, name, case, node)
    if not open_suspects(case):
        transition.schedule(transition.now, DeadlineKind.BLAME_CASE, name)
    return case


def retry_blame_case(transition: Transition, case_id: str) -> BlameCase | None:
    """At a case's deadline, probe suspects that wait for a partner, or give up. Return the case if it is known."""
    case = transition.state.diagnostics.blame_cases.get(case_id)
    if case is None:
        return None
    for node in open_suspects(case):
        probes = transition.state.diagnostics.probes.values()
        if transition.now >= case.due:
            case.inconclusive[node] = f"{node} was not probed in time"
        elif (case_id, node) not in ((probe.case_id, probe.tested_node) for probe in probes):
            _probe_suspect(transition, case_id, case, node)
    return case


def record_blame_outcome(transition: Transition, outcome: ProbeOutcome) -> BlameCase | None:
    """Record the end of a suspect's probe, which is repeated if the partner was incapable or fell ill."""
    case, node = transition.state.diagnostics.blame_cases.get(outcome.probe.case_id), outcome.probe.tested_node
    if case is None or node is None or node not in open_suspects(case):
        return None
    partners = [other for other in outcome.probe.nodes if other != node]
    if not outcome.failure:
        case.passed[node] = outcome.probe_id
    elif outcome.incapable_node in partners and case.tries[node] < MAX_TRIES:
        case.incapable_partners[outcome.incapable_node] = None
        _probe_suspect(transition, outcome.probe.case_id, case, node)
    elif (
        outcome.timed_out
        or outcome.incapable_node
        or (case.kind is BlameIsolationMethod.COMPUTE and not outcome.has_wrong_result)
    ):
        case.inconclusive[node] = outcome.failure
    elif all(is_known_good(transition.state, transition.state.nodes[other]) for other in partners):
        case.failed[node] = outcome.failure
    elif case.tries[node] >= MAX_TRIES:
        case.inconclusive[node] = outcome.failure
    else:
        _probe_suspect(transition, outcome.probe.case_id, case, node)
    return case


def close_blame_case(transition: Transition, case: BlameCase) -> None:
    """Close the case, so that its suspects may be partners again."""
    cases = transition.state.diagnostics.blame_cases.items()
    transition.state.diagnostics.blame_cases = {name: other for name, other in cases if other is not case}


def open_suspects(case: BlameCase) -> list[str]:
    """Return the suspects without a result."""
    return [n for n in case.suspects if n not in case.failed and n not in case.passed and n not in case.inconclusive]


def _probe_suspect(transition: Transition, name: str, case: BlameCase, node: str) -> None:
    if node not in transition.state.liveness.reachable_nodes:
        case.inconclusive[node] = f"{node} is unreachable"
        return
    tries = case.tries.get(node, 0)
    if case.kind is BlameIsolationMethod.COMPUTE:
        start_probe(transition, (node,), tested_node=node, kind=ProbeKind.COMPUTE, case_id=name)
    else:
        partner, busy = find_partner(transition, node, tries, (*case.suspects, *case.incapable_partners))
        if partner is None and busy:
            transition.schedule(transition.now + transition.policy.probes.partner_wait_s, DeadlineKind.BLAME_CASE, name)
            return
        if partner is None:
            but = f" ({', '.join(case.incapable_partners)} could not run the probe)" if case.incapable_partners else ""
            case.inconclusive[node] = f"no known-good partner was available to probe {node}{but}"
            return
        start_probe(transition, (partner, node), tested_node=node, case_id=name)
    case.tries[node] = tries + 1
