"""Repeat offenders: what each offence of a node weighs, how long it counts, and when the node belongs in repair.

A few nodes cause most exclusions: of one fleet 1.2 % were lemons, of another three nodes of 63 caused half of all
exclusions. Two measures find them, and either suffices (H is ``offender_half_life_s``, R ``offender_repair_score``):

* The score, the sum of ``weight * 0.5 ** (age / H)`` over all offences. It tells a node with three evictions this week
  from one with three a quarter, orders spares and sets how long a node waits. Offences at a steady rate of r per
  half-life bring it to about ``r / ln 2``.
* The weight of the offences in the half-life that ends with the newest one. The score alone never reaches N with N
  offences, since the first has faded when the last one comes. This makes R mean what it says: that many evictions
  within one half-life.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from everstep.errors import NotFound
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.operator_history import FORMAT, Evidence, EvidenceNote
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import OwnNews, Turn

EVICTED = 1.0
RELAPSED = 1.0
"""It fell ill again on probation."""
FAILED_PROBE = 0.5
"""Less than an eviction: partners and networks fail too."""
REMEMBERED = 128
"""Offences of a half-life that are remembered one by one; long before that many the node is in repair."""


def offender_score(record: NodeRecord, now: float, half_life_s: float) -> float:
    """The node's offences, each weighed by how long ago it was. 0.0 for a clean one."""
    if not record.offences:
        return 0.0
    return record.offences * math.pow(0.5, max(0.0, now - record.offended_at) / half_life_s)


def score_now(turn: Turn, node: str) -> float:
    """``offender_score`` now, under the policy's half-life."""
    return offender_score(turn.state.nodes[node], turn.now, turn.policy.offender_half_life_s)


def offend(turn: Turn, node: str, weight: float) -> None:
    """Raises the node's score."""
    record = turn.state.nodes[node]
    record.offences, record.offended_at = score_now(turn, node) + weight, turn.now
    since = turn.now - turn.policy.offender_half_life_s
    record.offended = [*(one for one in record.offended if one[0] >= since), (turn.now, weight)][-REMEMBERED:]
    turn.node_changed(node)


def absolve(record: NodeRecord) -> None:
    """Forgets every offence of the node: it has been repaired."""
    record.offences, record.offended = 0.0, []


def forgive(turn: Turn, node: str, weight: float, at: float) -> None:
    """Takes back an offence of ``weight`` that was counted at ``at``."""
    record = turn.state.nodes[node]
    left = weight * math.pow(0.5, (turn.now - at) / turn.policy.offender_half_life_s)
    record.offences, record.offended_at = max(0.0, score_now(turn, node) - left), turn.now
    if (at, weight) in record.offended:
        record.offended.remove((at, weight))
    turn.node_changed(node)


def wait_s(turn: Turn, node: str) -> float:
    """Least seconds in quarantine at the node's score: none for a first offence, ``offender_wait_s`` at a score of 2,
    twice that for each point more."""
    score, policy = score_now(turn, node), turn.policy
    if score <= EVICTED:
        return 0.0
    return min(policy.offender_wait_max_s, policy.offender_wait_s * math.pow(2.0, min(score - 2.0, 30.0)))


def recent_weight(record: NodeRecord, now: float, half_life_s: float) -> float:
    """What the offences weigh that lie in the half-life before the newest one. 0.0 where that one is older itself."""
    if not record.offended or record.offended[-1][0] < now - half_life_s:
        return 0.0
    since = record.offended[-1][0] - half_life_s
    return sum(weight for at, weight in record.offended if at >= since)


def is_lemon(turn: Turn, node: str) -> bool:
    """Whether the node belongs in repair, whatever its findings say now: by either measure."""
    return max(score_now(turn, node), _recent_now(turn, node)) >= turn.policy.offender_repair_score


def in_words(turn: Turn, node: str) -> str:
    """Why the node belongs in repair."""
    score, limit = score_now(turn, node), turn.policy.offender_repair_score
    if score >= limit:
        return f"its score of offences is {score:.1f} of {limit:g}"
    window_s = turn.policy.offender_half_life_s
    return f"its offences of the last {window_s:g} s weigh {_recent_now(turn, node):g} of {limit:g}"


def _recent_now(turn: Turn, node: str) -> float:
    return recent_weight(turn.state.nodes[node], turn.now, turn.policy.offender_half_life_s)


# ---- evidence
# The evidence bundle of a node, from its records.


def evidence_of(state: FleetState, node: str, now: float, verdicts: Iterable[Verdict] = ()) -> Evidence:
    """Everything known against the node. ``verdicts``: as stored, where the caller has them; sentences of the newest
    are in the history anyway. Raises NotFound."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFound(f"no node {node}: `everstep nodes` lists them")
    findings = record.known()
    return Evidence(
        format=FORMAT,
        made_at=now,
        node=node,
        state=record.state,
        since=record.since,
        sentence=record.sentence,
        rule=record.course.rule if record.course else "",
        action=record.action,
        domain=record.domain,
        driver_version=record.driver_version,
        agent_version=record.agent_version,
        boot_id=record.boot_id,
        booted_at=record.booted_at,
        gpus=record.gpus,
        host=record.host,
        suspects=suspect_gpus(record, findings),
        findings=findings,
        verdicts=tuple(verdicts),
        evictions=tuple(record.evictions),
        remedied=tuple(at for at in record.remedied if at not in record.dry_runs),
        offences=round(offender_score(record, now, state.policy.offender_half_life_s), 3),
        history=tuple(
            EvidenceNote(at=note.at, what=note.what, sentence=note.sentence, detail=note.detail)
            for note in record.notes
        ),
    )


def suspect_gpus(record: NodeRecord, findings: Iterable[Finding]) -> tuple[Gpu, ...]:
    """The node's GPUs that the findings are about: named by bus id, UUID or index, or condemned by a digest."""
    named = {finding.subject for finding in findings} | set(record.condemned)
    return tuple(gpu for gpu in record.gpus if named & {gpu.uuid, gpu.pci_bus_id, str(gpu.index), f"GPU-{gpu.index}"})


# ---- own findings
# What the controller itself has found on a node, beside the picture that the node's agent gives.
#
# It is kept here at once, and judged by its rule like any agent's at the end of the event (``pictures.judge_own``), or
# before where a rule needs to know what came of it.


def raise_own(turn: Turn, node: str, finding: Finding, lasts_s: float = 0.0, proof: str = "") -> None:
    """Keeps the finding with the node until it is cleared, or was not seen for ``lasts_s`` (0.0: for ever).

    ``proof``: what its second pass has shown, where it has had one.
    """
    record = turn.state.nodes[node]
    turn.own.append(OwnNews(node, before=record.own.get(finding.key), finding=finding, why=proof))
    record.own[finding.key] = finding
    turn.node_changed(node)
    record.own_until.pop(finding.key, None)
    if lasts_s:
        see_again(turn, node, finding.key, lasts_s)


def see_again(turn: Turn, node: str, key: str, lasts_s: float) -> None:
    """A finding that stands was seen once more: it lasts for ``lasts_s`` from now on."""
    record = turn.state.nodes[node]
    record.own_until[key] = turn.now + lasts_s
    turn.node_changed(node)
    turn.wake(record.own_until[key], "care", node)


def clear_own(turn: Turn, node: str, keys: Iterable[str] | None = None, why: str = "") -> None:
    """Drops the findings of these keys, or all. ``why``: what the log says, in a sentence."""
    record = turn.state.nodes[node]
    for key in list(record.own if keys is None else keys):
        finding = record.own.pop(key, None)
        record.own_until.pop(key, None)
        if finding is None:
            continue
        if key in record.causes:
            record.cleared[key] = turn.now
        turn.node_changed(node)
        turn.own.append(OwnNews(node, before=finding, finding=None, why=why))


def forget_unseen(turn: Turn, node: str) -> None:
    """Drops what was not seen again in its time."""
    record = turn.state.nodes[node]
    for key, until in list(record.own_until.items()):
        if turn.now < until:
            turn.wake(until, "care", node)
        else:
            clear_own(turn, node, [key], f"{key} was not seen again on {node}")
