from __future__ import annotations

import http.client
import json
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest
from sqlalchemy.engine import make_url

from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import NumberedReport, Registered, Reports
from tests.support.fleet.controllers import (
    SECRET,
    VIEWER,
    ControllerProcess,
    controller_process,
    joined,
    registration,
)
from tests.support.fleet.report_stream import EVERY_FINDING, ReportStream, events, reporting
from tests.support.fleet.session_client import AgentSession, send_message
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.forked_programs import ForkedProgram
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def process(program_forks: ForkPool, tmp_path: Path) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path, program_forks) as process:
        yield process


def register(process: ControllerProcess, node: str = "n1") -> Registered:
    status, answer = send_message(process, node, registration(node))
    assert status == 200, answer
    assert isinstance(answer, Registered)
    return answer


@contextmanager
def session_of(process: ControllerProcess, node: str = "n1") -> Iterator[AgentSession]:
    """The session of a registered node; it is closed at the end."""
    with closing(AgentSession(process.listen, node)) as session:
        session.register()
        yield session


def test_ready_file_names_process_and_address(tmp_path: Path) -> None:
    """A controller started by its command line creates its database, ends in order, and starts again."""
    with controller_process(tmp_path) as process:
        for life in range(2):
            if life:
                process.start()
            ready = json.loads(process.ready_file.read_text())
            assert process.process is not None
            assert ready["pid"] == process.process.pid
            assert process.ready_file.stat().st_mode & 0o077 == 0
            assert process.ask("GET", "/healthz", headers={}) == (200, b'{"ok":true,"role":"controller"}')
            assert process.ask("GET", "/readyz", headers={})[0] == 200
            assert process.ask("GET", "/metrics", headers={})[0] == 401
            assert b"everstep_controller_agents_connected 0.0" in process.ask("GET", "/metrics", None, VIEWER)[1]
            assert process.terminate() == 0


def test_sigterm_ends_sessions_and_streams_cleanly(process: ControllerProcess) -> None:
    with session_of(process) as session, closing(process.connection()) as stream:
        stream.request("GET", "/v1/events/stream?after=0", headers=VIEWER)
        response = stream.getresponse()
        assert response.readline() == b"retry: 500\n"
        assert process.terminate() == 0
        assert session.ended()
        response.read()  # to its end
    assert not process.ready_file.exists()
    assert "node.disconnected" not in process.log()


def test_event_stream_resumes_and_continues_live(process: ControllerProcess) -> None:
    register(process)

    def next_event(response: http.client.HTTPResponse) -> op.Event:
        while not (line := response.readline()).startswith(b"data: "):
            assert line
        return msgspec.json.decode(line[6:], type=op.Event)

    with closing(process.connection()) as stream:
        stream.request("GET", "/v1/events/stream", headers={**VIEWER, "Last-Event-ID": "0"})
        response = stream.getresponse()
        seen = [next_event(response)]
        while seen[-1].kind != "node.registered":
            seen.append(next_event(response))
        register(process, "n2")
        seen.append(next_event(response))
    assert (seen[-1].kind, seen[-1].node) == ("node.registered", "n2")
    assert [event.id for event in seen] == list(range(1, len(seen) + 1))


def wait_for_acknowledgements(stream: ReportStream, more_than: int = 0) -> None:
    """Wait until more than this number of further reports are acknowledged."""
    before = stream.acknowledged
    until(lambda: stream.acknowledged > before + more_than, "reports to be acknowledged")


@pytest.mark.promise("acknowledged-is-durable")
def test_acknowledged_reports_survive_kills_exactly_once(program_forks: ForkPool, tmp_path: Path) -> None:
    """The controller is killed three times and restarted, while a client posts reports."""
    settings = tmp_path / "settings.toml"
    settings.write_text(EVERY_FINDING)
    with controller_process(tmp_path, program_forks, arguments=("--settings", str(settings))) as process:
        register(process)
        with reporting(process) as stream:
            for _ in range(3):
                wait_for_acknowledgements(stream, more_than=140)
                process.kill()
                process.start()
            wait_for_acknowledgements(stream)
        stream.check(process)
        assert process.ask("GET", "/v1/status", None, VIEWER)[0] == 200


def test_controller_exits_with_its_parent(tmp_path: Path) -> None:
    secret, ready = tmp_path / "secret", tmp_path / "ready.json"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    command = [
        sys.executable,
        "-m",
        "everstep_controller.main",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--die-with-parent",
    ]
    command += [
        "--database",
        f"sqlite:///{tmp_path / 'c.db'}",
        "--secret-file",
        str(secret),
        "--ready-file",
        str(ready),
    ]
    script = (
        f"import subprocess, time; subprocess.Popen({command!r})\n"
        f"import pathlib\nwhile not pathlib.Path({str(ready)!r}).exists(): time.sleep(0.01)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    pids: list[int] = []

    def seen() -> bool:
        if not pids and ready.exists():
            pids.append(json.loads(ready.read_text())["pid"])
        return bool(pids) or parent.poll() is not None

    until(seen, "the controller to serve")
    assert parent.wait(60) == 0
    until(lambda: not pids or not is_running(pids[0]), "the controller to follow its parent")
    assert not ready.exists()


def test_postgresql_controller_survives_a_kill(program_forks: ForkPool, tmp_path: Path, postgres: str) -> None:
    with controller_process(tmp_path, program_forks, database=postgres) as process:
        register(process)
        reports = Reports(incarnation=1, reports=(NumberedReport(number=1, body=joined("j", 1.0)),))
        assert send_message(process, "n1", reports)[0] == 200
        process.kill()
        process.start()
        jobs = msgspec.json.decode(process.ask("GET", "/v1/jobs", None, VIEWER)[1], type=op.JobList).jobs
        assert [(job.job, job.generation) for job in jobs] == [("j", 1)]


def test_broken_database_connection_is_transparent(
    program_forks: ForkPool, tmp_path: Path, postgres: str, postgres_server: str
) -> None:
    with controller_process(tmp_path, program_forks, database=postgres) as process:
        register(process)
        plain = make_url(postgres_server).set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True) as connection:
            name = make_url(postgres).database
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s AND pid <> pg_backend_pid()",
                (name,),
            )
        register(process, "n2")
        nodes = msgspec.json.decode(process.ask("GET", "/v1/nodes", None, VIEWER)[1], type=op.NodeList).nodes
        assert [record.node for record in nodes] == ["n1", "n2"]
        assert events(process, "database.unavailable") == []


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(program_forks: ForkPool, tmp_path: Path) -> Run:
    """Run ``everstep-controller``; return its exit status and its output."""

    def ran(*arguments: str) -> tuple[int, str]:
        output = tmp_path / "output"
        output.unlink(missing_ok=True)
        status = ForkedProgram(program_forks, "everstep_controller.main", arguments, output).wait()
        return status, output.read_text()

    return ran


def test_invalid_certificate_is_refused_at_start(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    arguments = ("--secret-file", str(secret), "--database", f"sqlite:///{tmp_path / 'c.db'}")
    status, terminal_output = run("serve", *arguments, "--tls-certificate", str(secret), "--tls-key", str(secret))
    assert status == 2
    assert "cannot be used" in terminal_output


def test_unreadable_stored_state_is_refused_at_start(program_forks: ForkPool, tmp_path: Path) -> None:
    with controller_process(tmp_path, program_forks) as process:
        register(process)
        assert process.terminate() == 0
        with closing(sqlite3.connect(tmp_path / "controller.db")) as connection, connection:
            connection.execute("UPDATE nodes SET doc = '{\"node\": 7}'")
        with pytest.raises(AssertionError, match="run the release that wrote it"):
            process.start()


def test_database_password_is_read_from_file_and_not_logged(
    program_forks: ForkPool, tmp_path: Path, postgres: str
) -> None:
    """The server trusts local connections, so this shows that the password is sent, not that it is checked."""
    password = tmp_path / "password"
    password.write_text("correct horse\n")
    password.chmod(0o600)
    arguments = ("--database-password-file", str(password))
    with controller_process(tmp_path, program_forks, database=postgres, arguments=arguments) as process:
        register(process)
        log = process.log()
        assert "serving on" in log
        assert "correct horse" not in log


def test_configuration_error_exits_with_status_2(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o644)
    status, terminal_output = run("serve", "--secret-file", str(secret), "--database", f"sqlite:///{tmp_path / 'c.db'}")
    assert status == 2
    assert f"`chmod 600 {secret}`" in terminal_output
    assert "Traceback" not in terminal_output
    secret.chmod(0o600)
    status, terminal_output = run(
        "serve", "--secret-file", str(secret), "--database", "postgresql://postgres@127.0.0.1:1/none"
    )
    assert status == 2
    assert "start PostgreSQL" in terminal_output


def test_address_in_use_is_reported(process: ControllerProcess, run: Run, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    arguments = ("--secret-file", str(process.secret_file), "--database", f"sqlite:///{other}")
    status, terminal_output = run("serve", "--listen", process.listen, *arguments)
    assert status == 2
    assert f"cannot listen on {process.listen}" in terminal_output


def test_events_command_follows_across_controller_restart(process: ControllerProcess, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(mint(SECRET, TokenRole.VIEWER, "vera"))
    command = [sys.executable, "-m", "everstep.cli.main", "--controller", process.url, "--token-file", str(token_file)]
    with subprocess.Popen([*command, "events", "--follow", "--json"], stdout=subprocess.PIPE) as following:
        assert following.stdout is not None
        try:
            for restarted, node in ((False, "n1"), (True, "n2")):
                if restarted:
                    process.kill()
                    process.start()
                register(process, node)
                while (event := msgspec.json.decode(following.stdout.readline(), type=op.Event)).node != node:
                    pass
                assert event.kind == "node.registered"
            following.send_signal(signal.SIGINT)
            assert following.wait(60) == 0
        finally:
            following.kill()


def test_log_lines_are_json_without_tokens(process: ControllerProcess) -> None:
    register(process)
    process.ask("GET", "/v1/status", None, {"Authorization": "Bearer operator:eve:wrong"})
    assert process.terminate() == 0
    lines = [json.loads(line) for line in process.log().splitlines()]
    assert any(line.get("node") == "n1" for line in lines)
    assert "Bearer" not in process.log()
    assert "wrong" not in process.log()
