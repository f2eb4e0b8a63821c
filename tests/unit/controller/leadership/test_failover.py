"""Three real controllers over a real PostgreSQL: the leader is killed or stopped while agents send reports."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import psycopg
import pytest
from sqlalchemy.engine import make_url

from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import FrameKind, FrameRefused, Heartbeat
from tests.support.agents.agent_process import agent_process
from tests.support.fleet.controllers import LONG_SILENCES, SECRET, VIEWER, ControllerProcess, bearer
from tests.support.fleet.report_stream import EVERY_FINDING, ReportStream, events, reporting
from tests.support.fleet.session_client import AgentSession
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow

BECAUSE = op.ReasonOnlyRequest(reason="asked of the one asleep")
N1 = bearer(TokenRole.AGENT, "n1")
STOPPED_S = float(os.environ.get("EVERSTEP_TEST_STOPPED_S", "0"))
SHORT_LEASE = "" if STOPPED_S else "lease_s = 1.5\nlease_renew_s = 0.3\n"


@pytest.fixture
def controllers(program_forks: ForkPool, tmp_path: Path, postgres: str) -> Iterator[list[ControllerProcess]]:
    settings = tmp_path / "settings.toml"
    settings.write_text(SHORT_LEASE + EVERY_FINDING + LONG_SILENCES)
    made = []
    for name in "abc":
        (tmp_path / name).mkdir()
        made.append(
            ControllerProcess(
                tmp_path / name, program_forks, database=postgres, arguments=("--settings", str(settings))
            )
        )
    try:
        yield [controller.start() for controller in made]
    finally:
        for controller in made:
            controller.end()


def leads(controller: ControllerProcess) -> bool:
    return controller.leads()


def leader_of(controllers: list[ControllerProcess]) -> ControllerProcess:
    until(lambda: any(map(leads, controllers)), "a leader")
    (leader,) = filter(leads, controllers)
    return leader


def more(stream: ReportStream) -> None:
    before = stream.acknowledged
    until(lambda: stream.acknowledged > before + 20 * stream.PER_REQUEST, "reports to be acknowledged")


@pytest.mark.promise("single-leader")
def test_standby_names_leader_and_takes_over_on_termination(
    controllers: list[ControllerProcess],
) -> None:
    leader, *others = controllers
    assert leader.leads()
    for standby in others:
        assert standby.ask("GET", "/healthz", None, {})[0] == 200
        status, body = standby.ask("GET", "/readyz", None, {})
        assert (status, json.loads(body)) == (503, {"ok": False, "role": "standby", "leader": leader.url})
        with closing(standby.connection()) as connection:
            connection.request("GET", "/v1/status", None, VIEWER)
            response = connection.getresponse()
            problem = json.loads(response.read())
        assert response.status == 503
        assert response.headers["everstep-leader"] == problem["leader"] == leader.url
        assert problem["code"] == "unavailable"
        assert standby.ask("GET", "/metrics", None, {})[0] == 401
        assert b"everstep_controller_leader 0.0" in standby.ask("GET", "/metrics", None, VIEWER)[1]
    assert b"everstep_controller_leader 1.0" in leader.ask("GET", "/metrics", None, VIEWER)[1]
    assert leader.terminate() == 0
    until(lambda: any(map(leads, others)), "another leader")


@pytest.mark.promise("acknowledged-is-durable")
def test_failover_keeps_every_acknowledged_write_once(
    controllers: list[ControllerProcess],
) -> None:
    with reporting(*controllers) as stream:
        for _ in range(3):
            more(stream)
            leader = leader_of(controllers)
            leader.kill()
            until(lambda: any(map(leads, controllers)), "another leader")
            leader.start()
        more(stream)
    stream.check(leader_of(controllers))


@pytest.mark.promise("old-leader-fenced")
def test_paused_leader_wakes_up_as_standby(controllers: list[ControllerProcess]) -> None:
    with reporting(*controllers) as stream:
        more(stream)
        stopped = leader_of(controllers)
        assert stopped.process is not None
        others = [standby for standby in controllers if standby is not stopped]
        with closing(AgentSession(stopped.listen, "n2")) as kept:
            kept.register()
            kept.beat(findings=())
            stopped.process.send_signal(signal.SIGSTOP)
            try:
                until(lambda: any(map(leads, others)), "another leader")
                beat = Heartbeat(incarnation=1, seq=2, sent_at=0.0)
                kept.send_frame(
                    FrameKind.HEARTBEAT, beat
                )  # the heartbeat waits in the socket of the stopped controller
                more(stream)
            finally:
                stopped.process.send_signal(signal.SIGCONT)
            try:
                assert kept.answer(FrameRefused).code == "unavailable"
            except (ConnectionError, EOFError):  # closed, as the former leader noticed its successor first
                pass
        until(lambda: stopped.ask("GET", "/readyz", None, {})[1].count(b"http://"), "it to stand by")
        assert stopped.process.poll() is None
        leader = leader_of(controllers)
        assert leader is not stopped
        leader.kill()
        more(stream)
    stream.check(leader_of(controllers))


@contextmanager
def blocked_writes(postgres: str) -> Iterator[Callable[[], bool]]:
    """Block every write on a locked row; the yielded function tests if a write waits."""
    plain = make_url(postgres).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as holder, psycopg.connect(plain, autocommit=True) as looking:
        holder.execute("SELECT value FROM meta WHERE key = 'epoch' FOR UPDATE")
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND application_name LIKE 'everstep-controller%'"
        )
        yield lambda: looking.execute(waiting).fetchone() != (0,)
        holder.rollback()


@pytest.mark.promise("old-leader-fenced")
def test_paused_write_of_former_leader_is_rejected(controllers: list[ControllerProcess], postgres: str) -> None:
    """Either the repeated write or the renewal of the lease tells the former leader that its epoch has ended.

    EVERSTEP_TEST_STOPPED_S=30: stop it for 30 seconds, with the default lease of controllers.
    """
    with reporting(*controllers) as stream, ThreadPoolExecutor(1) as hands:
        more(stream)
        stopped = leader_of(controllers)
        assert stopped.process is not None
        others = [standby for standby in controllers if standby is not stopped]
        with blocked_writes(postgres) as waits:
            order = hands.submit(stopped.ask, "POST", "/v1/nodes/n1/hold", BECAUSE, timeout_s=STOPPED_S + 60.0)
            until(waits, "a write to be under way")
            stopped.process.send_signal(signal.SIGSTOP)
            asleep_at = time.perf_counter()
        try:
            until(lambda: any(map(leads, others)), "another leader")
            more(stream)
            until(lambda: time.perf_counter() >= asleep_at + STOPPED_S, "it to have slept", STOPPED_S + 1.0)
            assert not order.done()
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        assert order.result(60)[0] == 503
        until(lambda: stopped.ask("GET", "/readyz", None, {})[1].count(b"http://"), "it to stand by")
        assert re.search(r"stepping down: .*\b(took the database over|has taken the lease of epoch 1)\b", stopped.log())
        assert stopped.process.poll() is None
        more(stream)
    leader = leader_of(controllers)
    assert leader is not stopped
    assert events(leader, "operator.hold") == []
    stream.check(leader)


def taking(controller: ControllerProcess) -> int:
    return controller.log().count("taking the lease")


def test_paused_standby_during_takeover_is_replaced(controllers: list[ControllerProcess], postgres: str) -> None:
    leader = leader_of(controllers)
    others = [standby for standby in controllers if standby is not leader]
    with blocked_writes(postgres) as waits:
        leader.kill()
        until(lambda: waits() and any(map(taking, others)), "a standby to take over")
        stopped = next(filter(taking, others))
        assert stopped.process is not None
        stopped.process.send_signal(signal.SIGSTOP)
    try:
        (follower,) = [standby for standby in others if standby is not stopped]
        until(follower.leads, "the other standby to lead")
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    until(lambda: stopped.ask("GET", "/readyz", None, {})[1].count(b"http://"), "it to stand by")
    assert follower.leads()


def connected(controller: ControllerProcess) -> int:
    status, body = controller.ask("GET", "/v1/status", None, VIEWER)
    return msgspec.json.decode(body, type=op.FleetStatus).connected_nodes if status == 200 else 0


@pytest.mark.promise("single-leader")
def test_agent_session_follows_failover_without_node_loss(controllers: list[ControllerProcess]) -> None:
    with agent_process(",".join(controller.url for controller in controllers)) as agent:
        agent.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        agent.start()
        for _ in range(2):
            leader = leader_of(controllers)
            until(partial(connected, leader), "the agent's session")
            leader.kill()
        last = leader_of(controllers)
        until(lambda: connected(last), "the agent's session at the last controller")
        assert len(events(last, "node.registered")) == 1
        assert events(last, "node.lost") == []
        assert agent.end() == 0
