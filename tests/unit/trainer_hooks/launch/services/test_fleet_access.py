"""A launcher's requests to a fleet's controllers, and its last lines."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any

import msgspec
import pytest

from everstep.bearer_tokens import job_token
from everstep.errors import AuthenticationError
from everstep.wire.v1.local import Welcome
from everstep_trainer.launch.run_receipt import report_fleet_run
from everstep_trainer.launch.services import fleet_access
from everstep_trainer.launch.services.fleet_access import FAILURE_PAUSE_S, FleetAccess
from tests.support.fleet.generations import JOB, generation
from tests.support.fleet.receipts import full_receipt, receipt

WELCOME = Welcome(
    protocol=1, node="n1", vault_socket="/v", rank_heartbeat_interval_s=1.0, controllers=("http://c1:7700",)
)
SPEC = generation(1, ranks=[("n1", 0), ("n2", 0)])


class FakeClient:
    """A client whose controller answers with ``answer``."""

    answer: Any = "an answer"
    made: tuple[Any, ...] = ()

    def __init__(self, controllers: Any, token: str, *, tls: ssl.SSLContext | None) -> None:
        FakeClient.made = (controllers, token, tls)

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def receipt(self, _job: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    monkeypatch.setattr(fleet_access, "Client", FakeClient)
    monkeypatch.setattr(FakeClient, "made", ())
    return FakeClient


def access(welcome: Welcome = WELCOME) -> FleetAccess:
    made = FleetAccess(JOB)
    made.update(welcome, SPEC)
    return made


def ask(fleet: FleetAccess) -> Any:
    return asyncio.run(fleet.ask(lambda client: client.receipt(JOB)))


def test_launcher_of_rank_0_asks_with_the_jobs_token(client: type[FakeClient]) -> None:
    assert ask(access()) == "an answer"
    assert client.made == (("http://c1:7700",), job_token(JOB, SPEC.secret), None)


@pytest.mark.parametrize("change", [{"node": "n2"}, {"controllers": ()}])
def test_other_launchers_ask_nothing(client: type[FakeClient], change: dict[str, Any]) -> None:
    assert ask(access(msgspec.structs.replace(WELCOME, **change))) is None
    assert ask(FleetAccess(JOB)) is None
    assert client.made == ()


def test_pauses_grow_with_ranks_and_after_failures(client: type[FakeClient], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetAccess(JOB)
    fleet.update(WELCOME, generation(1, ranks=[("n1", rank) for rank in range(500)]))
    assert fleet.min_pause_s == 5.0
    monkeypatch.setattr(client, "answer", AuthenticationError("the job has ended"))
    assert ask(fleet) is None
    assert fleet.min_pause_s == FAILURE_PAUSE_S
    monkeypatch.setattr(client, "answer", "an answer")
    assert ask(fleet) == "an answer"
    assert fleet.min_pause_s == 5.0


@pytest.mark.parametrize(
    ("answer", "shown", "absent"),
    [
        (full_receipt(), "finished at step 900: 2 recoveries", "everstep job show"),
        (receipt(result="running"), "everstep job receipt", "recoveries, "),
        (AuthenticationError("no"), "everstep job receipt", "recoveries, "),
    ],
)
def test_end_shows_the_receipt_or_its_command(
    client: type[FakeClient],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: Any,
    shown: str,
    absent: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(client, "answer", answer)
    asyncio.run(report_fleet_run(access(), JOB))
    assert shown in caplog.text
    assert absent not in caplog.text
    assert f"everstep job receipt {JOB} --html FILE" in caplog.text
