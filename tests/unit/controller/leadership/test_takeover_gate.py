"""Agents at a controller that does not lead: refused at once, or kept waiting during a takeover."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole
from tests.support.fleet.controllers import InProcess, bearer
from tests.support.fleet.session_client import Connection, ServedController, served, upgrade


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[ServedController]:
    with served(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as controller:
        controller.leads = False
        yield controller


def knock(controller: ServedController) -> Connection:
    line = Connection(controller.address)
    line.send(upgrade("n1", bearer(TokenRole.AGENT, "n1")))
    return line


def refusal(line: Connection) -> tuple[int, str]:
    status, head = line.head()
    length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length"))
    problem = msgspec.json.decode(line.take(length))
    assert line.ended()
    line.close()
    return status, problem["detail"]


def waiting(controller: ServedController) -> int:
    return len(controller.takeover_gate._waiting)


def test_standby_refuses_sessions_with_reason(standby: ServedController) -> None:
    assert refusal(knock(standby)) == (503, "this controller is standby")


@pytest.mark.promise("failover-rejoin")
def test_session_during_takeover_is_accepted_by_new_leader(
    standby: ServedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "everstep_controller.server.session.WAIT_S", 60.0
    )  # the first is to be there still when the last comes
    standby.on_loop(standby.takeover_gate.close)
    with ExitStack() as open_lines:
        lines = [knock(standby) for _ in range(40)]
        for line in lines:
            open_lines.callback(line.close)
        standby.until(lambda: waiting(standby) == len(lines))
        standby.leads = True
        standby.on_loop(standby.takeover_gate.open)
        assert [line.head()[0] for line in lines] == [101] * len(lines)


def test_session_during_takeover_is_refused_by_loser(standby: ServedController) -> None:
    standby.on_loop(standby.takeover_gate.close)
    line = knock(standby)
    standby.until(lambda: waiting(standby) == 1)
    standby.on_loop(standby.takeover_gate.open)
    assert refusal(line)[0] == 503


def test_session_during_takeover_waits_a_limited_time(
    standby: ServedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_controller.server.session.WAIT_S", 0.05)
    standby.on_loop(standby.takeover_gate.close)
    assert refusal(knock(standby))[0] == 503
    assert waiting(standby) == 0
