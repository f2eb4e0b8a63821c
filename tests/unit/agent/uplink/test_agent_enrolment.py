from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.bearer_tokens import hash_secret, split_stored
from everstep.errors import ConfigurationError, Conflict, PermissionDenied
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import enrolment as wire
from everstep.wire.v1 import operator as op
from everstep_agent.config import AgentSettings
from everstep_agent.uplink.credentials import enrol, ensure_token
from tests.support.fleet.controllers import ControllerProcess, controller_process
from tests.support.fleet.session_client import AgentSession, NotUpgraded
from tests.support.processes.fork_pool import ForkPool

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def process(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path_factory.mktemp("controller"), program_forks) as process:
        yield process


def post(process: ControllerProcess, path: str, body: Any, kind: type[Any]) -> Any:
    status, answer = process.ask("POST", path, body)
    assert status == 200, answer
    return msgspec.json.decode(answer, type=kind)


@pytest.fixture
def settings(process: ControllerProcess, tmp_path: Path) -> Callable[..., AgentSettings]:
    """An agent's settings, with a join token of its own and no token yet."""

    def make(node: str, **wanted: Any) -> AgentSettings:
        issued = post(process, "/v1/credentials", wire.IssueJoin(reason="a test", **wanted), wire.Issued)
        (tmp_path / "join").write_text(issued.token)
        return AgentSettings.from_values(
            node=node,
            controllers=(process.url,),
            run_dir=tmp_path / "run",
            token_file=tmp_path / "token",
            join_token_file=tmp_path / "join",
        ).validate()

    return make


def token(settings: AgentSettings) -> str:
    assert settings.credentials.token_file is not None
    return settings.credentials.token_file.read_text().strip()


def is_good(process: ControllerProcess, settings: AgentSettings) -> bool:
    try:
        AgentSession(process.listen, settings.node, headers={"Authorization": f"Bearer {token(settings)}"}).close()
    except NotUpgraded as refused:
        if refused.status in (401, 403):
            return False
        raise
    return True


def test_enrolment_writes_a_private_token_and_cleans_up(
    process: ControllerProcess, settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    mine = settings("alone")
    enrol(mine)
    assert is_good(process, mine)
    assert stat.S_IMODE(os.stat(tmp_path / "token").st_mode) == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["join", "token"]


def test_lost_enrolment_answer_is_retried_with_same_secret(
    process: ControllerProcess, settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    mine, secret = settings("lost"), "5" * 64
    (tmp_path / ".token.enrolling").write_text(secret)
    join = {"Authorization": f"Bearer {(tmp_path / 'join').read_text()}"}
    asked = wire.Enrol(node="lost", secret_hash=hash_secret(secret))
    assert process.ask("POST", "/v1/enrol", asked, join)[0] == 200
    enrol(mine)
    assert split_stored(token(mine))[1] == secret
    assert is_good(process, mine)


def test_enrolment_refusal_is_raised_and_writes_no_token(settings: Callable[..., AgentSettings]) -> None:
    with pytest.raises(PermissionDenied, match="for nodes named other"):
        enrol(mine := settings("stranger", subject="other*"))
    assert mine.credentials.token_file is not None
    assert not mine.credentials.token_file.exists()
    enrol(settings("twice", uses=None))
    mine.credentials.token_file.unlink()
    with pytest.raises(Conflict, match="is enrolled already"):
        enrol(settings("twice"))


def test_enrolment_is_skipped_with_token_or_without_join_token(
    settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    mine = settings("content")
    asyncio.run(ensure_token(mine.with_values(join_token_file=None), asyncio.Event()))
    assert not (tmp_path / "token").exists()
    (tmp_path / "token").write_text("agent:content:mac")
    asyncio.run(ensure_token(mine, asyncio.Event()))
    assert token(mine) == "agent:content:mac"


def test_enrolment_waits_for_a_controller_until_stopped(
    settings: Callable[..., AgentSettings], caplog: pytest.LogCaptureFixture
) -> None:
    mine = settings("waits").with_values(controllers=("http://127.0.0.1:1",))

    async def scenario() -> None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(ensure_token(mine, stop))
        async with asyncio.timeout(DEADLINE_S):
            while "not enrolled yet" not in caplog.text:
                await asyncio.sleep(0.005)
            stop.set()
            await waiting

    asyncio.run(scenario())
    assert len([record for record in caplog.records if "not enrolled yet" in record.message]) == 1


def test_unreadable_join_token_is_refused_at_once(settings: Callable[..., AgentSettings]) -> None:
    mine = settings("blind")
    assert mine.credentials.join_token_file is not None
    mine.credentials.join_token_file.unlink()
    with pytest.raises(ConfigurationError, match="join token file"):
        asyncio.run(ensure_token(mine, asyncio.Event()))


@pytest.mark.slow
def test_agent_enrols_again_after_credential_revocation(
    process: ControllerProcess, settings: Callable[..., AgentSettings], tmp_path: Path
) -> None:
    mine = settings("joins", uses=None)
    files = mine.credentials
    command = [sys.executable, "-m", "everstep_agent.main", "--node", "joins", "--controller", process.url]
    command += ["--token-file", str(files.token_file), "--join-token-file", str(files.join_token_file)]
    command += ["--run-dir", str(tmp_path / "run"), "--segment-dir", str(tmp_path / "segments")]
    command += ["--virtual", "default", "--die-with-parent", "--stop-vault-on-exit"]
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for(lambda: is_registered(process, "joins"), tmp_path)
        before = token(mine)
        path = f"/v1/credentials/{split_stored(before)[0]}/revoke"
        post(process, path, op.ReasonOnlyRequest(reason="a test"), op.ChangeResult)
        wait_for(lambda: token(mine) != before and is_good(process, mine), tmp_path)
    finally:
        agent.terminate()
        assert agent.wait(DEADLINE_S) == 0


def is_registered(process: ControllerProcess, node: str) -> bool:
    status, body = process.ask("GET", "/v1/nodes")
    return status == 200 and node in [node["node"] for node in json.loads(body)["nodes"]]


def wait_for(condition: Callable[[], bool], directory: Path) -> None:
    end = SYSTEM_CLOCK.monotonic() + DEADLINE_S
    while not condition():
        if SYSTEM_CLOCK.monotonic() > end:
            raise AssertionError("waited in vain:\n" + (directory / "agent.log").read_text())
        time.sleep(0.02)
