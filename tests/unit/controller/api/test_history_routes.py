"""Routes for the past and for the rules: pages, filters, tags, and a policy tried on recorded decisions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.vocabulary import Decision, NodeState
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Domain, Gpu, Host
from everstep.wire.v1.operator_history import Evidence
from everstep.wire.v1.training import FindingCleared, FindingRaised
from everstep_controller.journal import recorder
from tests.support.fleet.controllers import AgentClient, InProcess, Refused, get, post
from tests.support.fleet.findings import xid
from tests.support.fleet.in_process_fleet import FELL_OFF, fleet, running_job

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


def test_nodes_are_filtered_by_state_rack_job_model_and_label(client: TestClient) -> None:
    running_job(client, "n1", "n2")
    AgentClient(client, "n3").register(domain=Domain(rack="r7"), gpus=(H100,), labels={"pool": "a", "owner": "vision"})
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


def test_planned_maintenance_is_shown_and_cancellable(client: TestClient) -> None:
    AgentClient(client, "n1").register(domain=Domain(rack="r1"))
    now = get(client, "/v1/status", op.FleetStatus).now
    plan = operator_history.MaintenanceRequest(starts_at=now + 3600, until=now + 7200, reason="new switch", rack="r1")
    assert "from now, for 3600 s: new switch" in post(client, "/v1/maintenance", plan, op.ChangeResult).sentence
    detail = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert (detail.summary.state, detail.maintenance_until) == ("healthy", 0.0)
    assert [(window.starts_at, window.until) for window in detail.planned_maintenance] == [(now + 3600, now + 7200)]
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


def test_findings_stand_until_cleared_and_stay_in_history(client: TestClient) -> None:
    (agent,) = fleet(client, "n1")
    agent.report(FindingRaised(finding=FELL_OFF))
    (seen,) = get(client, "/v1/findings?active=true", operator_history.FindingList).findings
    assert (seen.node, seen.finding.xid, seen.cleared_at) == ("n1", 79, None)
    agent.report(FindingCleared(key=FELL_OFF.key))
    assert get(client, "/v1/findings?active=true", operator_history.FindingList).findings == ()
    (seen,) = get(client, "/v1/findings?node=n1&kind=gpu.xid", operator_history.FindingList).findings
    assert seen.cleared_at is not None
    assert get(client, "/v1/findings?kind=gpu.lost", operator_history.FindingList).findings == ()


@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), ("1", "0")])
def test_boolean_query_accepts_several_spellings(client: TestClient, yes: str, no: str) -> None:
    (agent,) = fleet(client, "n1")
    agent.report(FindingRaised(finding=FELL_OFF))
    standing = [get(client, f"/v1/findings?active={flag}", operator_history.FindingList).findings for flag in (yes, no)]
    assert list(map(len, standing)) == [1, 0]
    ends = [get(client, f"/v1/events?limit=1&newest={flag}", op.EventList).events[0].id for flag in (yes, no)]
    assert ends[0] > ends[1]


def test_verdicts_are_paged_newest_first(client: TestClient) -> None:
    for number, agent in enumerate(fleet(client, "n1", "n2", "n3")):
        agent.report(FindingRaised(finding=xid(60 + number)))
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


@pytest.mark.promise("vendor-document")
def test_evidence_bundle_covers_node_sent_to_repair(client: TestClient) -> None:
    (agent,) = fleet(client, "n1")
    agent.incarnation = 2
    host = Host(vendor="NVIDIA", product="DGXH100", serial="166", chassis_serial="C166", kernel="6.8.0")
    agent.register(gpus=(H100,), host=host)
    agent.report(FindingRaised(finding=FELL_OFF))
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
    assert {remediation.node for remediation in found} == {"n1"}
    assert all(remediation.sentence and remediation.state != "failed" for remediation in found)
    assert next(remediation for remediation in found if remediation.kind == "repair").state != "superseded"


def test_policy_check_reports_changes_and_errors(client: TestClient) -> None:
    policy = get(client, "/v1/policy", operator_history.PolicyDocument)
    assert policy.knobs["budget.count"] == 4
    assert {rule["kind"] for rule in policy.rules} >= {"gpu.xid", "gpu.lost"}
    good = operator_history.PolicyChange(knobs={"budget.count": 2}, rules=({"kind": "gpu.lost", "mode": "observe"},))
    checked = post(client, "/v1/policy/check", good, operator_history.PolicyCheckResult)
    assert checked.ok, checked.error
    assert checked.changes["budget.count"] == "4 -> 2"
    assert any(key.startswith("gpu.lost") and "observe" in text for key, text in checked.changes.items())
    for knob, value, complaint in (("budget.cuont", 2, "did you mean `budget.count`"), ("budget.share", 7.0, "share")):
        change = operator_history.PolicyChange(knobs={knob: value})
        bad = post(client, "/v1/policy/check", change, operator_history.PolicyCheckResult)
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
    body = operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(knobs={"budget.count": 1}))
    with pytest.raises(Refused, match=r"503 .*journal"):
        post(client, "/v1/policy/try", body, operator_history.PolicyTrialResult)
    fleet(client, "n3")
    disk.set()
