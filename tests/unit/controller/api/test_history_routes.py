"""What is asked of the past and of the rules, over HTTP: pages, filters, tags, a policy tried on what was recorded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from everstep_controller.journal import recorder
from starlette.testclient import TestClient

from everstep.vocabulary import Decision, NodeState
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Domain, Gpu, Host
from everstep.wire.v1.enrolment import Issued, IssueViewer
from everstep.wire.v1.operator_history import Evidence
from everstep.wire.v1.training import FindingCleared, FindingRaised
from tests.support.controllers import OPERATOR, VIEWER, InProcess, Refused, Speaker, get, post
from tests.support.findings import xid
from tests.support.spoken import FELL_OFF, fleet, running_job

H100 = Gpu(
    index=0,
    uuid="GPU-1",
    name="NVIDIA H100 80GB HBM3",
    pci_bus_id="0",
    memory_bytes=80 << 30,
    serial="165",
    part_number="692-2G520-0200-000",
    vbios="96.00.74.00.01",
    inforom="G520.0200.00.05",
)
BECAUSE = op.ReasonOnlyRequest(reason="a smell of smoke")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    app = InProcess(f"sqlite:///{tmp_path / 'c.db'}", journal_dir=str(tmp_path / "journal"))
    with TestClient(app) as client:
        yield client


def _names(answer: op.NodeList) -> list[str]:
    return [node.node for node in answer.nodes]


# --- nodes and jobs ----------------------------------------------------------------------------------------------


def test_nodes_are_paged_in_name_order(client: TestClient) -> None:
    fleet(client, *[f"n{i}" for i in range(7)])
    first = get(client, "/v1/nodes?limit=3", op.NodeList)
    assert (_names(first), first.total, first.next) == (["n0", "n1", "n2"], 7, "n2")
    second = get(client, "/v1/nodes?limit=3&cursor=n2", op.NodeList)
    third = get(client, f"/v1/nodes?limit=3&cursor={second.next}", op.NodeList)
    assert (_names(second), _names(third), third.next) == (["n3", "n4", "n5"], ["n6"], "")


def test_nodes_are_filtered_by_state_rack_job_model_and_label(client: TestClient) -> None:
    running_job(client, "n1", "n2")
    Speaker(client, "n3").register(domain=Domain(rack="r7"), gpus=(H100,), labels={"pool": "a", "owner": "vision"})
    post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult)
    assert _names(get(client, "/v1/nodes?state=held", op.NodeList)) == ["n1"]
    assert _names(get(client, "/v1/nodes?rack=r7", op.NodeList)) == ["n3"]
    assert _names(get(client, "/v1/nodes?job=j", op.NodeList)) == ["n1", "n2"]
    assert _names(get(client, "/v1/nodes?gpu_model=h100", op.NodeList)) == ["n3"]
    assert _names(get(client, "/v1/nodes?label=pool%3Da", op.NodeList)) == ["n3"]
    assert _names(get(client, "/v1/nodes?label=owner", op.NodeList)) == ["n3"]
    assert _names(get(client, "/v1/nodes?label=pool%3Db", op.NodeList)) == []
    assert [job.job for job in get(client, "/v1/jobs?job_state=running", op.JobList).jobs] == ["j"]
    assert get(client, "/v1/jobs?job_state=paused", op.JobList).total == 0


def test_unknown_state_is_refused(client: TestClient) -> None:
    with pytest.raises(Refused, match="422"):
        get(client, "/v1/nodes?state=tired", op.NodeList)


def test_node_is_not_resent_while_its_tag_matches(client: TestClient) -> None:
    fleet(client, "n1")
    tag = client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"]
    again = client.get("/v1/nodes/n1", headers=VIEWER | {"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult)
    assert client.get("/v1/nodes/n1", headers=VIEWER | {"If-None-Match": tag}).status_code == 200


def test_order_with_outdated_tag_is_refused(client: TestClient) -> None:
    running_job(client, "n1", "n2", spare="n3")
    tag = client.get("/v1/nodes/n3", headers=VIEWER).headers["etag"]
    post(client, "/v1/nodes/n3/hold", BECAUSE, op.ChangeResult, OPERATOR | {"If-Match": tag})
    with pytest.raises(Refused, match="412 outdated"):
        post(client, "/v1/nodes/n3/readmit", BECAUSE, op.ChangeResult, OPERATOR | {"If-Match": tag})
    job = client.get("/v1/jobs/j", headers=VIEWER).headers["etag"]
    post(client, "/v1/jobs/j/stop", BECAUSE, op.ChangeResult, OPERATOR | {"If-Match": job})
    assert client.get("/v1/jobs/j", headers=VIEWER).headers["etag"] != job


def test_planned_maintenance_is_shown_and_cancellable(client: TestClient) -> None:
    Speaker(client, "n1").register(domain=Domain(rack="r1"))
    now = get(client, "/v1/status", op.FleetStatus).now
    plan = operator_history.MaintenanceRequest(starts_at=now + 3600, until=now + 7200, reason="new switch", rack="r1")
    assert "from now, for 3600 s: new switch" in post(client, "/v1/maintenance", plan, op.ChangeResult).sentence
    detail = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert (detail.summary.state, detail.maintenance_until) == ("healthy", 0.0)
    assert [(one.starts_at, one.until) for one in detail.planned_maintenance] == [(now + 3600, now + 7200)]
    backwards = msgspec.structs.replace(plan, until=now + 1800)
    with pytest.raises(Refused, match="later than `starts_at`"):
        post(client, "/v1/maintenance", backwards, op.ChangeResult)
    cancelled = operator_history.CancelMaintenance(rack="r1", reason="it has to wait")
    post(client, "/v1/maintenance/cancel", cancelled, op.ChangeResult)
    assert get(client, "/v1/nodes/n1", op.NodeDetail).planned_maintenance == ()
    with pytest.raises(Refused, match="nothing is planned for rack r1"):
        post(client, "/v1/maintenance/cancel", cancelled, op.ChangeResult)
    with pytest.raises(Refused, match="needs a node or a rack"):
        post(client, "/v1/maintenance/cancel", operator_history.CancelMaintenance(reason="x"), op.ChangeResult)


def test_rack_maintenance_applies_to_all_its_nodes(client: TestClient) -> None:
    for name in ("n1", "n2", "n3"):
        Speaker(client, name).register(domain=Domain(rack="r1" if name != "n3" else "r2"))
    until = get(client, "/v1/status", op.FleetStatus).now + 3600
    window = operator_history.MaintenanceRequest(until=until, reason="new switch", rack="r1")
    changed = post(client, "/v1/maintenance", window, op.ChangeResult)
    assert "new switch" in changed.sentence
    assert get(client, "/v1/nodes/n1", op.NodeDetail).maintenance_until == until
    assert get(client, "/v1/nodes/n3", op.NodeDetail).maintenance_until == 0.0
    with pytest.raises(Refused, match="needs a node or a rack"):
        post(client, "/v1/maintenance", operator_history.MaintenanceRequest(until=until, reason="x"), op.ChangeResult)


# --- the past ----------------------------------------------------------------------------------------------------


def test_findings_stand_until_cleared_and_stay_in_history(client: TestClient) -> None:
    (speaker,) = fleet(client, "n1")
    speaker.report(FindingRaised(finding=FELL_OFF))
    (seen,) = get(client, "/v1/findings?active=true", operator_history.FindingList).findings
    assert (seen.node, seen.finding.xid, seen.cleared_at) == ("n1", 79, None)
    speaker.report(FindingCleared(key=FELL_OFF.key))
    assert get(client, "/v1/findings?active=true", operator_history.FindingList).findings == ()
    (seen,) = get(client, "/v1/findings?node=n1&kind=gpu.xid", operator_history.FindingList).findings
    assert seen.cleared_at is not None
    assert get(client, "/v1/findings?kind=gpu.lost", operator_history.FindingList).findings == ()


@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), ("1", "0")])
def test_boolean_query_accepts_several_spellings(client: TestClient, yes: str, no: str) -> None:
    (speaker,) = fleet(client, "n1")
    speaker.report(FindingRaised(finding=FELL_OFF))
    standing = [get(client, f"/v1/findings?active={said}", operator_history.FindingList).findings for said in (yes, no)]
    assert list(map(len, standing)) == [1, 0]
    ends = [get(client, f"/v1/events?limit=1&newest={said}", op.EventList).events[0].id for said in (yes, no)]
    assert ends[0] > ends[1]


def test_verdicts_are_paged_newest_first(client: TestClient) -> None:
    for number, speaker in enumerate(fleet(client, "n1", "n2", "n3")):
        speaker.report(FindingRaised(finding=xid(60 + number)))
    first = get(client, "/v1/verdicts?limit=2", operator_history.VerdictList)
    rest = get(client, f"/v1/verdicts?limit=2&cursor={first.next}", operator_history.VerdictList)
    nodes = [verdict.node for verdict in (*first.verdicts, *rest.verdicts)]
    assert sorted(nodes) == ["n1", "n2", "n3"]
    assert nodes[0] == "n3"
    assert rest.next == ""
    held = get(client, f"/v1/verdicts?decision={Decision.EVICT}", operator_history.VerdictList).verdicts
    assert {verdict.decision for verdict in held} <= {Decision.EVICT}
    with pytest.raises(Refused, match="not a cursor"):
        get(client, "/v1/verdicts?cursor=nonsense", operator_history.VerdictList)


def test_generations_are_paged_newest_first(client: TestClient) -> None:
    running_job(client, "n1", "n2")
    for _ in range(3):
        post(client, "/v1/nodes/n2/evict", BECAUSE, op.ChangeResult)
        post(client, "/v1/nodes/n2/readmit", BECAUSE, op.ChangeResult)
    page = get(client, "/v1/generations?job=j&limit=1", op.GenerationList)
    assert len(page.generations) == 1
    newest = page.generations[0].number
    seen = [newest]
    while page.next:
        page = get(client, f"/v1/generations?job=j&limit=1&cursor={page.next}", op.GenerationList)
        seen += [spec.number for spec in page.generations]
    assert seen == list(range(newest, 0, -1))
    assert all(spec.secret == "" for spec in page.generations)


def test_audit_lists_operator_orders_only(client: TestClient) -> None:
    fleet(client, "n1")
    post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult)
    (event,) = get(client, "/v1/audit", op.EventList).events
    assert (event.kind, event.detail["actor"], event.detail["reason"]) == ("operator.hold", "olga", "a smell of smoke")
    kinds = {event.kind for event in get(client, "/v1/events?kind=node.", op.EventList).events}
    assert kinds == {"node.registered"}


def test_audit_includes_credential_orders(client: TestClient) -> None:
    post(client, "/v1/credentials", IssueViewer(subject="grafana", reason="a new screen"), Issued)
    kinds = [event.kind for event in get(client, "/v1/audit", op.EventList).events]
    assert kinds == ["credential.issued"]


@pytest.mark.promise("vendor-document")
def test_evidence_bundle_covers_node_sent_to_repair(client: TestClient) -> None:
    (speaker,) = fleet(client, "n1")
    speaker.incarnation = 2
    host = Host(vendor="NVIDIA", product="DGXH100", serial="166", chassis_serial="C166", kernel="6.8.0")
    speaker.register(gpus=(H100,), host=host)
    speaker.report(FindingRaised(finding=FELL_OFF))
    post(client, "/v1/nodes/n1/repair", BECAUSE, op.ChangeResult)
    assert get(client, "/v1/nodes/n1", op.NodeDetail).host == host
    bundle = get(client, "/v1/nodes/n1/evidence", Evidence)
    assert (bundle.node, bundle.state, bundle.gpus[0].serial) == ("n1", NodeState.REPAIR, "165")
    assert bundle.host == host
    assert bundle.gpus[0] == H100
    assert FELL_OFF.message in {finding.message for finding in bundle.findings}
    assert bundle.verdicts


def test_remediations_are_listed_with_outcome(client: TestClient) -> None:
    fleet(client, "n1", "n2")
    post(client, "/v1/nodes/n1/repair", BECAUSE, op.ChangeResult)
    found = get(client, "/v1/remediations?node=n1", operator_history.RemediationList).remediations
    assert {remedy.node for remedy in found} == {"n1"}
    assert all(remedy.sentence and remedy.state != "failed" for remedy in found)
    assert next(one for one in found if one.kind == "repair").state != "superseded"


def test_checkpoints_and_restorability_are_shown(client: TestClient) -> None:
    running_job(client, "n1", "n2")
    assert get(client, "/v1/checkpoints?job=j", operator_history.CheckpointList).checkpoints == ()
    told = get(client, "/v1/jobs/j/restorability", op.Restorability)
    assert (told.job, told.version) == ("j", None)
    assert told.sentence


# --- the rules ---------------------------------------------------------------------------------------------------


def test_budget_shows_remaining_evictions_per_scope(client: TestClient) -> None:
    fleet(client, "n1", "n2", "n3")
    budget = get(client, "/v1/budget", operator_history.BudgetStatus)
    (scope,) = budget.scopes
    assert (scope.kind, scope.used, scope.remaining, scope.nodes) == ("fleet", 0, scope.limit, 3)
    assert (budget.breaker, budget.deferred) == ("", ())


def test_policy_check_reports_changes_and_errors(client: TestClient) -> None:
    policy = get(client, "/v1/policy", operator_history.PolicyDocument)
    assert policy.knobs["eviction_count"] == 4
    assert {rule["kind"] for rule in policy.rules} >= {"gpu.xid", "gpu.lost"}
    good = operator_history.PolicyChange(knobs={"eviction_count": 2}, rules=({"kind": "gpu.lost", "mode": "observe"},))
    checked = post(client, "/v1/policy/check", good, operator_history.PolicyCheckResult)
    assert checked.ok, checked.error
    assert checked.changes["eviction_count"] == "4 -> 2"
    assert any(key.startswith("gpu.lost") and "observe" in text for key, text in checked.changes.items())
    for knobs, complaint in (({"eviction_cuont": 2}, "eviction_cuont"), ({"eviction_share": 7.0}, "share")):
        bad = post(
            client, "/v1/policy/check", operator_history.PolicyChange(knobs=knobs), operator_history.PolicyCheckResult
        )
        assert not bad.ok
        assert complaint in bad.error


def test_policy_trial_is_refused_while_journal_disk_hangs(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "DRAIN_TIMEOUT_S", 0.1, raising=False)
    fleet(client, "n1")
    disk, write = threading.Event(), recorder._Segment.write

    def hangs(segment: recorder._Segment, data: bytes) -> None:
        disk.wait(60)
        write(segment, data)

    monkeypatch.setattr(recorder._Segment, "write", hangs)
    fleet(client, "n2")
    body = operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(knobs={"eviction_count": 1}))
    with pytest.raises(Refused, match=r"503 .*journal"):
        post(client, "/v1/policy/try", body, operator_history.PolicyTrialResult)
    fleet(client, "n3")
    disk.set()


def test_policy_trial_replays_recorded_events(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2", spare="n3")
    speakers[2].report(FindingRaised(finding=FELL_OFF))
    named = [
        rule for rule in get(client, "/v1/policy", operator_history.PolicyDocument).rules if rule["kind"] == "gpu.xid"
    ]
    every = tuple({"kind": "gpu.xid", "name": rule.get("name", ""), "mode": "observe"} for rule in named)
    told = post(
        client,
        "/v1/policy/try",
        operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(rules=every)),
        operator_history.PolicyTrialResult,
    )
    assert told.evictions == 0
    assert len(told.avoided_evictions) == 1
    assert "n3" in told.avoided_evictions[0]
    same = post(
        client,
        "/v1/policy/try",
        operator_history.PolicyTrialRequest(change=operator_history.PolicyChange()),
        operator_history.PolicyTrialResult,
    )
    assert (same.evictions, same.added_evictions, same.avoided_evictions) == (1, (), ())
    assert same.sentence.endswith("as happened")
