"""A standby records which agents contact it, and tries policies on what it recorded while it led."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole, mint
from everstep.clock import ManualClock
from everstep.wire.v1 import operator_history
from everstep_controller.app.standby import StandbyApp
from everstep_controller.auth.credentials import Keyring
from everstep_controller.auth.peers import UNKNOWN_PEER
from tests.support.fleet.controllers import SECRET, VIEWER, bearer, make_settings
from tests.support.fleet.core_fleet import START
from tests.support.fleet.findings import xid
from tests.support.fleet.journaled_fleet import JournaledFleet

TRY = operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(knobs={"budget.count": 1}), hours=1.0)
"""Of a fleet whose budget was four."""


def _standby(journal: str = "") -> StandbyApp:
    settings = make_settings(journal_dir=journal)
    return StandbyApp(settings, Keyring((SECRET,)), ManualClock(wall=START + 60.0), lambda: "http://10.0.0.9:7700")


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """The records of a controller that evicted two nodes before it became a standby."""
    fleet = JournaledFleet(tmp_path / "journal")
    fleet.start(4, 2)
    fleet.seal(5)
    for node, number in (("n2", 79), ("n3", 48)):
        fleet.raise_finding(node, xid(number))
        fleet.advance(8.0, *fleet.state.nodes)
    fleet.journal.close()
    return str(tmp_path / "journal")


def _ask(standby: StandbyApp, path: str, body: Any = TRY, headers: dict[str, str] = VIEWER) -> tuple[int, Any]:
    answer = TestClient(standby).post(path, content=msgspec.json.encode(body), headers=headers)
    return answer.status_code, answer.json()


def test_standby_answers_local_trial_from_its_journal(recorded: str) -> None:
    status, body = _ask(_standby(recorded), "/v1/policy/try?local=true")
    result = msgspec.convert(body, operator_history.PolicyTrialResult)
    assert (status, result.evictions, len(result.avoided_evictions)) == (200, 1, 1)
    assert result.avoided_evictions[0].startswith("verdict n3-1 (evict)")


def test_standby_redirects_other_trials_to_leader(recorded: str) -> None:
    for path in ("/v1/policy/try", "/v1/policy/try?local=false", "/v1/policy/check?local=true"):
        status, body = _ask(_standby(recorded), path, headers={})
        assert (status, body["role"], body["leader"]) == (503, "standby", "http://10.0.0.9:7700")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, TRY, 401),
        (bearer(TokenRole.AGENT, "n1"), TRY, 403),
        (VIEWER, {"change": {"knobs": {"budget.cuont": 1}}}, 422),
        (VIEWER, {"change": 1}, 422),
        (VIEWER, TRY, 409),
    ],
)
def test_standby_checks_trial_requests_like_a_leader(headers: dict[str, str], body: Any, status: int) -> None:
    assert _ask(_standby(), "/v1/policy/try?local=true", body, headers)[0] == status


def test_standby_without_journal_answers_not_found(tmp_path: Path) -> None:
    assert _ask(_standby(str(tmp_path)), "/v1/policy/try?local=true")[0] == 404


def authorization(role: TokenRole, subject: str, secret: bytes = SECRET) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {mint(secret, role, subject)}".encode())]


def test_standby_counts_only_agents_with_valid_credential() -> None:
    clock = ManualClock()
    settings = make_settings(resign_after_s=15.0)
    standby = StandbyApp(settings, Keyring((SECRET,)), clock, lambda: "")
    for _ in range(7):
        standby.record_contact("n1", authorization(TokenRole.AGENT, "n1"), UNKNOWN_PEER)
        standby.record_contact("n2", authorization(TokenRole.AGENT, "n1"), UNKNOWN_PEER)
        standby.record_contact(
            "n3", authorization(TokenRole.AGENT, "n3", b"another fleet's secret, 32 bytes"), UNKNOWN_PEER
        )
        standby.record_contact("n4", authorization(TokenRole.VIEWER, "n4"), UNKNOWN_PEER)
        standby.record_contact("n5", [], UNKNOWN_PEER)
        clock.advance(1.0)
    assert standby.contacts.count_persistent() == 1
    standby.start()
    assert standby.contacts.count_persistent() == 0
