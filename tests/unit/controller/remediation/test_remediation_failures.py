"""What looks after the outside does not end by itself in silence: the process ends, as it does with its loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from everstep_controller.api.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.effects import RemediationKind
from everstep_controller.core.policy import CorePolicy
from everstep_controller.leadership.member import ControllerReplica
from everstep_controller.remediation.alerts import AlertNotifier
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.remediator import DryRunRemediator
from everstep_controller.remediation.service import CordonObserver
from everstep_controller.store.database_errors import LeadershipLost
from everstep_controller.store.rows import RemediationRow, RemediationState

from everstep.system_clock import SYSTEM_CLOCK
from tests.support.controllers import SECRET
from tests.support.databases import give_schema


class Bug(Exception):
    """Nobody has thought of it."""


async def _broken(*_: object, **__: object) -> None:
    raise Bug


def member(directory: Path) -> ControllerReplica:
    database = f"sqlite:///{directory}/c.db"
    give_schema(database)
    settings = ControllerSettings(
        secret_file="unused",
        policy=CorePolicy.lab_preset(),
        name="c",
        database=database,
        alert_url="http://127.0.0.1:1/",
    )
    return ControllerReplica(settings, Keyring((SECRET,)), SYSTEM_CLOCK, DryRunRemediator, database=database)


async def ended(made: ControllerReplica) -> None:
    async with asyncio.timeout(60):
        await made.run()


@pytest.mark.parametrize(("kind", "method"), [(CordonObserver, "observe"), (AlertNotifier, "check")])
def test_failed_background_task_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type, method: str
) -> None:
    monkeypatch.setattr(kind, method, _broken)
    with pytest.raises(Bug):
        asyncio.run(ended(member(tmp_path)))


def test_failed_remediation_task_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RemediationExecutor, "_carry_out", _broken)
    row = RemediationRow(
        id="r1", node="n1", kind=RemediationKind.CORDON, state=RemediationState.REQUESTED, requested_at=1.0, doc="{}"
    )

    async def story() -> None:
        made = member(tmp_path)
        running = asyncio.create_task(ended(made))
        async with asyncio.timeout(60):
            await made.leader_known.wait()
        controller = made.leading()
        assert controller is not None
        controller.remediation.executor.enqueue([row])
        await running

    with pytest.raises(Bug):
        asyncio.run(story())


def test_superseded_alerting_ends_the_leadership(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def superseded(*_: object) -> None:
        raise LeadershipLost("another controller took the database over")

    monkeypatch.setattr(AlertNotifier, "check", superseded)
    with pytest.raises(LeadershipLost):
        asyncio.run(ended(member(tmp_path)))
