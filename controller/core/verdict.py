"""From findings to decisions: each kind has its rule, and each decision its sentence."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.eviction import evict, needed_by, serving
from controller.core.generations import Cause
from controller.core.losses import node_left_jobs
from controller.core.quarantine import begin_quarantine, check_quarantine
from controller.core.turn import Turn
from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, Mode, NodeState, Severity

CONVICTS = frozenset({FindingKind.GPU_LOST, FindingKind.DIGEST_MISMATCH})
"""Critical findings of these kinds evict whatever cure they name."""

CONVICTS_BY_ACTION = frozenset(
    {
        FindingKind.GPU_XID,
        FindingKind.GPU_RECOVERY_ACTION,
        FindingKind.GPU_ECC_UNCORRECTABLE,
        FindingKind.GPU_ROW_REMAP_FAILURE,
        FindingKind.GPU_RETIRED_PAGES,
        FindingKind.GPU_TEMPERATURE,
        FindingKind.GPU_PCIE_LINK,
        FindingKind.GPU_NVLINK,
        FindingKind.NETWORK_PORT_DOWN,
        FindingKind.HOST_MEMORY,
        FindingKind.HOST_DISK,
        FindingKind.HOST_KERNEL,
        FindingKind.HOST_PROCESSES,
    }
)
"""Critical findings of these kinds evict when their cure needs the node (reset and stronger)."""

SELF_HEALING = {
    FindingKind.SLOT_CORRUPT: "the slot is discarded; another copy is used, or an older version",
    FindingKind.TRANSFER_CORRUPT: "the copy is refused and made again",
}
"""What has been dealt with where it was found; said, and not held against the node."""

CURES_ON_THE_NODE = (Action.RESET_GPU, Action.REBOOT_NODE, Action.DRAIN, Action.REPAIR)


def convicts(finding: Finding) -> bool:
    """Whether the finding is enough to take its node out."""
    if finding.severity is not Severity.CRITICAL or finding.mode is not Mode.ENFORCE:
        return False
    return finding.kind in CONVICTS or (finding.kind in CONVICTS_BY_ACTION and finding.action in CURES_ON_THE_NODE)


# --- the agent's picture -----------------------------------------------------------------------------------------


def take_picture(turn: Turn, node: str, findings: Iterable[Finding]) -> None:
    """Replaces what is known of the node by its own full picture, and judges what is new in it."""
    record = turn.state.nodes[node]
    turn.state.live_nodes[node].picture = True
    before, record.findings = record.findings, {finding.key: finding for finding in findings}
    for key in before:
        if key not in record.findings:
            _cleared(turn, node, before[key])
    for key, finding in record.findings.items():
        _judge_if_new(turn, node, before.get(key), finding)
    if before != record.findings:
        turn.node_changed(node)
    _settle(turn, node)


def take_finding(turn: Turn, node: str, finding: Finding) -> None:
    """One urgent finding; the next picture will have it too."""
    record = turn.state.nodes[node]
    before = record.findings.get(finding.key)
    record.findings[finding.key] = finding
    turn.node_changed(node)
    _judge_if_new(turn, node, before, finding)
    _settle(turn, node)


def clear_finding(turn: Turn, node: str, key: str) -> None:
    """A finding's clearing rule holds."""
    finding = turn.state.nodes[node].findings.pop(key, None)
    if finding is None:
        turn.ignore("finding_cleared.unknown")
        return
    turn.node_changed(node)
    _cleared(turn, node, finding)
    _settle(turn, node)


def _cleared(turn: Turn, node: str, finding: Finding) -> None:
    record = turn.state.nodes[node]
    if record.overruled == finding.key:
        record.overruled = ""
    turn.audit("finding.cleared", f"{finding.key} on {node} has cleared", node=node)


def _settle(turn: Turn, node: str) -> None:
    """After the picture changed: a way out may be open, or closed again."""
    record = turn.state.nodes[node]
    if record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)
    elif record.state is NodeState.PROBATION:
        standing = next((finding for finding in record.findings.values() if convicts(finding)), None)
        if standing is not None:
            _requarantine(turn, node, standing)


def _requarantine(turn: Turn, node: str, finding: Finding) -> None:
    sentence = f"{node} cannot come back: {finding.message}"
    begin_quarantine(turn, node, sentence, (finding,), action=finding.action)
    turn.verdict(node, Decision.QUARANTINE, sentence, action=finding.action, evidence=(finding,))


# --- judging -----------------------------------------------------------------------------------------------------


def _judge_if_new(turn: Turn, node: str, before: Finding | None, finding: Finding) -> None:
    """The same finding is judged once; a graver form of it again."""
    if before is not None and (before.severity, before.action, before.mode) == (
        finding.severity,
        finding.action,
        finding.mode,
    ):
        return
    data = {"severity": str(finding.severity), "rule": finding.rule, "key": finding.key}
    if finding.since:
        data["seen_at"] = f"{finding.since:.6f}"
    trace = finding.trace or turn.trace
    turn.audit("finding", f"{finding.message} ({node})", node=node, trace=trace, data=data)
    judge(turn, node, finding)


def judge(turn: Turn, node: str, finding: Finding) -> None:
    """What is to be done about a finding of a node."""
    record = turn.state.nodes[node]
    if finding.kind in SELF_HEALING:
        sentence = f"{finding.message}: {SELF_HEALING[finding.kind]}"
        turn.verdict(node, Decision.NO_ACTION, sentence, evidence=(finding,), trace=finding.trace or turn.trace)
    elif not convicts(finding):
        _advise(turn, node, finding)
    elif record.state is NodeState.QUARANTINED:
        if finding.key not in record.causes:
            record.causes.append(finding.key)
    elif serving(turn, node):
        convict(turn, node, finding)


def _advise(turn: Turn, node: str, finding: Finding) -> None:
    if finding.severity is not Severity.CRITICAL or finding.mode is Mode.OBSERVE:
        return
    what = "look at it" if finding.action is Action.NONE else finding.action.replace("_", " ")
    sentence = f"{finding.message}; recommended for {node}: {what}"
    turn.verdict(
        node,
        Decision.RECOMMEND,
        sentence,
        action=finding.action,
        evidence=(finding,),
        trace=finding.trace or turn.trace,
    )


def convict(turn: Turn, node: str, finding: Finding) -> None:
    """Evicts the node when that is allowed; its jobs leave it at the next boundary, while it still computes."""
    sentence = f"{node}: {finding.message}"
    if evict(turn, node, finding, sentence):
        cause = Cause(
            reason=GenerationReason.NODE_EVICTED,
            sentence=f"{node} is evicted ({finding.message})",
            trace=finding.trace or turn.trace,
            boundary=finding.kind is not FindingKind.DIGEST_MISMATCH,
        )
        node_left_jobs(turn, node, cause)


def reconsider(turn: Turn) -> None:
    """Evictions that a job's minimum held up are carried out once it can spare the node; the budget's never are."""
    state = turn.state
    for node in sorted(state.overruled):
        record = state.nodes[node]
        finding = record.findings.get(record.overruled) or record.own.get(record.overruled)
        if finding is None or not convicts(finding) or not serving(turn, node):
            record.overruled = ""
            turn.node_changed(node)
            state.overruled.discard(node)
        elif not state.fleet.breaker and not needed_by(state, node):
            state.overruled.discard(node)
            convict(turn, node, finding)
