"""Texts and numbers that a database cannot store never fail a transaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import Reports
from everstep.wire.v1.training import RankLost
from tests.support.fleet.controllers import OPERATOR, VIEWER, AgentClient, InProcess, Refused, get, joined, post


@pytest.fixture(params=["sqlite", "postgresql"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    sqlite = f"sqlite:///{tmp_path / 'c.db'}"
    url = sqlite if request.param == "sqlite" else request.getfixturevalue("postgres")
    with TestClient(InProcess(url)) as client:
        yield client


def test_nul_character_in_text_is_replaced(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register(agent_version="\x00", boot_id="\x00")
    agent.report(joined("j", 1.0))
    lost = RankLost(job="j", at=1.0, generation=1, rank=0, local_rank=0, detail="killed \x00 by hand", trace="\x00")
    agent.report(lost)
    because = b'{"reason":"a \\u0000 reason"}'
    assert client.post("/v1/nodes/n1/hold", content=because, headers=OPERATOR).status_code == 200
    post(client, "/v1/credentials", wire.IssueViewer(subject="v", reason="x", note="\x00"), wire.Issued)
    found = get(client, "/v1/events?limit=1000", op.EventList).events
    assert any("a \ufffd reason" in event.sentence for event in found)
    assert "\x00" not in "".join(event.sentence for event in found)


def test_nul_character_in_query_is_harmless(client: TestClient) -> None:
    for column in ("trace", "node", "job", "kind"):
        assert client.get(f"/v1/events?{column}=%00", headers=VIEWER).status_code in (200, 422)
    assert client.get("/v1/verdicts/%00", headers=VIEWER).status_code == 404
    assert client.get("/v1/nodes/%00", headers=VIEWER).status_code == 404
    assert client.get("/v1/status", headers=OPERATOR).status_code == 200


def test_number_beyond_column_range_is_refused(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    for number in (1 << 53, 1 << 63, 1 << 64, -1):
        body = b'{"incarnation":1,"reports":[{"number":%d,"body":{"type":"UserError","job":"j","at":1.0}}]}' % number
        with pytest.raises(Refused) as refused:
            agent.send_bytes(Reports, body)
        assert refused.value.status == 422, number
    for query in (f"after={1 << 63}", f"after={1 << 64}", f"limit={1 << 63}"):
        assert client.get(f"/v1/events?{query}", headers=VIEWER).status_code == 422
    assert client.get("/v1/status", headers=OPERATOR).status_code == 200
