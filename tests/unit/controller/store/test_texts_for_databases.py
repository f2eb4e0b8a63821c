"""A text that a database cannot hold must not reach it: the transaction would fail, and with it the controller."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import Reports
from everstep.wire.v1.training import RankLost
from tests.support.controllers import OPERATOR, VIEWER, InProcess, Refused, Speaker, get, joined, post
from tests.support.postgres import postgres, postgres_server

__all__ = ["postgres", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestClient]:
    sqlite = f"sqlite:///{tmp_path / 'c.db'}"
    url = sqlite if request.param == "sqlite" else request.getfixturevalue("postgres")
    with TestClient(InProcess(url)) as client:
        yield client


def test_nul_character_in_text_is_replaced(client: TestClient) -> None:
    speaker = Speaker(client, "n1")
    speaker.register(agent_version="\x00", boot_id="\x00")
    speaker.report(joined("j", 1.0))
    lost = RankLost(job="j", at=1.0, generation=1, rank=0, local_rank=0, detail="killed \x00 by hand", trace="\x00")
    speaker.report(lost)
    because = b'{"reason":"a \\u0000 reason"}'
    assert client.post("/v1/nodes/n1/hold", content=because, headers=OPERATOR).status_code == 200
    post(client, "/v1/credentials", wire.IssueViewer(subject="v", reason="x", note="\x00"), wire.Issued)
    found = get(client, "/v1/events?limit=1000", op.EventList).events
    assert any("a \ufffd reason" in event.sentence for event in found)
    assert "\x00" not in "".join(event.sentence for event in found)


def test_nul_character_in_query_is_harmless(client: TestClient) -> None:
    for what in ("trace", "node", "job", "kind"):
        assert client.get(f"/v1/events?{what}=%00", headers=VIEWER).status_code in (200, 422)
    assert client.get("/v1/verdicts/%00", headers=VIEWER).status_code == 404
    assert client.get("/v1/nodes/%00", headers=VIEWER).status_code == 404
    assert client.get("/v1/status", headers=OPERATOR).status_code == 200


def test_number_beyond_column_range_is_refused(client: TestClient) -> None:
    speaker = Speaker(client, "n1")
    speaker.register()
    for number in (1 << 53, 1 << 63, 1 << 64, -1):
        body = b'{"incarnation":1,"reports":[{"number":%d,"body":{"type":"UserError","job":"j","at":1.0}}]}' % number
        with pytest.raises(Refused) as refused:
            speaker.tell_raw(Reports, body)
        assert refused.value.status == 422, number
    for query in (f"after={1 << 63}", f"after={1 << 64}", f"limit={1 << 63}"):
        assert client.get(f"/v1/events?{query}", headers=VIEWER).status_code == 422
    assert client.get("/v1/status", headers=OPERATOR).status_code == 200
