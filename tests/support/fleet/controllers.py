"""Controllers in the test's process or in a process of their own, and messages of agents to them."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from everstep.bearer_tokens import TokenRole, mint
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.settings import with_values
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.agent import (
    Heartbeat,
    HeartbeatAnswer,
    NumberedReport,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
)
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import AnyReport, JobSpec, LauncherJoined
from everstep_controller.app.controller import Controller
from everstep_controller.auth.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.leadership.lease_candidate import ElectedState
from everstep_controller.remediation.remediator import DryRunRemediator, Remediator
from everstep_controller.server import responses
from everstep_controller.server.agent_service import EncodedHeartbeatAnswer, decode_register
from everstep_controller.store.database import open_database
from everstep_controller.store.threads import DatabaseStore
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.forked_programs import ForkedProgram
from tests.support.services.sqlite import create_with_schema

_HEARTBEAT = msgspec.json.Decoder(Heartbeat)
_REPORTS = msgspec.json.Decoder(Reports)

SECRET = b"a secret of the tests, 32 bytes."


def bearer(role: TokenRole, subject: str, secret: bytes = SECRET) -> dict[str, str]:
    """Return the authorization header with a token of this role."""
    return {"Authorization": f"Bearer {mint(secret, role, subject)}"}


OPERATOR = bearer(TokenRole.OPERATOR, "olga")
VIEWER = bearer(TokenRole.VIEWER, "vera")


def registration(node: str, incarnation: int = 1, **fields: Any) -> Register:
    """Return the first message of a node's agent."""
    values = {"protocols": (1,), "agent_version": "test", "vault": "127.0.0.1:7000", **fields}
    return Register(node=node, incarnation=incarnation, **values)


_SILENCE_LIMITS_S = {"suspect_after_s": 30.0, "suspect_after_max_s": 60.0, "lost_after_s": 120.0}
LONG_SILENCES = "[policy.liveness]\n" + "".join(f"{name} = {value}\n" for name, value in _SILENCE_LIMITS_S.items())
"""Table of the settings file for tests with long silences of nodes.

Nodes whose messages a test sends do not send heartbeats, and on a busy machine an agent is slower than the lab preset
expects.
"""

LONG_SILENCE_POLICY = CorePolicy.lab_preset().with_values(liveness=_SILENCE_LIMITS_S)
"""The lab preset with the same seconds, for a controller in the test's process."""


def joined(job: str, at: float, *, nodes: int = 1, launcher: int = 1, **spec: Any) -> LauncherJoined:
    """Return a launcher's offer of its node."""
    job_spec = JobSpec(job=job, min_nodes=1, max_nodes=nodes, join_wait_s=60.0, **spec)
    return LauncherJoined(job=job, at=at, spec=job_spec, launcher=launcher, store="127.0.0.1:29500")


def make_settings(policy: CorePolicy | None = None, **values: Any) -> ControllerSettings:
    """Return settings of the preset ``lab`` for a controller without a secret, with ``values`` by name."""
    settings = ControllerSettings(secret_file="unused", policy=policy or CorePolicy.lab_preset())
    return with_values(settings, values)


class InProcess:
    """A controller as an ASGI application for ``TestClient``. Its lifespan starts and stops it."""

    def __init__(
        self,
        database: str,
        *,
        policy: CorePolicy | None = None,
        clock: Clock = SYSTEM_CLOCK,
        remediator: Remediator | None = None,
        **settings: Any,
    ) -> None:
        settings = {"commit_timeout_s": 30.0, **settings}  # a busy machine's disk takes more than two
        self.settings = make_settings(policy, name="test", database=database, **settings)
        self.clock = clock
        self.remediator = remediator or DryRunRemediator()
        self.controller: Controller | None = None

    async def start(self) -> Controller:
        create_with_schema(self.settings.storage.database)
        store = DatabaseStore(
            open_database(self.settings.storage.database),
            commit_timeout_s=self.settings.transactions.commit_timeout_s,
        )
        won = ElectedState(await store.take_over())
        self.controller = await Controller.lead(
            self.settings, Keyring((SECRET,)), store, won, self.clock, lambda: self.remediator
        )
        return self.controller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            assert self.controller is not None
            await self.controller.app(scope, receive, send)
            return
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        assert self.controller is not None
        await self.controller.stop()
        await send({"type": "lifespan.shutdown.complete"})


class AgentClient:
    """One agent's messages to a controller in this process. Answers are decoded, and refusals raise ``Refused``.

    Messages pass the checks of a session without an open connection. Directives come with the answers to heartbeats.
    """

    def __init__(self, client: TestClient, node: str, incarnation: int = 1) -> None:
        self.client = client
        self.node = node
        self.incarnation = incarnation
        self.headers = bearer(TokenRole.AGENT, node)
        self.number = 0
        self.seq = 0
        self.after = 0

    def register(self, **fields: Any) -> Registered:
        answer: Registered = self.send(registration(self.node, self.incarnation, **fields))
        self.after = answer.next_directive - 1
        return answer

    def beat(self, **fields: Any) -> HeartbeatAnswer:
        self.seq += 1
        beat = Heartbeat(incarnation=self.incarnation, seq=self.seq, sent_at=0.0, **fields)
        answer: HeartbeatAnswer = self.send(beat)
        return answer

    def report(self, *bodies: AnyReport, first: int | None = None) -> ReportsAnswer:
        start = self.number + 1 if first is None else first
        numbered = tuple(NumberedReport(number=start + i, body=body) for i, body in enumerate(bodies))
        self.number = max(self.number, start + len(bodies) - 1)
        answer: ReportsAnswer = self.send(Reports(incarnation=self.incarnation, reports=numbered))
        return answer

    def directives(self) -> tuple[Directive, ...]:
        """Return the directives in the answer to a heartbeat that acknowledges all earlier ones."""
        found = self.beat(directives_through=self.after).directives
        if found:
            self.after = found[-1].seq
        return found

    def send(self, message: Register | Heartbeat | Reports) -> Any:
        """Return the answer to one message, which may be invalid."""
        return self.send_bytes(type(message), msgspec.json.encode(message))

    def send_bytes(self, kind: type[Any], body: bytes) -> Any:
        """Return the answer to a message's bytes."""
        app: Any = self.client.app
        assert self.client.portal is not None
        try:
            return self.client.portal.call(answer_agent, app.controller, self.node, kind, body, self.headers)
        except EverstepError as error:
            raise Refused(error.status, error.code, str(error)) from error


async def answer_agent(controller: Controller, node: str, kind: type[Any], body: bytes, headers: dict[str, str]) -> Any:
    """Return the controller's answer to one message of an agent without a session. Raises EverstepError."""
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    controller.authenticator.authorize_agent(pairs, node, None)
    service = controller.agent_service
    if kind is Register:
        register = decode_register(body)
        return service.registered(register, await service.register(node, register))
    if kind is Reports:
        return ReportsAnswer(through=await service.take_reports(node, responses.decode(_REPORTS, body)))
    outcome = service.take_heartbeat(node, responses.decode(_HEARTBEAT, body))
    resend = outcome if isinstance(outcome, bool) else await outcome
    service.metrics.heartbeats += 1
    directives = tuple(directive.encode() for directive in service.outbox.pending(node))
    answer = responses.encode(EncodedHeartbeatAnswer(service.wall(), resend, directives))
    return msgspec.json.decode(answer, type=HeartbeatAnswer)


class Refused(Exception):
    """The controller's refusal."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


def _decoded(response: Any, kind: type[Any]) -> Any:
    if response.status_code >= 400:
        error = response.json()
        raise Refused(response.status_code, error["code"], error["detail"])
    return msgspec.json.decode(response.content, type=kind)


def get(client: TestClient, path: str, kind: type[Any], headers: dict[str, str] = VIEWER) -> Any:
    """Return the answer of an operator route."""
    return _decoded(client.get(path, headers=headers), kind)


def post(client: TestClient, path: str, body: Any, kind: type[Any], headers: dict[str, str] = OPERATOR) -> Any:
    """Return the answer of an operator route to an order."""
    return _decoded(client.post(path, content=msgspec.json.encode(body), headers=headers), kind)


class ControllerProcess:
    """A controller as a process, which can be started again at the same address over the same database.

    With ``forks`` it is forked with its imports done; without, it is started by its command line.
    """

    def __init__(
        self,
        directory: Path,
        forks: ForkPool | None = None,
        *,
        database: str | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.directory = directory
        self.forks = forks
        self.secret_file = directory / "secret"
        self.secret_file.write_bytes(SECRET)
        self.secret_file.chmod(0o600)
        self.ready_file = directory / "ready.json"
        self.database = database or f"sqlite:///{directory / 'controller.db'}"
        self.arguments = arguments
        self.listen = "127.0.0.1:0"
        self.process: subprocess.Popen[bytes] | ForkedProgram | None = None
        self.sessions: dict[str, Any] = {}

    def start(self, deadline_s: float = 90.0) -> ControllerProcess:
        self.ready_file.unlink(missing_ok=True)
        arguments = ["serve", "--listen", self.listen, "--preset", "lab"]
        arguments += ["--database", self.database, "--secret-file", str(self.secret_file)]
        arguments += ["--ready-file", str(self.ready_file), "--die-with-parent", *self.arguments]
        log = self.directory / "controller.log"
        if self.forks is None:
            with log.open("ab") as output:
                command = [sys.executable, "-m", "everstep_controller.main", *arguments]
                self.process = subprocess.Popen(command, stdout=output, stderr=output)
        else:
            create_with_schema(self.database)
            self.process = ForkedProgram(self.forks, "everstep_controller.main", arguments, log)
        end = time.perf_counter() + deadline_s
        while not self.ready_file.exists():
            if self.process.poll() is not None or time.perf_counter() > end:
                raise AssertionError(f"the controller did not start:\n{self.log()}")
            time.sleep(0.005)
        self.listen = str(json.loads(self.ready_file.read_text())["address"])
        return self

    @property
    def url(self) -> str:
        return f"http://{self.listen}"

    def log(self) -> str:
        return (self.directory / "controller.log").read_text()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def terminate(self) -> int:
        """Terminate the process, and return the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def end(self) -> None:
        """End the process from any state."""
        for session in self.sessions.values():
            session.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def leads(self) -> bool:
        """Return whether the process runs and leads."""
        if self.process is None or self.process.poll() is not None:
            return False
        with suppress(OSError):
            return self.ask("GET", "/readyz", None, {}, timeout_s=1.0)[0] == 200
        return False

    def connection(self, timeout_s: float = 35.0) -> http.client.HTTPConnection:
        host, _, port = self.listen.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=timeout_s)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] = OPERATOR,
        timeout_s: float = 35.0,
    ) -> tuple[int, bytes]:
        """Send one request on a connection of its own."""
        connection = self.connection(timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@contextmanager
def controller_process(directory: Path, forks: ForkPool | None = None, **options: Any) -> Iterator[ControllerProcess]:
    """Yield a started controller process, and end it afterwards."""
    process = ControllerProcess(directory, forks, **options)
    try:
        yield process.start()
    finally:
        process.end()
