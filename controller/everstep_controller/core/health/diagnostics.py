"""Probes of nodes: asked for, reported, timed out; and who is good enough to be a partner."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, islice

import msgspec

from everstep.vocabulary import Finding, JobState, NodeState, ProbeKind, Severity
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished
from everstep_controller.core import records
from everstep_controller.core.jobs.membership import jobs_seated_on
from everstep_controller.core.policy import SecondPass
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import Case, FleetState, Probe
from everstep_controller.core.transition import Turn

PARTNERS_CONSIDERED = 32
"""How many good partners are compared: a bound on the work, whatever the fleet's size."""
MANY_NODES = 512
"""A larger fleet is not always looked at from its first node on."""
PARTNERLESS_S = 0.5
"""Seconds for which nobody looks through the whole fleet again once no partner was free."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a probe ended. ``failure``: in a sentence, empty where it passed. ``wrong``: the work was done, with a wrong
    result. ``mute``: somebody did not answer in time, which proves nothing. ``unable``: who could not run it, which
    proves nothing either. ``slow``: it passed, too slowly."""

    name: str
    probe: Probe
    failure: str = ""
    wrong: bool = False
    mute: bool = False
    unable: str = ""
    slow: bool = False


def start_probe(
    turn: Turn,
    nodes: tuple[str, ...],
    *,
    candidate: str | None,
    backend: str = "gloo",
    kind: ProbeKind = ProbeKind.ALL_REDUCE,
    case: str = "",
) -> str:
    """Sends the probe to all of ``nodes``; the first hosts its store. Returns the probe's id."""
    state = turn.state
    state.fleet.probes += 1
    turn.fleet_changed()
    name = f"probe-{state.fleet.probes}"
    due = turn.now + turn.policy.probe_timeout_s
    state.probes[name] = Probe(nodes=nodes, candidate=candidate, due=due, trace=turn.trace, kind=kind, case=case)
    host = state.nodes[nodes[0]].vault.rpartition(":")[0]
    body = RunProbe(
        probe=name,
        nodes=nodes,
        store=f"{host}:0",
        backend=backend,
        timeout_s=turn.policy.probe_timeout_s / 2,
        trace=turn.trace,
        kind=kind,
    )
    if candidate is not None:
        body = msgspec.structs.replace(body, sizes=turn.policy.probe_sizes)
    for node in nodes:
        turn.send(node, body)
    turn.audit("probe.started", f"{name}: {_what(kind)} {', '.join(nodes)}", node=candidate)
    turn.wake(due, "probe", name)
    return name


def _what(kind: ProbeKind) -> str:
    return "all-reduce between" if kind is ProbeKind.ALL_REDUCE else f"{kind} check of"


def take_result(turn: Turn, node: str, report: ProbeFinished) -> Outcome | None:
    """Counts one side's result; the outcome, once the last one is in, or one that says how it ended.

    Who failed may have waited for one that could not run the probe, and tells so later: only when every side has
    begun does a failure speak of the nodes.
    """
    probe = turn.state.probes.get(report.probe)
    if probe is None or node not in probe.nodes:
        turn.ignore("probe_finished.unknown")
        return None
    rows = {f"{size}": f"{latency:.6f} s, {rate / 1e9:.3f} GB/s" for size, latency, rate in report.rows}
    slow = _slow(turn, probe, report)
    unable = not (report.ok or report.began or report.wrong)
    how = "passed" if report.ok and not slow else f"failed: {slow or report.detail}"
    how = f"could not run it: {report.detail}" if unable else how
    sentence = f"{report.probe}: {node} {how}"
    turn.audit("probe.result", sentence, node=node, trace=probe.trace, data=rows)
    _enter(turn, node, sentence, rows)
    if report.ok and not slow:
        probe.passed.add(node)
    else:
        probe.failed.setdefault(node, sentence)
    if not (unable or slow or report.wrong) and len(probe.passed | probe.failed.keys()) < len(probe.nodes):
        return None
    del turn.state.probes[report.probe]
    first = sentence if unable else next(iter(probe.failed.values()), "")
    return Outcome(
        name=report.probe,
        probe=probe,
        failure=first and f"{first} ({' with '.join(probe.nodes)})",
        wrong=report.wrong,
        unable=node if unable else "",
        slow=bool(slow),
    )


def _slow(turn: Turn, probe: Probe, report: ProbeFinished) -> str:
    least = turn.policy.slow_link_bytes_per_s
    if not report.ok or not report.rows or probe.kind is not ProbeKind.ALL_REDUCE:
        return ""
    size, _, rate = max(report.rows)
    return f"slow, {rate / 1e9:.3f} GB/s of {least / 1e9:g} at {size} bytes" if rate < least else ""


def _enter(turn: Turn, node: str, sentence: str, rows: dict[str, str]) -> None:
    records.enter(turn.state.nodes[node], turn.now, "probe", sentence, rows)
    turn.node_changed(node)


def overdue(turn: Turn, name: str) -> Outcome | None:
    """At a probe's deadline: who did not answer; None when it has ended."""
    probe = turn.state.probes.get(name)
    if probe is None or turn.now < probe.due:
        return None
    del turn.state.probes[name]
    mute = ", ".join(node for node in probe.nodes if node not in probe.passed and node not in probe.failed)
    sentence = f"{name}: no result from {mute} within {turn.policy.probe_timeout_s:g} s"
    turn.audit("probe.overdue", sentence, node=probe.candidate, trace=probe.trace)
    for node in probe.nodes:
        _enter(turn, node, sentence, {})
    return Outcome(name=name, probe=probe, failure=sentence, mute=True)


# --- partners ----------------------------------------------------------------------------------------------------


def is_known_good(state: FleetState, record: NodeRecord) -> bool:
    """Whether a node may be the measure for others: it serves, answers, nothing grave stands against it, and nobody
    suspects it now."""
    if (
        record.state is not NodeState.HEALTHY
        or not record.reachable
        or state.live_nodes[record.node].gone_at is not None
    ):
        return False
    standing = record.known()
    if any(finding.severity is Severity.CRITICAL for finding in standing) or record.undecided:
        return False
    return not any(record.node in case.suspects for case in state.cases.values())


def partner_for(turn: Turn, node: str, attempt: int, avoid: Collection[str] = ()) -> tuple[str | None, bool]:
    """A node known to be good, for a probe with ``node``: of another rack before its own, idle before busy, another one
    at each ``attempt``. And, where there is none, whether that is only because all of them take part in probes now.

    Looks at few nodes where many are good; where none is free, at all of them, but not for each node that waits.
    """
    state = turn.state
    if turn.now < state.partnerless_until:
        return None, True
    taken = {member for probe in state.probes.values() for member in probe.nodes}
    names = list(state.nodes)
    start = state.fleet.probes * PARTNERS_CONSIDERED % len(names) if len(names) > MANY_NODES else 0
    rack, busy, ideal, attempt = state.nodes[node].domain.rack, False, 0, attempt % PARTNERS_CONSIDERED
    choice: list[tuple[bool, bool, int, str]] = []
    for other in chain(islice(names, start, None), islice(names, start)):
        if other == node or other in avoid or not is_known_good(state, state.nodes[other]):
            continue
        if other in taken:
            busy = True
            continue
        seated = any(job.state is JobState.RUNNING for job in jobs_seated_on(state, other))
        near = bool(rack) and state.nodes[other].domain.rack == rack
        choice.append((near, seated, len(choice), other))
        ideal += not near and not seated
        if ideal > attempt or len(choice) == PARTNERS_CONSIDERED:
            break
    if not choice and busy:
        state.partnerless_until = turn.now + PARTNERLESS_S
    if not choice:
        return None, busy
    ordered = sorted(choice)
    return ordered[attempt % len(ordered)][3], False


# ---- second pass
# Whose fault is it, where a first look accuses two? Each suspect is tried apart, against what is known to be good.
#
# A pair that failed: each of the two is probed with another partner, one known to be good. Suspects are never paired
# with
# one another. Digests that differ: each node does work whose result is known.

MOST_TRIES = 3
"""Probes of one suspect: its partner may fall ill during one."""


def suspected(turn: Turn, node: str) -> bool:
    """Whether the node is a suspect of a case that is not settled."""
    return any(node in case.suspects for case in turn.state.cases.values())


def open_case(
    turn: Turn, kind: SecondPass, findings: dict[str, Finding], what: str, job: str = "", unable: str = ""
) -> Case | None:
    """Begins to try the nodes of ``findings``; None where one of them is being tried already. ``unable``: who could not
    run such a probe, and is no partner.

    What comes of it is for whoever handles the deadline ``case`` and the probes' results.
    """
    if any(suspected(turn, node) for node in findings):
        return None
    case = Case(
        kind=kind,
        suspects=tuple(findings),
        findings=findings,
        what=what,
        due=turn.now + MOST_TRIES * turn.policy.probe_timeout_s,
        trace=turn.trace,
        job=job,
        unable={unable: None} if unable else {},
    )
    name = f"case-{turn.state.fleet.probes + 1}-{next(iter(findings))}"  # two may begin before the next probe does
    turn.state.cases[name] = case
    words = f"{what}: a second pass of {', '.join(findings)} will tell"
    turn.audit("second_pass.begun", words, job=job or None, data={"case": name})
    turn.wake(case.due, "case", name)
    for node in findings:
        _try(turn, name, case, node)
    if is_over(case):
        turn.wake(turn.now, "case", name)
    return case


def look_again(turn: Turn, name: str) -> Case | None:
    """At a case's deadline: tries who still waits for a partner, or gives up. The case where it is known."""
    case = turn.state.cases.get(name)
    if case is None:
        return None
    for node in _open(case):
        if turn.now >= case.due:
            case.unknown[node] = f"{node} was not tried in time"
        elif not any(probe.case == name and probe.candidate == node for probe in turn.state.probes.values()):
            _try(turn, name, case, node)
    return case


def took(turn: Turn, outcome: Outcome) -> Case | None:
    """A suspect's probe has ended. A partner that could not run it, or fell ill meanwhile, proves nothing: another one
    is taken."""
    case, node = turn.state.cases.get(outcome.probe.case), outcome.probe.candidate
    if case is None or node is None or node not in _open(case):
        return None
    partners = [other for other in outcome.probe.nodes if other != node]
    if not outcome.failure:
        case.passed[node] = outcome.name
    elif outcome.unable in partners and case.tries[node] < MOST_TRIES:
        case.unable[outcome.unable] = None
        _try(turn, outcome.probe.case, case, node)
    elif outcome.mute or outcome.unable or (case.kind is SecondPass.COMPUTE and not outcome.wrong):
        case.unknown[node] = outcome.failure
    elif all(is_known_good(turn.state, turn.state.nodes[other]) for other in partners):
        case.failed[node] = outcome.failure
    elif case.tries[node] >= MOST_TRIES:
        case.unknown[node] = outcome.failure
    else:
        _try(turn, outcome.probe.case, case, node)
    return case


def is_over(case: Case) -> bool:
    """Whether nothing more will be known."""
    return not _open(case)


def close(turn: Turn, case: Case) -> None:
    """Forgets the case; its suspects may be partners again."""
    turn.state.cases = {name: other for name, other in turn.state.cases.items() if other is not case}


def _open(case: Case) -> list[str]:
    return [n for n in case.suspects if n not in case.failed and n not in case.passed and n not in case.unknown]


def _try(turn: Turn, name: str, case: Case, node: str) -> None:
    if node not in turn.state.reachable:
        case.unknown[node] = f"{node} is out of reach"
        return
    tries = case.tries.get(node, 0)
    if case.kind is SecondPass.COMPUTE:
        start_probe(turn, (node,), candidate=node, kind=ProbeKind.COMPUTE, case=name)
    else:
        partner, busy = partner_for(turn, node, tries, (*case.suspects, *case.unable))
        if partner is None and busy:
            turn.wake(turn.now + turn.policy.partner_wait_s, "case", name)
            return
        if partner is None:
            but = f" ({', '.join(case.unable)} could not run the probe)" if case.unable else ""
            case.unknown[node] = f"there is no good partner to try {node} with{but}"
            return
        start_probe(turn, (partner, node), candidate=node, case=name)
    case.tries[node] = tries + 1
