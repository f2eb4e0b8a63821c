"""A real controller is killed during remediations; its successor has each of them done once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from everstep.vocabulary import Action
from everstep.wire.v1.agent import NumberedReport, Register, Reports
from everstep.wire.v1.operator_history import RemediationList
from everstep.wire.v1.training import FindingRaised
from tests.support.fleet.controllers import VIEWER, ControllerProcess, controller_process, registration
from tests.support.fleet.findings import xid
from tests.support.fleet.session_client import send_message
from tests.support.processes.fork_pool import ForkPool
from tests.support.services import kube
from tests.support.services.webhook_receiver import WebhookReceiver

pytestmark = pytest.mark.slow

SECRET = b"the webhook's own secret"
DEADLINE_S = 90.0
T = TypeVar("T")


class Halt:
    """Takes the first request for ``what``, does it where it ``does``, and does not answer until it is ``released``.
    ``asked``: what was asked for, in order."""

    def __init__(self, what: str, *, does: bool) -> None:
        self.asked: list[str] = []
        self.reached, self.released = threading.Event(), threading.Event()
        self.what, self._does = what, does

    def answer(self, what: str, act: Callable[[], T], nothing: T) -> T:
        self.asked += [what] if what else []
        if what != self.what or self.reached.is_set():
            return act()
        answer = act() if self._does else nothing
        self.reached.set()
        self.released.wait(DEADLINE_S)
        return answer


class AtAReceiver(WebhookReceiver):
    def __init__(self, halt: Halt, directory: Path) -> None:
        super().__init__(SECRET)
        self._halt = halt
        secret = directory / "hook.secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self.settings = (
            f'remediation_backend = "webhook"\nwebhook_url = "{self.url}"\nwebhook_secret_file = "{secret}"\n'
        )

    def _answer(self, method: str, path: str, body: bytes) -> object:
        kind = json.loads(body)["kind"] if method == "POST" else ""
        nothing: object = {}
        return self._halt.answer(kind, lambda: super(AtAReceiver, self)._answer(method, path, body), nothing)

    def did(self) -> list[str]:
        return [order["kind"] for order in self.done.values()]


class InKubernetes(kube.Cluster):
    """With a reboot controller that is quick. What changes a node is told apart by the note that it leaves there."""

    def __init__(self, halt: Halt, directory: Path) -> None:
        super().__init__("n1", "n2", "n3", "n4")
        self._halt = halt
        config = directory / "kubeconfig"
        config.write_text(
            f"{{apiVersion: v1, kind: Config, current-context: c, users: [{{name: u, user: {{}}}}], "
            f"clusters: [{{name: c, cluster: {{server: '{self.url}'}}}}], "
            "contexts: [{name: c, context: {cluster: c, user: u}}]}\n"
        )
        self.settings = f'remediation_backend = "kubernetes"\nkubeconfig = "{config}"\n'

    def _answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        return self._halt.answer(_step(method, body), lambda: self._done(method, url, body), (503, {}))

    def _done(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        answer = super()._answer(method, url, body)
        if _step(method, body) == "reboot":
            self.boot("n1", "boot-2")
        return answer

    def did(self) -> list[str]:
        assert sorted(event["reason"] for event in self.events.values()) == ["EverstepCordon", "EverstepReboot"]
        return [_step(method, body) for method, _, body in self.calls if method == "PATCH"]


def _step(method: str, body: Any) -> str:
    """Return the kind of a node's change or the reason of an event that a request asks for."""
    if method == "PATCH":
        return str(next(iter(body["metadata"]["annotations"]))).removeprefix("everstep.dev/")
    return str(body["reason"]) if method == "POST" else ""


@contextmanager
def halting(
    world: type[AtAReceiver | InKubernetes], halt: Halt, directory: Path
) -> Iterator[AtAReceiver | InKubernetes]:
    made = world(halt, directory)
    try:
        yield made
    finally:
        halt.released.set()
        made.close()


@contextmanager
def controller_with(program_forks: ForkPool, remediation: str, directory: Path) -> Iterator[ControllerProcess]:
    settings = directory / "settings.toml"
    # the lab gives a remediation up after 30 s and requests it in the first 9 s; the controller starts twice
    policy = 'mode = "enforce"\nsettle_s = 1000.0\ntimeout_s = 1000.0\n'
    settings.write_text(f"{remediation}[policy.remediation]\n{policy}")
    with controller_process(directory, program_forks, arguments=("--settings", str(settings))) as process:
        yield process


def fall_off_the_bus(process: ControllerProcess, node: str = "n1") -> None:
    """Let an idle node report a finding: it is cordoned, and rebooted a moment later."""
    for name in ("n1", "n2", "n3", "n4"):
        _tell(process, name, registration(name))
    report = FindingRaised(finding=xid(action=Action.REBOOT_NODE))
    _tell(process, node, Reports(incarnation=1, reports=(NumberedReport(number=1, body=report),)))


def _tell(process: ControllerProcess, node: str, message: Register | Reports) -> None:
    status, answer = send_message(process, node, message)
    assert status == 200, answer


def remediation_states(process: ControllerProcess) -> dict[str, str]:
    """States by kind."""
    status, body = process.ask("GET", "/v1/remediations?node=n1", None, VIEWER)
    assert status == 200, body
    return {
        remediation.kind: remediation.state
        for remediation in msgspec.json.decode(body, type=RemediationList).remediations
    }


DONE_OR_LOST = pytest.mark.parametrize("does", [True, False], ids=["it is done", "it is lost"])
BEFORE = {
    "cordon": {"cordon": "started", "reboot": "requested"},
    "EverstepCordon": {"cordon": "started", "reboot": "requested"},
    "reboot": {"cordon": "confirmed", "reboot": "started"},
    "EverstepReboot": {"cordon": "confirmed", "reboot": "started"},
}
"""The states of the remediations while a request is under way; wanted: not begun either."""


@pytest.mark.promise("remediation-once")
@DONE_OR_LOST
@pytest.mark.parametrize("kind", ["cordon", "reboot"])
def test_remediation_runs_once_across_controller_crash(
    program_forks: ForkPool, kind: str, does: bool, tmp_path: Path
) -> None:
    asked = _killed_during(program_forks, AtAReceiver, Halt(kind, does=does), tmp_path)
    again = [] if does else [kind]  # what was done shows when it is read back, and is not asked for any more
    assert sorted(asked) == sorted(["cordon", "reboot", *again])


def _await(process: ControllerProcess, states: dict[str, str]) -> None:
    end = time.perf_counter() + DEADLINE_S
    while remediation_states(process) != states:
        assert time.perf_counter() < end, remediation_states(process)
        time.sleep(0.02)


def _killed_during(
    program_forks: ForkPool, world: type[AtAReceiver | InKubernetes], halt: Halt, directory: Path
) -> list[str]:
    """Kills the controller while the halted request is under way, and waits for the next to end. What was asked for."""
    with (
        halting(world, halt, directory) as outside,
        controller_with(program_forks, outside.settings, directory) as process,
    ):
        fall_off_the_bus(process)
        assert halt.reached.wait(DEADLINE_S)
        _await(process, BEFORE[halt.what])
        process.kill()
        halt.released.set()
        process.start()
        _await(process, {"cordon": "confirmed", "reboot": "confirmed"})
        assert outside.did() == ["cordon", "reboot"]
        return halt.asked
