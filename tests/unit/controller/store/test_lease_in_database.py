from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from everstep_controller.leadership.lease import StandbyContacts, StandbyReport
from everstep_controller.leadership.lease_candidate import LeaseCandidate
from everstep_controller.runtime.startup_state import NO_RECORDS
from everstep_controller.server.connections import TakeoverGate
from everstep_controller.store.database import engine_of, open_database, parse_url
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.threads import DatabaseStore
from everstep_controller.store.writer import DatabaseWriter
from sqlalchemy import Engine, create_engine, text

from everstep.system_clock import SYSTEM_CLOCK
from tests.support.waiting import until

Open = Callable[[], LeaseSession]


@pytest.fixture
def engine(postgres: str) -> Iterator[Engine]:
    engine = open_database(postgres)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Open]:
    opened: list[LeaseSession] = []

    def make() -> LeaseSession:
        opened.append(LeaseSession(engine))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def lead(engine: Engine, session: LeaseSession, name: str, lease_s: float = 30.0) -> int:
    """Takes the lease as a controller does; the epoch."""
    seen = session.read()
    assert session.lock_epoch(seen.newest_epoch + 1)
    writer = DatabaseWriter(engine)
    taking = claim(name, f"http://{name}", lease_s, is_lock_free=seen.is_lock_free)
    epoch = writer.take_over(expected=seen.newest_epoch, claim=taking).epoch
    writer.close()
    return epoch


def test_lease_shows_holder_and_remaining_time(engine: Engine, session: Open) -> None:
    first, other = session(), session()
    assert first.read().holder == ""
    epoch = lead(engine, first, "c1")
    seen = other.read()
    assert (seen.epoch, seen.newest_epoch, seen.holder, seen.address, seen.is_lock_free) == (
        epoch,
        epoch,
        "c1",
        "http://c1",
        False,
    )
    assert 20 < seen.expires_in_s <= 30


def test_lease_lock_is_free_once_its_session_ends(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    lead(engine, leader, "c1", lease_s=3600.0)
    assert not standby.read().is_lock_free
    leader.close()
    until(lambda: standby.read().is_lock_free, "the server has noticed")
    assert standby.read().expires_in_s > 0


@pytest.mark.promise("single-leader")
def test_lease_is_taken_by_only_one_candidate(engine: Engine, session: Open) -> None:
    one, other = session(), session()
    seen = one.read()
    lead(engine, one, "c1")
    late = DatabaseWriter(engine)
    with pytest.raises(LeadershipLost, match="another controller was first"):
        late.take_over(expected=seen.newest_epoch, claim=claim("c2", "", 30.0, is_lock_free=True))
    late.close()
    assert other.read().holder == "c1"


def test_lease_renewal_extends_and_fails_after_takeover(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1", lease_s=0.0)
    assert standby.read().expires_in_s <= 0
    leader.renew(epoch, 30.0)
    assert standby.read().expires_in_s > 20
    leader.renew(epoch, 0.0)
    lead(engine, standby, "c2")
    with pytest.raises(LeadershipLost, match=f"epoch {epoch}"):
        leader.renew(epoch, 30.0)


def test_lease_renewed_during_takeover_is_kept(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1", lease_s=0.0)
    seen = standby.read()
    assert seen.expires_in_s <= 0
    assert not seen.is_lock_free
    leader.renew(epoch, 30.0)
    late = DatabaseWriter(engine)
    with pytest.raises(LeadershipLost, match="renewed its lease meanwhile"):
        late.take_over(expected=epoch, claim=claim("c2", "", 30.0, is_lock_free=seen.is_lock_free))
    late.close()
    assert standby.read().newest_epoch == epoch


def test_leader_reads_contact_counts_of_standbys(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    leader.write_contacts("c1", 9)  # as a standby, a moment ago
    lead(engine, leader, "c1")
    assert leader.read_standby_report() == StandbyReport()
    standby.write_contacts("c2", 3)
    standby.write_contacts("c2", 4)
    standby.write_contacts("c3", 1)
    assert leader.read_standby_report() == StandbyReport(contacts={"c2": 4, "c3": 1})


def test_contact_counts_expire_and_are_deleted(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    lead(engine, leader, "c1")
    standby.write_contacts("c2", 4)
    standby.write_contacts("c3", 4)
    with engine.begin() as connection:
        connection.execute(
            text(
                "UPDATE standby_contacts SET reported_at = reported_at - CASE controller WHEN 'c2' THEN 10 ELSE 1e6 END"
            )
        )
    assert leader.read_standby_report() == StandbyReport()
    standby.write_contacts("c4", 1)
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT controller FROM standby_contacts")).scalars()) == {"c2", "c4"}


def test_resigned_lease_is_reserved_for_successor_for_a_while(engine: Engine, session: Open) -> None:
    leader, heir = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.resign(epoch, "c2")
    assert (heir.read().successor, heir.read().is_lock_free) == ("c2", False)
    leader.close()
    until(lambda: heir.read().is_lock_free, "the server has noticed")
    epoch = lead(engine, heir, "c2")
    assert heir.read().successor == ""
    assert heir.read_standby_report() == StandbyReport(resignations=1)
    heir.resign(epoch, "c1")
    assert heir.read_standby_report() == StandbyReport(resignations=2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET resigned_at = resigned_at - 60"))
    assert heir.read().successor == ""
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET resigned_at = resigned_at - 3600"))
    assert heir.read_standby_report() == StandbyReport()
    with pytest.raises(LeadershipLost, match=f"epoch {epoch - 1}"):
        heir.resign(epoch - 1, "c1")


def test_lease_reader_does_not_block_the_lock(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.close()
    until(lambda: standby.read().is_lock_free, "the server has noticed")
    again = session()
    assert again.lock_epoch(epoch)
    assert not standby.read().is_lock_free


def test_failed_takeover_releases_its_lock_at_next_look(session: Open) -> None:
    one, other = session(), session()
    epoch = one.read().newest_epoch + 1
    assert one.lock_epoch(epoch)
    assert one.lock_epoch(epoch)
    assert not other.lock_epoch(epoch)
    one.read()
    assert other.lock_epoch(epoch)


def test_silent_takeover_is_ended_but_active_one_is_kept(postgres: str, engine: Engine, session: Open) -> None:
    taking = engine_of(parse_url(postgres), name="c1")
    taker, standby = LeaseSession(taking), session()
    epoch = taker.read().newest_epoch + 1
    assert taker.lock_epoch(epoch)
    with taking.connect() as writes:
        writes.execute(text("SELECT * FROM meta FOR UPDATE"))
        standby.end_silent_holder(epoch, 3600.0)
        taker.touch()
        assert not standby.lock_epoch(epoch)
        until(lambda: standby.end_silent_holder(epoch, 0.01) or standby.lock_epoch(epoch), "the lock to be free")
        lead(engine, standby, "c2")  # what the silent one had locked beside holds nobody up
        writes.invalidate()
    with pytest.raises(DatabaseUnavailable):
        taker.touch()
    taking.dispose()


def test_read_only_database_is_detected(postgres: str) -> None:
    open_database(postgres).dispose()
    engine = create_engine(parse_url(postgres), connect_args={"options": "-c default_transaction_read_only=on"})
    session = LeaseSession(engine)
    assert session.read().holder == ""
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        session.try_writing()
    session.close()
    engine.dispose()


def test_broken_lease_session_reconnects_without_locks(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.abort()
    with pytest.raises(DatabaseUnavailable):
        leader.renew(epoch, 30.0)
    assert standby.read().is_lock_free
    assert leader.lock_epoch(epoch)
    assert not standby.read().is_lock_free


def test_idle_transaction_timeout_is_set_on_connect(postgres: str) -> None:
    engine = engine_of(parse_url(postgres), most_idle_s=5.0)
    with engine.connect() as connection:
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar() == "5s"
    engine.dispose()


def test_paused_transaction_blocks_no_other_controller(postgres: str) -> None:
    open_database(postgres).dispose()
    stopped = engine_of(parse_url(postgres), most_idle_s=0.2)
    with stopped.connect() as connection:
        connection.execute(text("SELECT * FROM meta FOR UPDATE"))  # and then nothing more, for ever
        engine = engine_of(parse_url(postgres))
        writer = DatabaseWriter(engine)
        assert writer.take_over().epoch == 1
        writer.close()
        engine.dispose()
        connection.invalidate()
    stopped.dispose()


@pytest.mark.parametrize("name", ["c1", "c1" * 50])
def test_sessions_of_expired_leader_are_ended_by_name(postgres: str, session: Open, name: str) -> None:
    stopped, other = (engine_of(parse_url(postgres), name=of) for of in (name, "c2"))
    with stopped.connect() as held, other.connect() as kept:
        held.execute(text("SELECT * FROM meta FOR UPDATE"))
        session().end_sessions_of(name)
        assert kept.execute(text("SELECT key FROM meta WHERE key = 'epoch' FOR UPDATE")).scalar() == "epoch"
        held.invalidate()
    stopped.dispose()
    other.dispose()


def test_closing_candidate_releases_its_lock(postgres: str, engine: Engine, session: Open) -> None:
    standby = session()

    async def story() -> None:
        candidate = LeaseCandidate(
            engine_of(parse_url(postgres)),
            SYSTEM_CLOCK,
            name="c1",
            address="http://c1",
            lease_s=5.0,
            renew_s=1.0,
            takeover_gate=TakeoverGate(),
            contacts=StandbyContacts(SYSTEM_CLOCK, 1.0),
        )
        store = DatabaseStore(engine_of(parse_url(postgres)))
        won = await candidate.wait_for_lease(store, lambda: NO_RECORDS)
        seen = standby.read()
        assert (seen.holder, seen.epoch, seen.is_lock_free) == ("c1", won.loaded.epoch, False)
        won.tenure.check()
        store.close()
        await candidate.close()

    asyncio.run(story())
    until(lambda: standby.read().is_lock_free, "the server has noticed")
