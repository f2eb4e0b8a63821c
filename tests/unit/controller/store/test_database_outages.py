"""Real controllers whose real database is stopped, hangs, or is full, while a job runs."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from sqlalchemy.engine import make_url

from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import Heartbeat, NumberedReport, Reports
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import AnyReport, GenerationSpec, RankLost
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from tests.support.fleet.controllers import (
    OPERATOR,
    VIEWER,
    ControllerProcess,
    controller_process,
    joined,
    registration,
)
from tests.support.fleet.report_stream import events
from tests.support.fleet.session_client import AgentSession, send_message
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.services.postgres import Server, own_postgres

__all__ = ["own_postgres"]


class Agent:
    """The agent of one node."""

    def __init__(self, controller: ControllerProcess, node: str) -> None:
        self.controller = controller
        self.node = node
        self.number = 0
        status, answer = send_message(controller, node, registration(node))
        assert status == 200, answer

    def report(self, body: AnyReport, *, again: bool = False) -> int:
        """Send a report; return the status of the answer."""
        self.number += not again
        report = Reports(incarnation=1, reports=(NumberedReport(number=self.number, body=body),))
        return send_message(self.controller, self.node, report)[0]

    def beat(self) -> int:
        return send_message(self.controller, self.node, Heartbeat(incarnation=1, seq=1, sent_at=0.0))[0]

    def generation(self, above: int = 0) -> GenerationSpec:
        """The next pushed generation whose number is above `above`."""
        found = until(lambda: [spec for spec in self._pushed() if spec.number > above], "a generation")
        assert isinstance(found[-1], GenerationSpec)
        return found[-1]

    def _pushed(self) -> list[GenerationSpec]:
        """Generations received so far, as the answer to a heartbeat or pushed before that answer."""
        assert self.beat() == 200
        session: AgentSession = self.controller.sessions[self.node]
        pushed, session.pushed = session.pushed, []
        if pushed:
            session.acknowledge(pushed[-1].seq)
        return [message.body.spec for message in pushed if isinstance(message.body, NewGeneration)]


def lost(spec: GenerationSpec) -> RankLost:
    return RankLost(
        job=spec.job,
        at=1.0,
        generation=spec.number,
        rank=0,
        local_rank=0,
        detail="end of file",
        signal=9,
        has_replacement=True,
    )


def status_of(controller: ControllerProcess) -> op.FleetStatus:
    return msgspec.json.decode(controller.ask("GET", "/v1/status", None, VIEWER)[1], type=op.FleetStatus)


def check_surfaces(controller: ControllerProcess) -> None:
    """Check the answers of every interface during a database outage."""
    status, body = controller.ask("GET", "/readyz", None, {})
    assert (status, json.loads(body)["database"]) == (200, "unavailable")
    assert status_of(controller).database_outage
    assert b"everstep_controller_database_unavailable 1.0" in controller.ask("GET", "/metrics", None, VIEWER)[1]
    order = {"reason": "a fan to be looked at"}
    status, body = controller.ask("POST", "/v1/nodes/n2/hold", order, OPERATOR)
    assert status == 503
    assert "the database is " in json.loads(body)["detail"]
    assert "the database is unavailable" in controller.log()


@contextmanager
def regrouping_without(controller: ControllerProcess, go_away: Callable[[], None]) -> Iterator[None]:
    """Check that a job of one node regroups as the database goes away, and again during the outage.

    The body of the `with` statement brings the database back.
    """
    n1, n2 = Agent(controller, "n1"), Agent(controller, "n2")
    assert n1.report(joined("job", 1.0)) == 200
    running = n1.generation()
    go_away()
    assert n1.report(lost(running)) == 503
    first = n1.generation(running.number)
    assert first.number == NUMBERS_PER_EPOCH + 1
    assert n1.report(lost(first)) == 503
    second = n1.generation(first.number)
    assert second.number == first.number + 1
    assert (n1.beat(), n2.beat()) == (200, 200)
    check_surfaces(controller)
    yield
    until(lambda: not status_of(controller).database_outage, "the database's return to be noticed")
    assert n1.report(lost(first), again=True) == 200
    assert [event.kind for event in events(controller, "database.available")] == ["database.available"]
    controller.kill()
    controller.start()
    status, body = controller.ask("GET", "/v1/jobs", None, VIEWER)
    assert status == 200, body
    (job,) = msgspec.json.decode(body, type=op.JobList).jobs
    assert job.generation == second.number
    regrouped = [event.generation for event in events(controller, "generation")]
    assert regrouped[-2:] == [first.number, second.number]


@pytest.mark.promise("database-outage")
@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_job_regroups_while_postgresql_is_away(
    program_forks: ForkPool, fault: str, tmp_path: Path, own_postgres: Server
) -> None:
    database = own_postgres.url.replace("/postgres?", f"/{fault}?")

    plain = make_url(own_postgres.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {fault}".encode())
    settings = tmp_path / "settings.toml"
    settings.write_text("commit_timeout_s = 0.5\nlease_s = 1.5\nlease_renew_s = 0.5\n")
    go_away, come_back = (
        (own_postgres.stop, own_postgres.start) if fault == "stopped" else (own_postgres.hang, own_postgres.wake)
    )
    with controller_process(
        tmp_path, program_forks, database=database, arguments=("--settings", str(settings))
    ) as controller:
        try:
            with regrouping_without(controller, go_away):
                time.sleep(2.0)  # outlasts the lease; no standby can take it
                check_surfaces(controller)
                come_back()
        finally:
            come_back()


@pytest.mark.promise("database-outage")
def test_job_regroups_while_the_disk_is_full(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller_process(tmp_path, program_forks) as controller:
        assert controller.process is not None
        pid = controller.process.pid
        size = os.stat(tmp_path / "controller.db").st_size

        def fill() -> None:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (min(size, 8192), resource.RLIM_INFINITY))

        with regrouping_without(controller, fill):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def order(server: Server, *statements: str) -> None:
    plain = make_url(server.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        for statement in statements:
            connection.execute(statement.encode())


def test_leader_resumes_after_read_only_database_recovers(
    program_forks: ForkPool, tmp_path: Path, own_postgres: Server
) -> None:
    """No other controller knows the decisions of the outage."""
    order(own_postgres, "CREATE DATABASE readonly")
    database = own_postgres.url.replace("/postgres?", "/readonly?")
    settings = tmp_path / "settings.toml"
    settings.write_text("commit_timeout_s = 0.5\nlease_s = 1.5\nlease_renew_s = 0.3\n")
    (tmp_path / "standby").mkdir()
    given: Any = {"database": database, "arguments": ("--settings", str(settings))}
    with (
        controller_process(tmp_path, program_forks, **given) as leader,
        controller_process(tmp_path / "standby", program_forks, **given) as standby,
    ):
        agent = Agent(leader, "n1")
        assert agent.report(joined("job", 1.0)) == 200
        running = agent.generation()
        order(own_postgres, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
        try:
            until(lambda: status_of(leader).database_outage, "the leader to see it")
            assert agent.report(lost(running)) == 503
            regrouped = agent.generation(running.number)
            until(lambda: "cannot be read or renewed" in standby.log(), "the standby to have tried")
        finally:
            order(own_postgres, "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")
        until(lambda: leader.log().count("all decisions are written"), "everything to be written")
        assert [event.generation for event in events(leader, "generation")] == [running.number, regrouped.number]
        assert "taking the lease" in standby.log()
        assert "leading:" not in standby.log()
        assert standby.log().count("taking the lease") == 1
