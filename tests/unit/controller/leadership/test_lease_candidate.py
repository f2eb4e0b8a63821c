"""The lease is vacant: a controller that resigned before takes it last."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Engine

from everstep.clock import ManualClock
from everstep_controller.leadership.lease import StandbyContacts
from everstep_controller.leadership.lease_candidate import ElectedState, LeaseCandidate
from everstep_controller.leadership.takeover_gate import TakeoverGate
from everstep_controller.runtime.startup_state import NO_RECORDS
from everstep_controller.store.database import engine_of, open_database, parse_url
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.threads import DatabaseStore
from everstep_controller.store.writer import DatabaseWriter

DEADLINE_S = 60.0


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


def candidate(engine: Engine, clock: ManualClock, contacts: StandbyContacts) -> LeaseCandidate:
    """One that gave its lease up before."""
    return LeaseCandidate(
        engine,
        clock,
        name="c2",
        address="",
        lease_s=5.0,
        renew_s=1.0,
        takeover_gate=TakeoverGate(),
        contacts=contacts,
        resigned_before=True,
    )


async def elected(
    engine: Engine, clock: ManualClock, contacts: StandbyContacts, wait_s: float
) -> tuple[bool, ElectedState]:
    """Return whether the candidate won at its first look, and the state with which it was elected."""
    store, waiting = DatabaseStore(engine), candidate(engine, clock, contacts)
    try:
        async with asyncio.timeout(DEADLINE_S):
            winning = asyncio.create_task(waiting.wait_for_lease(store, lambda: NO_RECORDS))
            looked = asyncio.create_task(waiting.first_look_done.wait())
            done, _ = await asyncio.wait({winning, looked}, return_when=asyncio.FIRST_COMPLETED)
            looked.cancel()
            clock.advance(wait_s)
            return winning in done, await winning
    finally:
        await asyncio.to_thread(store.close)
        await waiting.close()


def test_resigned_controller_takes_vacant_lease_last(vacant: Engine) -> None:
    clock = ManualClock()
    at_once, won = asyncio.run(elected(vacant, clock, StandbyContacts(clock, 5.0), 5.0))
    assert not at_once
    assert won.loaded.epoch == 2


def test_resigned_controller_leads_when_nodes_insist(vacant: Engine) -> None:
    clock = ManualClock()
    contacts = StandbyContacts(clock, 5.0)
    contacts.record("n1")
    clock.advance(6.0)
    contacts.record("n1")
    at_once, _won = asyncio.run(elected(vacant, clock, contacts, 0.0))
    assert at_once
