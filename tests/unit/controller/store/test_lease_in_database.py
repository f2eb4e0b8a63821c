from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, text

from everstep_controller.store.database import engine_of, open_database, parse_url
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.rows import StandbyReport
from everstep_controller.store.writer import DatabaseWriter
from tests.support.processes.waiting import until

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
    for lease_session in opened:
        lease_session.close()


def lead(engine: Engine, session: LeaseSession, name: str, lease_s: float = 30.0) -> int:
    """Take the lease as a controller does; return the epoch."""
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
    first, other = session(), session()
    seen = first.read()
    lead(engine, first, "c1")
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
    leader.write_contacts("c1", 9)  # written a moment ago, while it was a standby
    lead(engine, leader, "c1")
    assert leader.read_standby_report() == StandbyReport()
    standby.write_contacts("c2", 3)
    standby.write_contacts("c2", 4)
    standby.write_contacts("c3", 1)
    assert leader.read_standby_report() == StandbyReport(contacts={"c2": 4, "c3": 1})


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


def test_failed_takeover_releases_its_lock_at_next_look(session: Open) -> None:
    first, other = session(), session()
    epoch = first.read().newest_epoch + 1
    assert first.lock_epoch(epoch)
    assert first.lock_epoch(epoch)
    assert not other.lock_epoch(epoch)
    first.read()
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

        def lock_is_taken() -> bool:
            standby.end_silent_holder(epoch, 0.01)
            return standby.lock_epoch(epoch)

        until(lock_is_taken, "the lock to be free")
        lead(engine, standby, "c2")  # the ended session holds no other lock that would block a successor
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
    until(lambda: standby.read().is_lock_free, "the server has ended the broken session")
    assert leader.lock_epoch(epoch)
    assert not standby.read().is_lock_free


def test_paused_transaction_blocks_no_other_controller(postgres: str) -> None:
    open_database(postgres).dispose()
    stopped = engine_of(parse_url(postgres), most_idle_s=0.2)
    with stopped.connect() as connection:
        connection.execute(text("SELECT * FROM meta FOR UPDATE"))  # and then the transaction stays idle
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
