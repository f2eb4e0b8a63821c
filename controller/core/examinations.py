"""Probes and second passes come to their end: who passed, who failed, who is convicted, who is told."""

from __future__ import annotations

from controller.core import corruption, holds, quarantine, second_pass
from controller.core.eviction import serving
from controller.core.own_findings import clear_own, forget_unseen, raise_own
from controller.core.pictures import look_again
from controller.core.probes import Outcome, overdue, take_result
from controller.core.rules import SecondPass
from controller.core.state import Case
from controller.core.turn import Turn
from controller.core.verdict import judge_settled
from everstep.vocabulary import Decision, Finding, FindingKind, NodeState, Severity
from everstep.wire.v1.training import ProbeFinished


def probe_reported(turn: Turn, node: str, report: ProbeFinished) -> None:
    """One side's result; the last one, or the first bad one, decides."""
    _conclude(turn, take_result(turn, node, report))


def check_probe(turn: Turn, name: str) -> None:
    """At a probe's deadline."""
    _conclude(turn, overdue(turn, name))


def check_case(turn: Turn, name: str) -> None:
    """At a second pass's deadline, or when a suspect of it waits for a partner."""
    _settle_if_over(turn, second_pass.look_again(turn, name))


def check_care(turn: Turn, node: str) -> None:
    """Whatever of a node's treatment may be due."""
    record = turn.state.nodes[node]
    holds.check_end(turn, node)
    if record.state is NodeState.HELD:
        holds.come_back(turn, node, f"nobody's word keeps {node} out any more")
    forget_unseen(turn, node)
    look_again(turn, node)
    if record.state is NodeState.QUARANTINED:
        quarantine.check_quarantine(turn, node)
        return
    if quarantine.may_be_tried(turn, node):
        quarantine.next_check(turn, node)
    quarantine.check_probation(turn, node)


def _conclude(turn: Turn, outcome: Outcome | None) -> None:
    if outcome is None:
        return
    if outcome.probe.candidate is None:
        if outcome.slow:
            _suspect_link(turn, outcome)
    elif outcome.probe.case:
        _settle_if_over(turn, second_pass.took(turn, outcome))
    else:
        quarantine.examined(turn, outcome)


def _suspect_link(turn: Turn, outcome: Outcome) -> None:
    """An all-reduce that a person asked for was slow: partners known to be good tell at which end."""
    for node in outcome.probe.nodes:
        peers = [other for other in outcome.probe.nodes if other != node]
        if not peers or not serving(turn, node):
            continue
        finding = Finding(
            kind=FindingKind.NETWORK_SLOW_LINK,
            subject=peers[0] if len(peers) == 1 else outcome.name,
            severity=Severity.WARNING,
            message=outcome.failure,
            since=turn.now,
            trace=turn.trace,
            evidence={"peer": peers[0]} if len(peers) == 1 else {},
        )
        raise_own(turn, node, finding, turn.policy.probe_retry_s)


def _settle_if_over(turn: Turn, case: Case | None) -> None:
    if case is None or not second_pass.is_over(case):
        return
    second_pass.close(turn, case)
    for node in case.suspects:
        record = turn.state.nodes[node]
        record.undecided = {key: why for key, why in record.undecided.items() if why != "second pass"}
        turn.node_changed(node)
    if case.kind is SecondPass.COMPUTE:
        corruption.case_settled(turn, case)
    else:
        _settle_pair(turn, case)
        for node in case.passed:
            own = turn.state.nodes[node].own
            clear_own(turn, node, [key for key, found in own.items() if found.kind is FindingKind.NETWORK_SLOW_LINK])


def _settle_pair(turn: Turn, case: Case) -> None:
    """Who fails with a partner known to be good is at fault; where nobody does, the link between is."""
    for node in case.suspects:
        state = turn.state.nodes[node].state
        if node in case.failed and serving(turn, node):
            _blame(turn, node, case.findings[node], f"{case.what}; with a good partner too: {case.failed[node]}")
        elif state is NodeState.PROBATION and turn.state.nodes[node].probe == quarantine.PROBE_WAITS:
            _settle_return(turn, case, node)
        elif node in case.unknown and serving(turn, node):
            words = f"{case.what}; {case.unknown[node]}, so nobody is convicted: a person is to look at {node}"
            turn.verdict(node, Decision.RECOMMEND, words, evidence=(case.findings[node],), trace=case.trace)
    if not case.failed and not case.unknown:
        others = " and ".join(case.suspects)
        blame = f"the link between {others} is suspected" if len(case.suspects) > 1 else f"{others} is cleared"
        words = f"{case.what}; with partners known to be good it passed: {blame}, and nobody is evicted"
        turn.audit("second_pass.nobody", words, trace=case.trace)


def _blame(turn: Turn, node: str, finding: Finding, proof: str) -> None:
    if finding.key in turn.state.nodes[node].findings:
        judge_settled(turn, node, finding, proof)
    else:
        raise_own(turn, node, finding, turn.policy.probe_retry_s, proof)


def _settle_return(turn: Turn, case: Case, node: str) -> None:
    """A suspect that is on its way back: it goes on, or stays out. To stay out without a proof is no offence."""
    if node in case.passed:
        quarantine.passed(turn, node)
    elif node in case.failed:
        quarantine.failed(turn, node, case.failed[node])
    else:
        quarantine.failed(turn, node, f"{case.what}; {case.unknown[node]}", offence=0.0)
