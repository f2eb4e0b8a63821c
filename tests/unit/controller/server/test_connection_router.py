"""Who counts at the door of a controller that stands by, and who goes last when the lease is vacant."""

from __future__ import annotations

import asyncio

import pytest
from everstep_controller.api.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.policy import CorePolicy
from everstep_controller.leadership.lease import StandbyContacts
from everstep_controller.leadership.lease_candidate import ElectedState, LeaseCandidate
from everstep_controller.leadership.member import StandbyApp
from everstep_controller.runtime.startup_state import NO_RECORDS
from everstep_controller.server.connections import UNKNOWN_PEER, TakeoverGate
from everstep_controller.store.database import engine_of, open_database, parse_url
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.threads import DatabaseStore
from everstep_controller.store.writer import DatabaseWriter
from sqlalchemy import Engine

from everstep.bearer_tokens import TokenRole, mint
from everstep.clock import ManualClock
from tests.support.controllers import SECRET

DEADLINE_S = 60.0


def authorization(role: TokenRole, subject: str, secret: bytes = SECRET) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {mint(secret, role, subject)}".encode())]


def test_standby_counts_only_agents_with_valid_credential() -> None:
    clock = ManualClock()
    settings = ControllerSettings(secret_file="unused", policy=CorePolicy.lab_preset(), resign_after_s=15.0)
    standby = StandbyApp(settings, Keyring((SECRET,)), clock, lambda: "")
    for _ in range(7):
        standby.record_contact("n1", authorization(TokenRole.AGENT, "n1"), UNKNOWN_PEER)
        standby.record_contact("n2", authorization(TokenRole.AGENT, "n1"), UNKNOWN_PEER)
        standby.record_contact(
            "n3", authorization(TokenRole.AGENT, "n3", b"another fleet's secret, 32 bytes"), UNKNOWN_PEER
        )
        standby.record_contact("n4", authorization(TokenRole.VIEWER, "n4"), UNKNOWN_PEER)
        standby.record_contact("n5", [], UNKNOWN_PEER)
        clock.advance(1.0)
    assert standby.contacts.count_persistent() == 1
    standby.start()
    assert standby.contacts.count_persistent() == 0


@pytest.fixture
def vacant(postgres: str) -> Engine:
    """A database whose leader has gone."""
    engine = open_database(postgres)
    session, writer = LeaseSession(engine), DatabaseWriter(engine)
    assert session.lock_epoch(1)
    writer.take_over(claim=claim("c1", "", 30.0, is_lock_free=True))
    writer.close()
    session.close()
    engine.dispose()
    return engine_of(parse_url(postgres))


def candidate(engine: Engine, clock: ManualClock, knocks: StandbyContacts) -> LeaseCandidate:
    """One that gave its lease up before."""
    return LeaseCandidate(
        engine,
        clock,
        name="c2",
        address="",
        lease_s=5.0,
        renew_s=1.0,
        takeover_gate=TakeoverGate(),
        contacts=knocks,
        resigned_before=True,
    )


async def elected(
    engine: Engine, clock: ManualClock, knocks: StandbyContacts, wait_s: float
) -> tuple[bool, ElectedState]:
    """Whether it took the lease at its first look, and what it started from when so much time had passed."""
    store, one = DatabaseStore(engine), candidate(engine, clock, knocks)
    try:
        async with asyncio.timeout(DEADLINE_S):
            winning = asyncio.create_task(one.wait_for_lease(store, lambda: NO_RECORDS))
            looked = asyncio.create_task(one.first_look_done.wait())
            done, _ = await asyncio.wait({winning, looked}, return_when=asyncio.FIRST_COMPLETED)
            looked.cancel()
            clock.advance(wait_s)
            return winning in done, await winning
    finally:
        await asyncio.to_thread(store.close)
        await one.close()


def test_resigned_controller_takes_vacant_lease_last(vacant: Engine) -> None:
    clock = ManualClock()
    at_once, won = asyncio.run(elected(vacant, clock, StandbyContacts(clock, 5.0), 5.0))
    assert not at_once
    assert won.loaded.epoch == 2


def test_resigned_controller_leads_when_nodes_insist(vacant: Engine) -> None:
    clock = ManualClock()
    knocks = StandbyContacts(clock, 5.0)
    knocks.record("n1")
    clock.advance(6.0)
    knocks.record("n1")
    at_once, _won = asyncio.run(elected(vacant, clock, knocks, 0.0))
    assert at_once
