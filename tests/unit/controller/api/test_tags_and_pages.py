"""Pages of every list and If-Match of every order, by the table of routes and one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from everstep.clock import ManualClock
from everstep.vocabulary import FindingKind, NodeState
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import FindingRaised, ProbeFinished
from everstep_controller.api.routes import ROUTES
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.controllers import OPERATOR, AgentClient, InProcess, Refused, get, post
from tests.support.fleet.fleet_with_faults import WORN_OUT
from tests.support.fleet.in_process_fleet import FELL_OFF, fleet, running_job
from tests.support.plugins.example_counts import examples

ONE_EVICTION = CorePolicy.lab_preset().with_values(budget={"count": 1, "share": 0.1})
BECAUSE = op.ReasonOnlyRequest(reason="a smell of smoke")
BY_NUMBER = {"events", "orders"}
"""Lists that are resumed by the number of an event, as their stream is."""


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    database, journal = f"sqlite:///{tmp_path / 'c.db'}", str(tmp_path / "journal")
    app = InProcess(database, clock=ManualClock(), journal_dir=journal, policy=ONE_EVICTION)
    with TestClient(app) as client:
        yield client


@pytest.fixture
def any_client(database: str) -> Iterator[TestClient]:
    with TestClient(InProcess(database, clock=ManualClock()), raise_server_exceptions=False) as client:
        yield client


def tag(client: TestClient, path: str) -> str:
    answer = client.get(path, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["etag"])


def seen(etag: str) -> dict[str, str]:
    return OPERATOR | {"If-Match": etag}


def issue(client: TestClient, subject: str) -> wire.Credential:
    issued: wire.Issued = post(client, "/v1/credentials", wire.IssueViewer(subject=subject, reason="x"), wire.Issued)
    return issued.credential


def probe(client: TestClient, *nodes: str) -> str:
    body = op.StartProbe(nodes=nodes, reason="a new cable")
    return str(post(client, "/v1/probes", body, op.ProbeStatus).probe)


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.response.__name__.endswith("List")])
def test_list_routes_are_paged(name: str) -> None:
    if name in BY_NUMBER:
        assert {"limit", "after"} <= set(ROUTES[name].query)
    else:
        assert "next" in {field.name for field in msgspec.structs.fields(ROUTES[name].response)}
        assert {"limit", "cursor"} <= set(ROUTES[name].query)


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.method == "POST"])
def test_order_routes_declare_tag_or_repeatability(name: str) -> None:
    route = ROUTES[name]
    assert bool(route.etag_source) != bool(route.idempotency)
    for path in re.findall(r"/v1/[\w{}/]+", route.etag_source):
        assert any(other.has_etag and other.path == path for other in ROUTES.values()), path


def out_of_budget(client: TestClient) -> None:
    """Two nodes fall ill, each of its own illness; the second is held, and the breaker latches."""
    for agent, finding in zip(fleet(client, "n3", "n4"), (FELL_OFF, WORN_OUT), strict=True):
        agent.report(FindingRaised(finding=finding))
    assert get(client, "/v1/budget", operator_history.BudgetStatus).breaker


def change(name: str, credential: str, until: float) -> tuple[str, Any]:
    """An order of that route which is in place after ``client`` was prepared as below."""
    probed = op.StartProbe(nodes=("n1", "n2"), reason="slow")
    orders: dict[str, tuple[str, Any]] = {
        "start_probe": ("/v1/probes", probed),
        "reset_breaker": ("/v1/breaker/reset", BECAUSE),
        "stop": ("/v1/jobs/j/stop", BECAUSE),
        "resize": ("/v1/jobs/j/resize", op.Resize(size=1, reason="x")),
        "maintenance": ("/v1/maintenance", operator_history.MaintenanceRequest(until=until, reason="x", node="n1")),
        "cancel_maintenance": ("/v1/maintenance/cancel", operator_history.CancelMaintenance(reason="x", node="n1")),
        "order": ("/v1/nodes/n1/hold", BECAUSE),
        "check_policy": ("/v1/policy/check", operator_history.PolicyChange(knobs={"budget.count": 2})),
        "try_policy": (
            "/v1/policy/try",
            operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(knobs={"budget.count": 2})),
        ),
        "issue_credential": ("/v1/credentials", wire.IssueViewer(subject="v", reason="x")),
        "revoke_credential": (f"/v1/credentials/{credential}/revoke", BECAUSE),
        "rotate_credential": (f"/v1/credentials/{credential}/rotate", wire.Rotate(reason="x")),
    }
    return orders[name]


LOOKS = {"check_policy", "try_policy"}
"""Take a body, and change nothing."""


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.etag_source])
def test_order_with_used_tag_is_refused(client: TestClient, name: str) -> None:
    running_job(client, "n1", "n2")
    out_of_budget(client)
    credential = issue(client, "grafana").id
    until = get(client, "/v1/status", op.FleetStatus).now + 3600
    path, body = change(name, credential, until)
    if name == "cancel_maintenance":
        plan = operator_history.MaintenanceRequest(starts_at=until - 1800, until=until, reason="x", node="n1")
        post(client, "/v1/maintenance", plan, op.ChangeResult)
    before = get(client, "/v1/events?limit=1000", op.EventList)
    with pytest.raises(Refused, match="412 outdated"):
        post(client, path, body, Any, seen('"0123456789abcdef"'))
    assert get(client, "/v1/events?limit=1000", op.EventList) == before
    looked_at = ROUTES[name].etag_source.partition(",")[0].format(node="n1", job="j", id=credential)
    etag = tag(client, looked_at)
    assert tag(client, looked_at) == etag
    post(client, path, body, Any, seen(etag))
    if name not in LOOKS:
        with pytest.raises(Refused, match="412 outdated"):
            post(client, path, body, Any, seen(etag))


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.has_etag])
def test_tagged_route_answers_304_for_known_tag(client: TestClient, name: str) -> None:
    running_job(client, "n1", "n2")
    path = ROUTES[name].path.format(node="n1", job="j", id=issue(client, "grafana").id)
    for known in (tag(client, path), "*"):
        again = client.get(path, headers=OPERATOR | {"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag(client, path))


NUMBERS = st.one_of(
    st.integers(), st.floats().map(repr), st.sampled_from(["nan", "-inf", "1_0", str(2**63), str(-(2**63) - 1), "９"])
)


@pytest.mark.slow
@settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(parts=[10**30])
@example(parts=[2**63, 1])
@example(parts=["nan", "x"])
@given(parts=st.lists(st.one_of(NUMBERS, st.text(max_size=5)), min_size=1, max_size=3))
def test_unknown_cursor_is_refused_or_answered(any_client: TestClient, parts: list[object]) -> None:
    cursor = quote("~".join(map(str, parts)))
    for route in ROUTES.values():
        if "cursor" in route.query:
            answer = any_client.get(f"{route.path}?job=j&cursor={cursor}", headers=OPERATOR)
            assert answer.status_code in (200, 422), (route.path, cursor, answer.text)


def test_rack_maintenance_with_outdated_tag_is_refused(client: TestClient) -> None:
    for name, rack in (("n1", "r1"), ("n2", "r1"), ("n3", "r2")):
        AgentClient(client, name).register(domain=Domain(rack=rack))
    window = operator_history.MaintenanceRequest(
        until=get(client, "/v1/status", op.FleetStatus).now + 3600, reason="x", rack="r1"
    )
    etag = tag(client, "/v1/nodes?rack=r1")
    post(client, "/v1/nodes/n3/hold", BECAUSE, op.ChangeResult)
    assert tag(client, "/v1/nodes?rack=r1") == etag, "another rack's nodes are not its own"
    post(client, "/v1/nodes/n2/hold", BECAUSE, op.ChangeResult)
    with pytest.raises(Refused, match="412 outdated"):
        post(client, "/v1/maintenance", window, op.ChangeResult, seen(etag))
    post(client, "/v1/maintenance", window, op.ChangeResult, seen(tag(client, "/v1/nodes?rack=r1")))


def test_node_list_tag_changes_on_hold_deferral_and_cordon(tmp_path: Path) -> None:
    app = InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=ManualClock(), policy=ONE_EVICTION)
    with TestClient(app) as client:
        agents = fleet(client, *(f"n{number}" for number in range(1, 5)))
        for agent, finding in zip(agents, (FELL_OFF, WORN_OUT), strict=False):
            agent.report(FindingRaised(finding=finding))
        nodes = {node.node: node for node in get(client, "/v1/nodes", op.NodeList).nodes}
        assert nodes["n1"].state is NodeState.QUARANTINED
        seen_tags = [tag(client, "/v1/nodes")]
        post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult)
        seen_tags.append(tag(client, "/v1/nodes"))
        assert app.controller is not None
        record = app.controller.loop.state.nodes["n2"]
        record.scheduling.external_cordon_by = "slurm"
        seen_tags.append(tag(client, "/v1/nodes"))
        record.health.eviction_deferred_by = "rack:r1"
        seen_tags.append(tag(client, "/v1/nodes"))
    assert len(set(seen_tags)) == 4


def test_probes_are_paged_newest_first_and_by_node(client: TestClient) -> None:
    fleet(client, "n1", "n2", "n3", "n4")
    names = []
    for nodes in (("n1", "n2"), ("n3", "n4"), ("n1", "n3"), ("n2", "n4"), ("n1", "n4")):
        names.append(probe(client, *nodes))
        for node in nodes:
            AgentClient(client, node).report(ProbeFinished(probe=names[-1], ok=True), first=len(names) + 1)
    first = get(client, "/v1/probes?limit=2", op.ProbeList)
    second = get(client, f"/v1/probes?limit=2&cursor={first.next}", op.ProbeList)
    newest = probe(client, "n1", "n2")
    third = get(client, f"/v1/probes?limit=2&cursor={second.next}", op.ProbeList)
    shown = [probe.probe for page in (first, second, third) for probe in page.probes]
    assert (shown, third.next) == (names[::-1], "")
    mine = get(client, "/v1/probes?node=n1&limit=3", op.ProbeList)
    assert [probe.probe for probe in mine.probes] == [newest, names[4], names[2]]
    assert [probe.probe for probe in get(client, f"/v1/probes?node=n1&cursor={mine.next}", op.ProbeList).probes] == [
        names[0]
    ]
    with pytest.raises(Refused, match="not a cursor"):
        get(client, "/v1/probes?cursor=nonsense", op.ProbeList)


def test_probe_ignores_result_of_uninvolved_node(client: TestClient) -> None:
    agents = fleet(client, "n1", "n2", "n3")
    name = probe(client, "n1", "n2")
    agents[2].report(ProbeFinished(probe=name, ok=False, detail="the link of n1 is bad", rows=((1, 9.0, 1.0),)))
    status = get(client, f"/v1/probes/{name}", op.ProbeStatus)
    assert (status.ok, status.answers, status.rows) == (None, {}, ())


@pytest.mark.promise("eviction-evidence")
def test_node_shows_controller_findings_beside_agent_findings(tmp_path: Path) -> None:
    policy = CorePolicy.lab_preset().with_values(probes={"slow_link_bytes_per_s": 1e9})
    app = InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=ManualClock(), policy=policy)
    with TestClient(app) as client:
        fleet(client, "n1", "n2")[0].report(FindingRaised(finding=FELL_OFF))
        etag, name = tag(client, "/v1/nodes"), probe(client, "n1", "n2")
        AgentClient(client, "n2").report(ProbeFinished(probe=name, ok=True, rows=((1 << 20, 1e-4, 1e6),)), first=2)
        assert tag(client, "/v1/nodes") != etag
        known = {node: get(client, f"/v1/nodes/{node}", op.NodeDetail) for node in ("n1", "n2")}
    assert [finding.kind for finding in known["n1"].findings] == [FindingKind.GPU_XID]
    assert [finding.kind for finding in known["n2"].findings] == [FindingKind.NETWORK_SLOW_LINK]
    assert [known[node].summary.findings for node in known] == [1, 1]


def test_credentials_are_paged_oldest_first(client: TestClient) -> None:
    made = {issue(client, f"v{i}").id for i in range(7)}
    join = post(client, "/v1/credentials", wire.IssueJoin(reason="x"), wire.Issued).credential.id
    ids: list[str] = []
    page = get(client, "/v1/credentials?limit=3", wire.CredentialList, OPERATOR)
    ids += [credential.id for credential in page.credentials]
    while page.next:
        page = get(client, f"/v1/credentials?limit=3&cursor={page.next}", wire.CredentialList, OPERATOR)
        ids += [credential.id for credential in page.credentials]
    assert (len(ids), set(ids)) == (8, made | {join})
    joins = get(client, "/v1/credentials?role=join&limit=1", wire.CredentialList, OPERATOR)
    assert ([credential.id for credential in joins.credentials], joins.next) == ([join], "")
    (third,) = get(client, "/v1/credentials?subject=v3", wire.CredentialList, OPERATOR).credentials
    assert third.subject == "v3"
    for wrong in ("cursor=nonsense", "cursor=x~y", "role=king"):
        with pytest.raises(Refused, match="422"):
            get(client, f"/v1/credentials?{wrong}", wire.CredentialList, OPERATOR)


def test_expired_credentials_leave_pages_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.auth.credentials.FIRST_SWEEP", 1)
    clock = ManualClock()

    def life() -> TestClient:
        return TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock))

    with life() as client:
        kept = issue(client, "kept")
        post(client, f"/v1/credentials/{issue(client, 'gone').id}/revoke", BECAUSE, op.ChangeResult)
        clock.advance(31 * 86400.0)
        new = issue(client, "new")
        page = get(client, "/v1/credentials", wire.CredentialList, OPERATOR)
        assert page.credentials == (kept, new)
        etag = tag(client, "/v1/credentials")
    with life() as client:
        assert get(client, "/v1/credentials", wire.CredentialList, OPERATOR) == page
        assert tag(client, "/v1/credentials") == etag
