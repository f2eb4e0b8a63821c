"""What looks after the outside does not end by itself in silence: the process ends, as it does with its loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controller.config import ControllerSettings
from controller.core.effects import RemedyKind
from controller.core.policy import CorePolicy
from controller.member import Member
from controller.remediation.alerting import Alerting
from controller.remediation.desk import RemedyDesk
from controller.remediation.dry_run import DryRun
from controller.remediation.observer import Observer
from controller.secret_file import Keyring
from controller.store.records import RemedyRow, RemedyState
from controller.store.trouble import Superseded
from everstep.system_clock import SYSTEM_CLOCK
from tests.support.controllers import SECRET
from tests.support.databases import give_schema


class Bug(Exception):
    """Nobody has thought of it."""


async def _broken(*_: object, **__: object) -> None:
    raise Bug


def member(directory: Path) -> Member:
    database = f"sqlite:///{directory}/c.db"
    give_schema(database)
    settings = ControllerSettings(
        secret_file="unused", policy=CorePolicy.lab(), name="c", database=database, alert_url="http://127.0.0.1:1/"
    )
    return Member(settings, Keyring((SECRET,)), SYSTEM_CLOCK, DryRun, database=database)


async def ended(made: Member) -> None:
    async with asyncio.timeout(60):
        await made.run()


@pytest.mark.parametrize("kind", [Observer, Alerting])
def test_a_watch_that_ends_by_itself_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    monkeypatch.setattr(kind, "look", _broken)
    with pytest.raises(Bug):
        asyncio.run(ended(member(tmp_path)))


def test_a_node_whose_remedies_nobody_carries_out_any_more_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemedyDesk, "_carry_out", _broken)
    row = RemedyRow(id="r1", node="n1", kind=RemedyKind.CORDON, state=RemedyState.WANTED, requested_at=1.0, doc="{}")

    async def story() -> None:
        made = member(tmp_path)
        running = asyncio.create_task(ended(made))
        async with asyncio.timeout(60):
            await made.settled.wait()
        controller = made.leading()
        assert controller is not None
        controller.outside.desk.requested([row])
        await running

    with pytest.raises(Bug):
        asyncio.run(story())


def test_alerts_that_another_controller_has_taken_over_end_the_leadership(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def superseded(*_: object) -> None:
        raise Superseded("another controller took the database over")

    monkeypatch.setattr(Alerting, "look", superseded)
    with pytest.raises(Superseded):
        asyncio.run(ended(member(tmp_path)))
