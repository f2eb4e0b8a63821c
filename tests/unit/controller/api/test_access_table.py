"""Request every route with every kind of bearer, by the access rules in the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole, job_token
from everstep.clock import ManualClock
from everstep.vocabulary import JobState
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep_controller.api.routes import PLAIN_ROUTES, ROUTES, Route
from everstep_controller.auth.authenticator import TRAINER_GRACE_S, RouteAccess
from tests.support.fleet.controllers import OPERATOR, VIEWER, AgentClient, InProcess, bearer, joined, post

EVERY_ROUTE = {**ROUTES, **PLAIN_ROUTES}
ADMITTED = {
    RouteAccess.OPEN: {
        "no token",
        "n1's agent",
        "n2's agent",
        "viewer",
        "operator",
        "j's trainer",
        "k's trainer",
        "join",
    },
    RouteAccess.AGENT: {"n1's agent"},
    RouteAccess.READ: {"viewer", "operator"},
    RouteAccess.JOB: {"viewer", "operator", "j's trainer"},
    RouteAccess.CHANGE: {"operator"},
    RouteAccess.JOIN: {"join"},
}
"""The bearers that may request a route about node n1 and job j."""
BEARERS = sorted(ADMITTED[RouteAccess.OPEN])
ENDLESS = {"stream"}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    database = tmp_path_factory.mktemp("access") / "c.db"
    with TestClient(InProcess(f"sqlite:///{database}")) as client:
        agent = AgentClient(client, "n1")
        agent.register()
        agent.report(joined("j", 1.0), joined("k", 1.0))
        yield client


@pytest.fixture(scope="module")
def headers(client: TestClient) -> dict[str, dict[str, str]]:
    """The request headers of each bearer."""
    controller = client.app.controller  # type: ignore[attr-defined]
    assert controller is not None
    jobs = controller.loop.state.jobs
    join = post(client, "/v1/credentials", wire.IssueJoin(reason="a test", uses=None), wire.Issued)
    return {
        "no token": {},
        "n1's agent": bearer(TokenRole.AGENT, "n1"),
        "n2's agent": bearer(TokenRole.AGENT, "n2"),
        "viewer": VIEWER,
        "operator": OPERATOR,
        "j's trainer": {"Authorization": f"Bearer {job_token('j', jobs['j'].secret)}"},
        "k's trainer": {"Authorization": f"Bearer {job_token('k', jobs['k'].secret)}"},
        "join": {"Authorization": f"Bearer {join.token}"},
    }


def concrete_path(route: Route) -> str:
    """The path of a route, about node n1 and job j."""
    names = {"node": "n1", "job": "j", "order": "hold", "id": "0" * 16}
    path = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), route.path)
    if route.access is RouteAccess.JOB and "{job}" not in route.path:
        return path + "?job=j"
    return path


@pytest.mark.promise("roles")
@pytest.mark.parametrize("bearer_name", BEARERS)
@pytest.mark.parametrize("name", EVERY_ROUTE)
def test_route_admits_only_roles_in_its_access_rule(
    client: TestClient, headers: dict[str, dict[str, str]], name: str, bearer_name: str
) -> None:
    route = EVERY_ROUTE[name]
    admitted = bearer_name in ADMITTED[route.access]
    if admitted and name in ENDLESS:
        pytest.skip("an event stream does not end by itself")
    answer = client.request(route.method, concrete_path(route), headers=headers[bearer_name])
    if admitted:
        assert answer.status_code not in (401, 403), answer.text
    else:
        assert answer.status_code == (401 if bearer_name == "no token" else 403), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.promise("roles")
@pytest.mark.parametrize("name", [name for name, route in EVERY_ROUTE.items() if route.access is RouteAccess.JOB])
def test_trainer_token_reads_only_its_own_job(
    client: TestClient, headers: dict[str, dict[str, str]], name: str
) -> None:
    route, own = EVERY_ROUTE[name], headers["j's trainer"]
    others = [route.path.replace("{job}", "k")] if "{job}" in route.path else [route.path, route.path + "?job=k"]
    for path in others:
        assert client.get(path, headers=own).status_code == 403
        twice = path.partition("?")[0] + "?job=j&job=k"
        assert client.get(twice, headers=own).status_code in (403, 422)


def test_operator_change_routes_require_a_reason() -> None:
    for name, route in EVERY_ROUTE.items():
        if route.access is RouteAccess.CHANGE and route.method != "GET":
            for kind in getattr(route.body, "__args__", (route.body,)):
                required = {field.name for field in msgspec.structs.fields(kind) if field.required}
                assert "reason" in required, f"{name} can be ordered without saying why"


def test_trainer_token_expires_soon_after_its_job(tmp_path: Path) -> None:
    clock = ManualClock(wall=1e9)
    app = InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock)
    with TestClient(app) as client:
        AgentClient(client, "n1").register()
        AgentClient(client, "n1").report(joined("j", 1.0))
        assert app.controller is not None
        gate, jobs = app.controller.authenticator, app.controller.loop.state.jobs
        own = {"Authorization": f"Bearer {job_token('j', jobs['j'].secret)}"}
        assert client.get("/v1/jobs/j", headers=own).status_code == 200
        sent = [(b"authorization", own["Authorization"].encode())]
        identity = gate.authorize(RouteAccess.JOB, sent, None, job="j")
        assert gate.is_valid(identity)
        post(client, "/v1/jobs/j/stop", op.ReasonOnlyRequest(reason="x"), op.ChangeResult)
        clock.advance(TRAINER_GRACE_S - 10.0)
        assert client.get("/v1/jobs/j/receipt", headers=own).status_code == 200  # for the launcher to print
        clock.advance(20.0)
        assert client.get("/v1/jobs/j", headers=own).status_code == 401
        assert not gate.is_valid(identity)
        jobs["j"].status.state, jobs["j"].secret = JobState.FORMING, "that of another run by this name"
        assert not gate.is_valid(identity)
