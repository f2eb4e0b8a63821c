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
from tests.support.controllers import OPERATOR, InProcess, Refused, Speaker, get, post

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


def speaker(client: TestClient, enrolled: wire.Enrolled, secret: str = SECRETS[0]) -> Speaker:
    one = Speaker(client, enrolled.node)
    one.headers = {"Authorization": f"Bearer {stored_token(enrolled.credential, secret)}"}
    return one


def refusal(call: Any, *arguments: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*arguments)
    return caught.value


def test_enrolled_node_authenticates_with_own_credential(client: TestClient) -> None:
    join = join_token(client, subject="n*", note="rack 3")
    enrolled = enrol(client, join, "n1")
    speaker(client, enrolled).register()
    (event,) = [e for e in get(client, "/v1/events?limit=99", op.EventList).events if e.kind == "credential.enrolled"]
    assert event.node == "n1"
    assert event.detail["actor"].startswith("join:")
    assert event.detail["reason"] == "rack 3"


def test_join_token_allows_only_enrolment(client: TestClient) -> None:
    join = join_token(client)
    for path in ("/v1/status", "/v1/credentials", "/v1/nodes/n1"):
        assert client.get(path, headers=join).status_code == 403
    joining = Speaker(client, "n1")
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


def test_used_up_token_expires_after_a_day(client: TestClient, clock: ManualClock) -> None:
    join = join_token(client)
    enrol(client, join, "n1")
    clock.advance(86401.0)
    assert refusal(enrol, client, join, "n1").status == 401


def test_shared_token_enrols_up_to_its_use_count(client: TestClient) -> None:
    three, any_number = join_token(client, uses=3), join_token(client, uses=None)
    for number in range(3):
        enrol(client, three, f"a{number}")
    assert refusal(enrol, client, three, "a3").status == 403
    for number in range(5):
        enrol(client, any_number, f"b{number}")


def test_token_rotation_transfers_remaining_uses(client: TestClient) -> None:
    wanted = wire.IssueJoin(reason="new nodes", uses=2)
    old = post(client, "/v1/credentials", wanted, wire.Issued)
    first = {"Authorization": f"Bearer {old.token}"}
    enrol(client, first, "n1")
    turn = wire.Rotate(reason="the mail went astray", grace_s=600.0)
    new = post(client, f"/v1/credentials/{old.credential.id}/rotate", turn, wire.Issued)
    assert new.credential.uses_left == 1
    assert refusal(enrol, client, first, "n2").status == 403
    enrol(client, first, "n1")  # its answer may have been lost
    second = {"Authorization": f"Bearer {new.token}"}
    enrol(client, second, "n2")
    assert refusal(enrol, client, second, "n3").status == 403


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
    speaker(client, enrolled).register()


def test_replace_token_revokes_the_previous_credential(client: TestClient) -> None:
    old = speaker(client, enrol(client, join_token(client), "n1"))
    old.register()
    new = enrol(client, join_token(client, replace=True), "n1", SECRETS[1])
    assert refusal(old.register).status == 401
    speaker(client, new, SECRETS[1]).register()


def test_node_enrols_again_after_credential_is_revoked(client: TestClient) -> None:
    join = join_token(client, uses=None)
    enrolled = enrol(client, join, "n1")
    because = op.ReasonOnlyRequest(reason="a new board")
    post(client, f"/v1/credentials/{enrolled.credential}/revoke", because, op.ChangeResult)
    speaker(client, enrol(client, join, "n1", SECRETS[1]), SECRETS[1]).register()


def test_refused_enrolment_consumes_no_use(client: TestClient) -> None:
    join = join_token(client, subject="n*", uses=1)
    for node, secret_hash in (("other", hash_secret(SECRETS[0])), ("n 1", hash_secret("x")), ("n1", "short")):
        refusal(post, client, "/v1/enrol", {"node": node, "secret_hash": secret_hash}, wire.Enrolled, join)
    enrol(client, join, "n1")


def test_enrolment_survives_controller_restart(tmp_path: Path, clock: ManualClock) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database, clock=clock)) as client:
        join = join_token(client, uses=2)
        enrolled = enrol(client, join, "n1")
    with TestClient(InProcess(database, clock=clock)) as client:
        speaker(client, enrolled).register()
        assert refusal(enrol, client, join, "n1", SECRETS[1]).status == 409
        enrol(client, join, "n2")
        assert refusal(enrol, client, join, "n3").status == 403
