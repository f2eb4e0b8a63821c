"""Controllers for tests: one inside the test's own process, one as a process of its own; and what an agent says."""

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
from everstep_controller.api.credentials import Keyring
from everstep_controller.app import Controller
from everstep_controller.config import ControllerSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.leadership.lease_candidate import ElectedState
from everstep_controller.remediation.remediator import DryRunRemediator, Remediator
from everstep_controller.server import responses
from everstep_controller.server.agent_service import EncodedHeartbeatAnswer, decode_register
from everstep_controller.store.database import open_database
from everstep_controller.store.threads import DatabaseStore
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from everstep.bearer_tokens import TokenRole, mint
from everstep.clock import Clock
from everstep.errors import EverstepError
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
from tests.support.databases import give_schema
from tests.support.forked import ForkPool
from tests.support.programs import Forked

_HEARTBEAT = msgspec.json.Decoder(Heartbeat)
_REPORTS = msgspec.json.Decoder(Reports)

SECRET = b"a secret of the tests, 32 bytes."


def bearer(role: TokenRole, subject: str, secret: bytes = SECRET) -> dict[str, str]:
    """The header that a holder of this token sends."""
    return {"Authorization": f"Bearer {mint(secret, role, subject)}"}


OPERATOR = bearer(TokenRole.OPERATOR, "olga")
VIEWER = bearer(TokenRole.VIEWER, "vera")


def registration(node: str, incarnation: int = 1, **fields: Any) -> Register:
    """What the node's agent says first."""
    said = {"protocols": (1,), "agent_version": "test", "vault": "127.0.0.1:7000", **fields}
    return Register(node=node, incarnation=incarnation, **said)


PATIENT = "suspect_after_s = 30.0\nsuspect_after_max_s = 60.0\nlost_after_s = 120.0\n"
"""Lines of [policy] for tests whose nodes may be silent for long: they do not beat while a test speaks for them, and on
a loaded machine an agent is not as quick as the lab has it."""


def joined(job: str, at: float, *, nodes: int = 1, launcher: int = 1, **spec: Any) -> LauncherJoined:
    """A launcher's offer of its node."""
    wanted = JobSpec(job=job, min_nodes=1, max_nodes=nodes, join_wait_s=60.0, **spec)
    return LauncherJoined(job=job, at=at, spec=wanted, launcher=launcher, store="127.0.0.1:29500")


class InProcess:
    """A controller as an ASGI application whose lifespan starts and stops it; give it to ``TestClient``."""

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
        self.settings = ControllerSettings(
            secret_file="unused", policy=policy or CorePolicy.lab_preset(), name="test", database=database, **settings
        )
        self.clock = clock
        self.remediator = remediator or DryRunRemediator()
        self.controller: Controller | None = None

    async def start(self) -> Controller:
        give_schema(self.settings.database)
        store = DatabaseStore(open_database(self.settings.database), commit_timeout_s=self.settings.commit_timeout_s)
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


class Speaker:
    """One agent's messages to a controller in this process; answers decoded, refusals raised as ``Refused``.

    Messages go through the checks of a session, but no connection is open: directives come with the beats' answers.
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
        said = registration(self.node, self.incarnation, **fields)
        answer: Registered = self.tell(said)
        self.after = answer.next_directive - 1
        return answer

    def beat(self, **fields: Any) -> HeartbeatAnswer:
        self.seq += 1
        beat = Heartbeat(incarnation=self.incarnation, seq=self.seq, sent_at=0.0, **fields)
        answer: HeartbeatAnswer = self.tell(beat)
        return answer

    def report(self, *bodies: AnyReport, first: int | None = None) -> ReportsAnswer:
        start = self.number + 1 if first is None else first
        numbered = tuple(NumberedReport(number=start + i, body=body) for i, body in enumerate(bodies))
        self.number = max(self.number, start + len(bodies) - 1)
        answer: ReportsAnswer = self.tell(Reports(incarnation=self.incarnation, reports=numbered))
        return answer

    def directives(self) -> tuple[Directive, ...]:
        """What a beat brings that acknowledges everything brought before."""
        found = self.beat(directives_through=self.after).directives
        if found:
            self.after = found[-1].seq
        return found

    def tell(self, message: Register | Heartbeat | Reports) -> Any:
        """The answer to one message, which may be one that no agent would send."""
        return self.tell_raw(type(message), msgspec.json.encode(message))

    def tell_raw(self, kind: type[Any], body: bytes) -> Any:
        """The answer to a message's bytes."""
        app: Any = self.client.app
        assert self.client.portal is not None
        try:
            return self.client.portal.call(answer_agent, app.controller, self.node, kind, body, self.headers)
        except EverstepError as error:
            raise Refused(error.status, error.code, str(error)) from error


async def answer_agent(controller: Controller, node: str, kind: type[Any], body: bytes, headers: dict[str, str]) -> Any:
    """What the controller answers to one message of an agent that has no session. Raises EverstepError."""
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    controller.authenticator.authorize_agent(pairs, node, None)
    desk = controller.agent_service
    if kind is Register:
        register = decode_register(body)
        return desk.registered(register, await desk.register(node, register))
    if kind is Reports:
        return ReportsAnswer(through=await desk.take_reports(node, responses.decode(_REPORTS, body)))
    outcome = desk.take_heartbeat(node, responses.decode(_HEARTBEAT, body))
    resend = outcome if isinstance(outcome, bool) else await outcome
    desk.metrics.heartbeats += 1
    directives = tuple(one.encode() for one in desk.outbox.pending(node))
    answer = responses.encode(EncodedHeartbeatAnswer(desk.wall(), resend, directives))
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
    """An operator route's answer."""
    return _decoded(client.get(path, headers=headers), kind)


def post(client: TestClient, path: str, body: Any, kind: type[Any], headers: dict[str, str] = OPERATOR) -> Any:
    """An operator route's answer to an order."""
    return _decoded(client.post(path, content=msgspec.json.encode(body), headers=headers), kind)


class ControllerProcess:
    """A controller as a process: start, kill, start again at the same address over the same database. With ``forks``
    its imports are done already; without, it is started by its command line."""

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
        self.process: subprocess.Popen[bytes] | Forked | None = None
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
            give_schema(self.database)
            self.process = Forked(self.forks, "everstep_controller.main", arguments, log)
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
        """SIGKILL, and wait."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def terminate(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def end(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        for session in self.sessions.values():
            session.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def leads(self) -> bool:
        """Whether it runs, and is the one that answers."""
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
        """One request on a connection of its own."""
        connection = self.connection(timeout_s)
        try:
            connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@contextmanager
def controller_process(directory: Path, forks: ForkPool | None = None, **options: Any) -> Iterator[ControllerProcess]:
    """A started controller process, gone at the end."""
    process = ControllerProcess(directory, forks, **options)
    try:
        yield process.start()
    finally:
        process.end()
