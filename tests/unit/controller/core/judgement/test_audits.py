"""Audits of training: cases, strikes, evictions, and the version that a job goes back to."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.ids import Version
from everstep.vocabulary import AuditKind, AuditRole, FindingKind, JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, VersionNotice
from everstep.wire.v1.training import ProbeFinished, RestoreRule
from everstep_controller.core.effects import Effect, PutVerdict, PutVersion
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorAction
from everstep_controller.core.judgement.audits import MAX_CASES
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions, generations, logged_sentences, sent

BAD = ("bad", "bad", "good", "good")
"""Statements that convict the owner: its first and second result, and the results of a peer and an arbiter."""
ONCE = ("bad", "good", "good", "good")
SUSPICION: dict[str, Any] = {"audit": AuditKind.GRADIENT_NORM, "unit": "gradients", "expects_arbiter": False}
KEY = f"{FindingKind.AUDIT_MISMATCH}/work"


def _fleet(nodes: int = 4, spares: int = 1, policy: CorePolicy | None = None, **spec: Any) -> CoreFleet:
    fleet = CoreFleet(policy)
    fleet.start(nodes, spares, **({"sdc": "standard"} | spec))
    return fleet


def _commit(fleet: CoreFleet, step: int | None = None) -> Version:
    """Commit the next version that may be committed."""
    live = fleet.state.job_runtime["job"]
    step = step or live.commits.candidate_step or (live.progress.furthest_step or 0) + 1
    fleet.progress(step)
    fleet.seal(step)
    version = live.commits.committed_version
    assert version == Version(fleet.spec().number, step)
    return version


def _verified(effects: list[Effect]) -> list[Version]:
    return [e.doc.version for e in effects if isinstance(e, PutVersion) and e.doc.audited_at is not None]


def test_convicted_node_returns_only_through_probes_and_operator() -> None:
    fleet = _fleet()
    _commit(fleet)
    fleet.audit(2, 40, *BAD)
    fleet.advance(300.0, "n1", "n2", "n3", "n4", "n5")
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    assert fleet.state.nodes["n3"].quarantine.needs_operator
    fleet.order(OperatorAction.READMIT, node="n3")
    assert KEY not in fleet.state.nodes["n3"].health.controller_findings
    assert fleet.node_state("n3") is NodeState.PROBATION


def test_convicted_node_that_cannot_be_spared_stops_the_job() -> None:
    fleet = _fleet(4, 0, min_nodes=4)
    for _ in range(fleet.policy.audits.digest_tie_count):
        fleet.audit(2, 40, *BAD)
        fleet.advance(0.1, *fleet.state.nodes)
    assert fleet.job_state() is JobState.FAILED
    assert "results in audits differed 3 times" in fleet.job().status.sentence


def test_statements_count_after_a_regroup() -> None:
    """The node of the owner is convicted even if the owner's rank dies before the arbiter's statement."""
    fleet = _fleet()
    first = _commit(fleet)
    spec = fleet.spec()
    words: dict[str, Any] = {"spec": spec, "expects_arbiter": True}
    fleet.state_result(2, 2, 40, original="bad", digest="bad", **words)
    fleet.state_result(3, 2, 40, digest="good", **words)
    fleet.lose_rank(2)
    assert fleet.spec().number == 2
    assert fleet.spec().restore.ceiling == first
    assert logged_sentences(fleet.effects, "corruption.unresolved_audit")
    fleet.state_result(0, 2, 40, digest="good", **words)
    effects = fleet.settle_audits()
    assert decisions(effects) == [("n3", "evict")]
    assert generations(effects)[-1].restore.ceiling == first


def test_strikes_expire() -> None:
    policy = CorePolicy.lab_preset().with_values(audits={"strike_window_s": 30.0})
    fleet = _fleet(policy=policy)
    _commit(fleet)
    fleet.audit(2, 40, *ONCE)
    fleet.advance(31.0, *fleet.state.nodes)
    assert decisions(fleet.audit(2, 41, *ONCE)) == [("n3", "no_action")]
    assert len(fleet.state.nodes["n3"].audits.strikes) == 1


def test_readmission_forgives_strikes() -> None:
    fleet = _fleet()
    _commit(fleet)
    fleet.audit(2, 40, *ONCE)
    fleet.audit(2, 41, *ONCE)
    assert fleet.node_state("n3") is NodeState.QUARANTINED
    fleet.order(OperatorAction.READMIT, node="n3")
    assert not fleet.state.nodes["n3"].audits.strikes


def test_wrong_copy_of_a_version_is_a_strike_without_rollback() -> None:
    fleet = _fleet()
    _commit(fleet)
    effects = fleet.audit(2, 40, "a", "b", audit=AuditKind.CHECKPOINT, expects_arbiter=False)
    assert decisions(effects) == [("n3", "no_action")]
    assert not generations(effects)


def test_node_that_fails_known_work_after_a_tie_is_evicted() -> None:
    fleet = _fleet(2, 1)
    fleet.pass_solo_diagnostics = False
    first = _commit(fleet)
    fleet.audit(0, 40, "a", "a", "b")
    probes = {probe.tested_node: name for name, probe in fleet.state.diagnostics.probes.items()}
    fleet.report("n1", ProbeFinished(probe=probes["n1"], ok=True))
    effects = fleet.report("n2", ProbeFinished(probe=probes["n2"], ok=False, wrong_result=True, detail="wrong"))
    assert ("n2", "evict") in decisions(effects)
    assert generations(effects)[-1].restore.ceiling == first
    assert fleet.seats() == ["n1", "n3"]


def test_ranks_of_one_node_that_disagree_are_a_strike_on_it() -> None:
    fleet = _fleet(1, 1, nproc_per_node=2)
    _commit(fleet)
    assert decisions(fleet.audit(0, 40, "a", "a", "b")) == [("n1", "no_action")]
    assert len(fleet.state.nodes["n1"].audits.strikes) == 1


def _install(fleet: CoreFleet, node: str, gpu: str) -> None:
    identity = fleet.state.nodes[node].identity
    identity.gpus = tuple(msgspec.structs.replace(device, name=gpu) for device in identity.gpus)


def test_nodes_of_different_kinds_are_not_compared() -> None:
    fleet = _fleet()
    _install(fleet, "n3", "H100")
    _commit(fleet)
    for step in (40, 48, 56):
        effects = fleet.audit(2, step, *BAD)
        assert not decisions(effects)
        assert not generations(effects)
    (sentence,) = logged_sentences(fleet.effects, "audit.not_compared")
    assert "H100" in sentence
    assert fleet.node_state("n3") is NodeState.HEALTHY


def test_kinds_that_ranks_state_count_before_those_of_nodes() -> None:
    fleet = _fleet()
    _install(fleet, "n3", "H100")
    _commit(fleet)
    assert decisions(fleet.audit(2, 40, *BAD, kind="avx2")) == [("n3", "evict")]


def test_results_that_never_repeat_blame_no_node() -> None:
    fleet = _fleet()
    _commit(fleet)
    effects = fleet.audit(2, 40, "one", "one", "two", "three")
    assert decisions(effects) == [("n3", "no_action"), ("n4", "no_action")]
    assert not generations(effects)
    assert not any(fleet.state.nodes[node].audits.strikes for node in ("n1", "n3", "n4"))


def test_suspicion_repeats_a_step_once() -> None:
    fleet = _fleet()
    _commit(fleet)
    audited = fleet.audited(2)
    assert _verified(audited) == [Version(1, 2)]
    newest = _commit(fleet)
    effects = fleet.audit(2, newest.step + 1, "", "", **SUSPICION)
    assert not decisions(effects)
    assert generations(effects)[-1].restore.ceiling == newest, "a suspicion rolls back to the newest version"
    fleet.resume(restored=newest, step=newest.step + 1)
    effects = fleet.audit(3, newest.step + 1, "", "", **SUSPICION)
    assert not generations(effects)
    assert "its data is the likely cause" in logged_sentences(effects, "audit.suspicion")[0]


def test_suspected_node_exchanges_seats() -> None:
    fleet = _fleet()
    newest = _commit(fleet)
    effects = fleet.audit(3, newest.step + 1, "", "", **SUSPICION)
    assert fleet.seats() == ["n4", "n2", "n3", "n1"], "the seats follow one another in a circle"
    assert "n4 and n1 exchange seats" in generations(effects)[-1].sentence


def test_suspected_node_stays_in_its_block() -> None:
    fleet = _fleet(block_nodes=2)
    newest = _commit(fleet)
    fleet.audit(1, newest.step + 1, "", "", **SUSPICION)
    assert fleet.seats() == ["n2", "n1", "n3", "n4"]


def test_two_wrong_results_in_two_seats_convict() -> None:
    fleet = _fleet()
    newest = _commit(fleet)
    fleet.audit(2, newest.step + 1, "", "", **SUSPICION)
    assert fleet.seats() == ["n1", "n2", "n4", "n3"]
    fleet.resume(restored=newest, step=newest.step + 1)
    effects = fleet.audit(3, newest.step + 1, "NaN", "1.5", wrong_results=2, **SUSPICION)
    assert decisions(effects) == [("n3", "evict")]
    (verdict,) = (effect.verdict for effect in effects if isinstance(effect, PutVerdict))
    assert f"rank 3 computed gradients of step {newest.step + 1} wrongly twice" in verdict.sentence


def test_search_for_the_first_rank_repeats_a_step_once() -> None:
    fleet = _fleet()
    newest = _commit(fleet)
    effects = fleet.audit(0, newest.step + 1, "", "", wrong_results=0, **SUSPICION)
    assert "a rank, still unknown, may stand out in gradients" in generations(effects)[-1].sentence
    assert fleet.seats() == ["n1", "n2", "n3", "n4"], "no rank is known yet, so no seats are exchanged"
    fleet.resume(restored=newest, step=newest.step + 1)
    assert not generations(fleet.audit(0, newest.step + 1, "", "", wrong_results=0, **SUSPICION))
    words = SUSPICION | {"unit": "gradients, group 1 of 2"}
    assert generations(fleet.audit(2, newest.step + 1, "", "", **words)), "the search has found the rank"


def test_suspicion_without_an_older_version_costs_nothing() -> None:
    fleet = _fleet()
    newest = _commit(fleet)
    effects = fleet.audit(2, newest.step, "", "", **SUSPICION)
    assert not generations(effects)
    assert f"no version from before step {newest.step} is known" in logged_sentences(effects, "audit.suspicion")[0]
    assert fleet.state.job_runtime["job"].commits.committed_version == newest


def test_missing_statements_repeat_a_step_once() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    spec = fleet.spec()
    fleet.state_result(3, 2, 40, digest="good", spec=spec, expects_arbiter=True)
    fleet.state_result(0, 2, 40, digest="good", spec=spec, expects_arbiter=True)
    assert fleet.state.job_runtime["job"].audits.cases
    effects = fleet.advance(fleet.policy.audits.case_s + 0.1, *fleet.state.nodes)
    assert generations(effects)[-1].restore.ceiling == first
    assert not any(decision == "evict" for _, decision in decisions(effects))


def test_one_node_alone_cannot_send_a_job_back() -> None:
    fleet = _fleet()
    _commit(fleet)
    fleet.state_result(3, 2, 40, digest="x", expects_arbiter=True)
    effects = fleet.advance(fleet.policy.audits.case_s + 0.1, *fleet.state.nodes)
    assert not generations(effects)


@pytest.mark.promise("audit-two-nodes")
def test_rank_states_only_its_own_results() -> None:
    fleet = _fleet()
    _commit(fleet)
    words: dict[str, Any] = {"original": "bad", "digest": "bad", "expects_arbiter": True}
    fleet.state_result(2, 2, 40, node="n1", **words)  # about a rank on n3
    fleet.state_result(1, 2, 40, role=AuditRole.OWNER, **words)  # in the role of the owner
    fleet.state_result(2, 2, 40, role=AuditRole.PEER, **words)  # about its own result
    assert not fleet.state.job_runtime["job"].audits.cases
    assert fleet.state.counts.ignored["audit_statement.not_a_member"] == 1
    assert fleet.state.counts.ignored["audit_statement.wrong_role"] == 2


def test_late_and_repeated_statements_change_nothing() -> None:
    fleet = _fleet()
    _commit(fleet)
    spec = fleet.spec()
    fleet.audit(2, 40, *BAD)
    assert fleet.audit(2, 40, *BAD, spec=spec, settle=False) == []
    assert fleet.audit(1, 41, *BAD, spec=spec, settle=False) == []
    assert fleet.state.counts.ignored["audit_statement.stale"] == 6


def test_cases_of_a_job_are_bounded() -> None:
    fleet = _fleet()
    for unit in range(MAX_CASES + 3):
        fleet.state_result(3, 2, 40, digest="x", unit=f"layer {unit}")
    assert len(fleet.state.job_runtime["job"].audits.cases) == MAX_CASES
    assert fleet.state.counts.ignored["audit_statement.surplus"] == 3


def test_version_is_verified_once_all_ranks_audited_since() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    assert fleet.job().commits.audit_candidate.version == first  # type: ignore[union-attr]
    second = _commit(fleet)
    assert fleet.job().commits.audit_candidate.version == first, "one candidate at a time"  # type: ignore[union-attr]
    assert not _verified(fleet.audited(first.step, 0, 1, 2))
    assert not _verified(fleet.audited(first.step - 1, 3))
    assert _verified(fleet.audited(first.step, 3)) == [first]
    third = _commit(fleet)
    commits = fleet.job().commits
    assert commits.audited is not None
    assert commits.audited.version == first
    assert commits.audit_candidate is not None
    assert commits.audit_candidate.version == third > second
    notice = sent(fleet.effects, VersionNotice)["n1"]
    assert notice.pinned == (first, third)


@pytest.mark.promise("restore-clean")
def test_conviction_restores_the_audited_version() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    fleet.audited(first.step)
    for _ in range(3):
        newest = _commit(fleet)
    assert newest > first
    spec = generations(fleet.audit(2, newest.step + 5, *BAD))[-1]
    assert spec.restore == RestoreRule(floor=first, ceiling=first, pinned=(first,))
    live = fleet.state.job_runtime["job"].commits
    assert live.committed_version == first


@pytest.mark.promise("restore-clean")
def test_wrong_step_is_not_restored_without_audited_version() -> None:
    fleet = _fleet(sdc="light")
    first = _commit(fleet)
    spec = generations(fleet.audit(2, first.step, *BAD))[-1]
    assert spec.restore == RestoreRule(from_scratch=True)


def test_changed_memory_condemns_the_version_of_the_step_before() -> None:
    fleet = _fleet(sdc="light")
    first = _commit(fleet)
    words: dict[str, Any] = {"audit": AuditKind.STATE, "expects_arbiter": False}
    assert generations(fleet.audit(2, first.step + 1, "a", "b", **words))[-1].restore.from_scratch


def test_unverified_candidate_gives_way_after_its_time() -> None:
    policy = CorePolicy.lab_preset().with_values(audits={"candidate_max_s": 10.0})
    fleet = _fleet(policy=policy)
    _commit(fleet)
    fleet.advance(11.0, *fleet.state.nodes)
    newest = _commit(fleet)
    assert fleet.job().commits.audit_candidate.version == newest  # type: ignore[union-attr]


def test_nothing_is_committed_while_a_case_is_open() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    step = fleet.state.job_runtime["job"].commits.candidate_step
    assert step is not None
    fleet.progress(step - 1)
    fleet.state_result(2, 2, step, original="bad", digest="bad", expects_arbiter=True)
    fleet.progress(step)
    fleet.seal(step)
    assert fleet.state.job_runtime["job"].commits.committed_version == first
    assert not _verified(fleet.audited(first.step))


@pytest.mark.promise("restore-clean")
def test_audited_version_outlives_a_controller() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    fleet.audited(first.step)
    _commit(fleet)
    fleet.audit(2, 400, *BAD)
    fleet.restart()
    assert fleet.state.job_runtime["job"].commits.committed_version == first
    assert fleet.job().commits.audited is not None
    fleet.advance(3.0, *fleet.state.nodes)
    assert fleet.job().commits.restore_ceiling == first


def test_next_commit_lifts_ceiling_and_keeps_audited_version() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    fleet.audited(first.step)
    _commit(fleet)
    fleet.audit(2, 400, *BAD)
    fleet.resume(restored=first, step=first.step + 1)
    newest = _commit(fleet)
    assert newest.generation == 2
    fleet.lose_rank(0)
    assert fleet.spec().restore.floor == newest
    assert first in fleet.spec().restore.pinned


def test_conviction_during_an_outage_waits_and_undoes_the_work() -> None:
    fleet = _fleet()
    first = _commit(fleet)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="away"))
    effects = fleet.audit(2, 40, *BAD)
    assert decisions(effects) == [("n3", "defer_eviction")]
    assert generations(effects)[-1].restore.ceiling == first
    assert "n3" in sent(effects, NewGeneration)
    effects = fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    assert decisions(effects) == [("n3", "evict")]
