from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import hash_secret, stored_token
from everstep.clock import ManualClock
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from tests.support.fleet.controllers import OPERATOR, AgentClient, InProcess, Refused, get, post

SECRETS = tuple(f"{number:064x}" for number in range(10))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def client(tmp_path: Path, clock: ManualClock) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock)) as client:
        yield client


def join_token(client: TestClient, **wanted: Any) -> dict[str, str]:
    issued = post(client, "/v1/credentials", wire.IssueJoin(reason="new nodes", **wanted), wire.Issued)
    return {"Authorization": f"Bearer {issued.token}"}


def enrol(client: TestClient, join: dict[str, str], node: str, secret: str = SECRETS[0]) -> wire.Enrolled:
    asked = wire.Enrol(node=node, secret_hash=hash_secret(secret))
    enrolled: wire.Enrolled = post(client, "/v1/enrol", asked, wire.Enrolled, join)
    return enrolled


def enrolled_agent(client: TestClient, enrolled: wire.Enrolled, secret: str = SECRETS[0]) -> AgentClient:
    agent = AgentClient(client, enrolled.node)
    agent.headers = {"Authorization": f"Bearer {stored_token(enrolled.credential, secret)}"}
    return agent


def refusal(call: Any, *arguments: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*arguments)
    return caught.value


def test_join_token_allows_only_enrolment(client: TestClient) -> None:
    join = join_token(client)
    for path in ("/v1/status", "/v1/credentials", "/v1/nodes/n1"):
        assert client.get(path, headers=join).status_code == 403
    joining = AgentClient(client, "n1")
    joining.headers = join
    assert refusal(joining.beat).status == 403


def test_one_time_token_enrols_one_node(client: TestClient) -> None:
    join = join_token(client)
    enrol(client, join, "n1")
    refused = refusal(enrol, client, join, "n2")
    assert (refused.status, refused.message) == (403, "this join token is used up: ask an operator for another")


def test_enrolment_retry_returns_the_same_credential(client: TestClient) -> None:
    join = join_token(client)
    enrolled = enrol(client, join, "n1")
    assert enrol(client, join, "n1") == enrolled
    assert len(get(client, "/v1/credentials", wire.CredentialList, OPERATOR).credentials) == 2
    assert refusal(enrol, client, join, "n1", SECRETS[1]).status == 403


def test_shared_token_enrols_up_to_its_use_count(client: TestClient) -> None:
    three, any_number = join_token(client, uses=3), join_token(client, uses=None)
    for number in range(3):
        enrol(client, three, f"a{number}")
    assert refusal(enrol, client, three, "a3").status == 403
    for number in range(5):
        enrol(client, any_number, f"b{number}")


def test_token_enrols_only_nodes_matching_its_pattern(client: TestClient) -> None:
    join = join_token(client, subject="rack3-n?", uses=None)
    enrol(client, join, "rack3-n1")
    for stranger in ("rack4-n1", "rack3-n11", "n1"):
        assert refusal(enrol, client, join, stranger).status == 403


def test_enrolled_node_refuses_enrolment_with_another_secret(client: TestClient) -> None:
    join = join_token(client, uses=None)
    enrolled = enrol(client, join, "n1")
    refused = refusal(enrol, client, join, "n1", SECRETS[1])
    assert refused.status == 409
    assert f"everstep token revoke {enrolled.credential}" in refused.message
    enrolled_agent(client, enrolled).register()


def test_replace_token_revokes_the_previous_credential(client: TestClient) -> None:
    old = enrolled_agent(client, enrol(client, join_token(client), "n1"))
    old.register()
    new = enrol(client, join_token(client, replace=True), "n1", SECRETS[1])
    assert refusal(old.register).status == 401
    enrolled_agent(client, new, SECRETS[1]).register()


def test_node_enrols_again_after_credential_is_revoked(client: TestClient) -> None:
    join = join_token(client, uses=None)
    enrolled = enrol(client, join, "n1")
    because = op.ReasonOnlyRequest(reason="a new board")
    post(client, f"/v1/credentials/{enrolled.credential}/revoke", because, op.ChangeResult)
    enrolled_agent(client, enrol(client, join, "n1", SECRETS[1]), SECRETS[1]).register()
