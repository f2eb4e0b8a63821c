"""Whose fault is it, where a first look accuses two? Each suspect is tried apart, against what is known to be good.

A pair that failed: each of the two is probed with another partner, one known to be good. Suspects are never paired with
one another. Digests that differ: each node does work whose result is known.
"""

from __future__ import annotations

from controller.core.probes import Outcome, is_known_good, partner_for, start_probe
from controller.core.rules import SecondPass
from controller.core.state import Case
from controller.core.turn import Turn
from everstep.vocabulary import Finding, ProbeKind

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
