from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole, hash_secret, split_stored, stored_token
from everstep.clock import ManualClock
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from tests.support.fleet.controllers import OPERATOR, VIEWER, AgentClient, InProcess, Refused, get, post

BECAUSE = op.ReasonOnlyRequest(reason="left the company")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def application(tmp_path: Path, clock: ManualClock) -> InProcess:
    return InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock)


@pytest.fixture
def client(application: InProcess) -> Iterator[TestClient]:
    with TestClient(application) as client:
        yield client


def issue(client: TestClient, wanted: wire.IssueRequest) -> wire.Issued:
    issued: wire.Issued = post(client, "/v1/credentials", wanted, wire.Issued)
    return issued


def shows(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def sees_status(client: TestClient, token: str) -> int:
    return client.get("/v1/status", headers=shows(token)).status_code


def events_of(client: TestClient, kind: str) -> list[op.Event]:
    events = get(client, "/v1/events?limit=1000", op.EventList).events
    return [event for event in events if event.kind == kind]


def refusal(call: Any, *arguments: Any, **named: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*arguments, **named)
    return caught.value


def test_agent_credential_covers_only_its_node(client: TestClient) -> None:
    issued = issue(client, wire.IssueAgent(subject="n1", reason="by hand"))
    own, other = AgentClient(client, "n1"), AgentClient(client, "n2")
    own.headers = other.headers = shows(issued.token)
    own.register()
    assert refusal(other.register).status == 403


def test_secret_appears_in_no_list_log_or_table(
    client: TestClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        issued = issue(client, wire.IssueOperator(subject="omar", reason="on call"))
        assert sees_status(client, issued.token) == 200
    secret = split_stored(issued.token)[1]
    listed = client.get("/v1/credentials", headers=OPERATOR)
    assert issued.credential.id in listed.text
    assert secret not in listed.text
    assert hash_secret(secret) not in listed.text
    assert secret not in client.get("/v1/events?limit=1000", headers=VIEWER).text
    assert secret not in caplog.text
    assert all(secret.encode() not in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"role": "agent", "subject": "a node", "reason": "x"}, "subject"),
        ({"role": "agent", "subject": "n1"}, "reason"),
        ({"role": "agent", "subject": "n1", "reason": ""}, "reason"),
        ({"role": "king", "subject": "n1", "reason": "x"}, "king"),
        ({"role": "agent", "subject": "n1", "reason": "x", "uses": 3}, "uses"),
        ({"role": "join", "uses": 0, "reason": "x"}, "uses"),
        ({"role": "viewer", "subject": "v", "reason": "x", "expires_in_s": -1}, "expires_in_s"),
    ],
)
def test_issue_rejects_invalid_requests(client: TestClient, body: dict[str, Any], says: str) -> None:
    refused = refusal(post, client, "/v1/credentials", body, wire.Issued)
    assert refused.status == 422
    assert says in refused.message
    assert get(client, "/v1/credentials", wire.CredentialList, OPERATOR).credentials == ()


@pytest.mark.promise("revocation")
def test_revoked_credential_is_refused_on_next_request(client: TestClient) -> None:
    issued = issue(client, wire.IssueViewer(subject="guest", reason="a visit"))
    assert sees_status(client, issued.token) == 200
    path = f"/v1/credentials/{issued.credential.id}/revoke"
    changed = post(client, path, BECAUSE, op.ChangeResult)
    assert "revoked viewer credential" in changed.sentence
    answer = client.get("/v1/status", headers=shows(issued.token))
    assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
    assert "was revoked" in answer.json()["detail"]
    (event,) = events_of(client, "credential.revoked")
    assert (event.detail["actor"], event.detail["reason"]) == ("olga", "left the company")
    assert refusal(post, client, path, BECAUSE, op.ChangeResult).status == 409


def test_unknown_credential_cannot_be_revoked_or_rotated(client: TestClient) -> None:
    for verb, body in (("revoke", BECAUSE), ("rotate", wire.Rotate(reason="due"))):
        assert refusal(post, client, f"/v1/credentials/{'0' * 16}/{verb}", body, op.ChangeResult).status == 404


def test_rotation_keeps_old_credential_through_grace(client: TestClient, clock: ManualClock) -> None:
    first = issue(client, wire.IssueViewer(subject="grafana", reason="the wall display", note="wall"))
    path = f"/v1/credentials/{first.credential.id}/rotate"
    second = post(client, path, wire.Rotate(reason="yearly", grace_s=600.0), wire.Issued)
    assert (second.credential.subject, second.credential.note) == ("grafana", "wall")
    assert sees_status(client, first.token) == sees_status(client, second.token) == 200
    clock.advance(601.0)
    assert sees_status(client, first.token) == 401
    assert sees_status(client, second.token) == 200


def test_wrong_secret_or_unknown_id_is_unauthenticated(client: TestClient) -> None:
    issued = issue(client, wire.IssueViewer(subject="guest", reason="a visit"))
    for token in (
        stored_token(issued.credential.id, "0" * 64),
        stored_token("0" * 16, split_stored(issued.token)[1]),
        stored_token(issued.credential.id, ""),
        "es1.",
        issued.token + "0",
        issued.token[:-1],
    ):
        assert sees_status(client, token) == 401
    assert issued.credential.role is TokenRole.VIEWER


def test_credentials_are_read_only_during_database_outage(application: InProcess, client: TestClient) -> None:
    issued = issue(client, wire.IssueViewer(subject="guest", reason="a visit"))
    assert application.controller is not None
    application.controller.loop.state.database.outage = "it does not answer"
    try:
        for path, body in (
            ("/v1/credentials", wire.IssueViewer(subject="guest", reason="a visit")),
            (f"/v1/credentials/{issued.credential.id}/revoke", BECAUSE),
            (f"/v1/credentials/{issued.credential.id}/rotate", wire.Rotate(reason="due")),
        ):
            assert refusal(post, client, path, body, op.ChangeResult).status == 503
        assert sees_status(client, issued.token) == 200
    finally:
        application.controller.loop.state.database.outage = ""
