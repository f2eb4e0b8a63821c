"""A real controller is killed while remedies are on their way; the one that follows has each of them done once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from everstep.tokens import TokenRole
from everstep.vocabulary import Action
from everstep.wire.v1.agent import Numbered, Reports
from everstep.wire.v1.history import RemedyList
from everstep.wire.v1.training import FindingRaised
from tests.support.controllers import VIEWER, ControllerProcess, bearer, controller_process, registration
from tests.support.core_fleet import xid
from tests.support.forked import ForkPool
from tests.support.hook import Receiver

SECRET = b"the webhook's own secret"
DEADLINE_S = 30.0


class Halting(Receiver):
    """Takes the first post of ``kind``, does it where it ``does``, and does not answer until it is ``released``."""

    def __init__(self, kind: str, *, does: bool) -> None:
        super().__init__(SECRET)
        self.asked: list[str] = []
        self.reached, self.released = threading.Event(), threading.Event()
        self._kind, self._does = kind, does

    def _answer(self, method: str, path: str, body: bytes) -> object:
        kind = json.loads(body)["kind"] if method == "POST" else ""
        self.asked += [kind] if kind else []
        if kind != self._kind or self.reached.is_set():
            return super()._answer(method, path, body)
        answer = super()._answer(method, path, body) if self._does else {}
        self.reached.set()
        self.released.wait(DEADLINE_S)
        return answer


@contextmanager
def halting(kind: str, *, does: bool) -> Iterator[Halting]:
    receiver = Halting(kind, does=does)
    try:
        yield receiver
    finally:
        receiver.released.set()
        receiver.close()


@contextmanager
def controller_with(program_forks: ForkPool, receiver: Receiver, directory: Path) -> Iterator[ControllerProcess]:
    secret, settings = directory / "hook.secret", directory / "settings.toml"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    settings.write_text(
        f'remediation = "webhook"\nwebhook_url = "{receiver.url}"\nwebhook_secret_file = "{secret}"\n'
        '[policy]\nremediate = "enforce"\nremedy_settle_s = 1000.0\n'
    )
    with controller_process(directory, program_forks, arguments=("--settings", str(settings))) as process:
        yield process


def fall_off_the_bus(process: ControllerProcess, node: str = "n1") -> None:
    """An idle node of a small fleet reports what takes it out, cordoned and rebooted in one decision."""
    for name in ("n1", "n2", "n3", "n4"):
        _post(process, name, "register", registration(name))
    report = FindingRaised(finding=xid(action=Action.REBOOT_NODE))
    _post(process, node, "reports", Reports(incarnation=1, reports=(Numbered(number=1, body=report),)))


def _post(process: ControllerProcess, node: str, verb: str, body: object) -> None:
    status, answer = process.ask("POST", f"/v1/agents/{node}/{verb}", body, bearer(TokenRole.AGENT, node))
    assert status == 200, answer


def remedies(process: ControllerProcess) -> dict[str, str]:
    """States by kind."""
    status, body = process.ask("GET", "/v1/remedies?node=n1", None, VIEWER)
    assert status == 200, body
    return {one.kind: one.state for one in msgspec.json.decode(body, type=RemedyList).remedies}


@pytest.mark.parametrize("does", [True, False], ids=["it is done", "it is lost"])
@pytest.mark.parametrize("kind", ["cordon", "reboot"])
def test_a_controller_killed_between_begun_and_confirmed_has_every_remedy_done_once(
    program_forks: ForkPool, kind: str, does: bool, tmp_path: Path
) -> None:
    with halting(kind, does=does) as receiver, controller_with(program_forks, receiver, tmp_path) as process:
        fall_off_the_bus(process)
        assert receiver.reached.wait(DEADLINE_S)
        others = {"cordon": {"reboot": "wanted"}, "reboot": {"cordon": "confirmed"}}  # wanted: not begun either
        assert remedies(process) == {kind: "begun"} | others[kind]
        process.kill()
        receiver.released.set()
        process.start()
        end = time.perf_counter() + DEADLINE_S
        while remedies(process) != {"cordon": "confirmed", "reboot": "confirmed"}:
            assert time.perf_counter() < end, remedies(process)
            time.sleep(0.02)
        assert [one["kind"] for one in receiver.done.values()] == ["cordon", "reboot"]
        again = [] if does else [kind]  # what was done shows when it is read back, and is not asked for any more
        assert sorted(receiver.asked) == sorted(["cordon", "reboot", *again])
