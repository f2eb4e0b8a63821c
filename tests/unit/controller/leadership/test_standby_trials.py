"""What a controller that stands by recorded while it led, asked for a trial of another policy."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep_controller.api.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.leadership.member import StandbyApp
from starlette.testclient import TestClient
from typer.testing import CliRunner

from everstep.bearer_tokens import TokenRole, mint
from everstep.cli.main import app
from everstep.clock import ManualClock
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from tests.support.controllers import PATIENT, SECRET, VIEWER, bearer, controller_process, registration
from tests.support.core_fleet import START
from tests.support.findings import xid
from tests.support.forked import ForkPool
from tests.support.journaled import JournaledFleet
from tests.support.sessions import tell
from tests.support.waiting import until

TRY = operator_history.PolicyTrialRequest(change=operator_history.PolicyChange(knobs={"eviction_count": 1}), hours=1.0)
"""Of a fleet whose budget was four."""


def _standby(journal: str = "") -> StandbyApp:
    settings = ControllerSettings(secret_file="unused", policy=CorePolicy.lab_preset(), journal_dir=journal)
    return StandbyApp(settings, Keyring((SECRET,)), ManualClock(wall=START + 60.0), lambda: "http://10.0.0.9:7700")


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """What a controller recorded before it stood by: two nodes left."""
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
    status, said = _ask(_standby(recorded), "/v1/policy/try?local=true")
    told = msgspec.convert(said, operator_history.PolicyTrialResult)
    assert (status, told.evictions, len(told.avoided_evictions)) == (200, 1, 1)
    assert told.avoided_evictions[0].startswith("verdict n3-1 (evict)")


def test_standby_redirects_other_trials_to_leader(recorded: str) -> None:
    for path in ("/v1/policy/try", "/v1/policy/try?local=false", "/v1/policy/check?local=true"):
        status, said = _ask(_standby(recorded), path, headers={})
        assert (status, said["role"], said["leader"]) == (503, "standby", "http://10.0.0.9:7700")


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, TRY, 401),
        (bearer(TokenRole.AGENT, "n1"), TRY, 403),
        (VIEWER, {"change": {"knobs": {"eviction_cuont": 1}}}, 422),
        (VIEWER, {"change": 1}, 422),
        (VIEWER, TRY, 409),
    ],
)
def test_standby_checks_trial_requests_like_a_leader(headers: dict[str, str], body: Any, status: int) -> None:
    assert _ask(_standby(), "/v1/policy/try?local=true", body, headers)[0] == status


def test_standby_without_journal_answers_not_found(tmp_path: Path) -> None:
    assert _ask(_standby(str(tmp_path)), "/v1/policy/try?local=true")[0] == 404


# --- with real controllers ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trial_command_merges_records_of_two_controllers(
    program_forks: ForkPool, tmp_path: Path, postgres: str
) -> None:
    with ExitStack() as stack:
        pair = []
        for name in "ab":
            (tmp_path / name).mkdir()
            settings = tmp_path / name / "settings.toml"
            settings.write_text(f'journal_dir = "{tmp_path / name / "journal"}"\n[policy]\n{PATIENT}')
            options = {"database": postgres, "arguments": ("--settings", str(settings))}
            pair.append(stack.enter_context(controller_process(tmp_path / name, program_forks, **options)))
        for leader, other, node in ((pair[0], pair[1], "n1"), (pair[1], pair[0], "n2")):
            until(leader.leads, "the first one to lead")
            assert tell(leader, node, registration(node))[0] == 200
            evict = leader.ask("POST", f"/v1/nodes/{node}/evict", op.ReasonOnlyRequest(reason="to see it"))
            assert evict[0] == 200, evict
            if node == "n1":
                assert leader.terminate() == 0
                until(other.leads, "another one to lead")
                leader.start()
        token, change = tmp_path / "token", tmp_path / "change.toml"
        token.write_text(mint(SECRET, TokenRole.VIEWER, "vera"))
        change.write_text("[policy]\neviction_count = 1\n")
        words = ["--controller", f"{pair[0].url},{pair[1].url}", "--token-file", str(token)]
        done = CliRunner().invoke(app, [*words, "policy", "try", str(change), "--json"])
        assert done.exit_code == 0, done.output
        told = msgspec.json.decode(done.stdout, type=operator_history.PolicyTrialResult)
        assert [one.epoch for one in told.spans] == [1, 2]
        assert (told.gaps, told.evictions) == ((), 0), "people ordered those"
        assert "as happened" in told.sentence
        alone = pair[0].ask("POST", "/v1/policy/try?local=true", TRY, VIEWER)
        assert alone[0] == 200
        assert msgspec.json.decode(alone[1], type=operator_history.PolicyTrialResult).events < told.events


def _agent(node: str) -> dict[str, str]:
    return bearer(TokenRole.AGENT, node)
