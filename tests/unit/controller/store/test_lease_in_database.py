from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from everstep_controller.leadership.candidate import Candidate
from everstep_controller.leadership.lease import Knocks, Told
from everstep_controller.leadership.takeover_gate import Threshold
from everstep_controller.runtime.startup_state import NOTHING
from everstep_controller.store.database import engine_of, open_database, parse_url
from everstep_controller.store.database_errors import StoreAway, Superseded
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.threads import Store
from everstep_controller.store.writer import Writer
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
    seen = session.look()
    assert session.hold(seen.newest + 1)
    writer = Writer(engine)
    taking = claim(name, f"http://{name}", lease_s, free=seen.free)
    epoch = writer.take_over(expected=seen.newest, claim=taking).epoch
    writer.close()
    return epoch


def test_a_look_tells_who_leads_and_for_how_long(engine: Engine, session: Open) -> None:
    first, other = session(), session()
    assert first.look().holder == ""
    epoch = lead(engine, first, "c1")
    seen = other.look()
    assert (seen.epoch, seen.newest, seen.holder, seen.address, seen.free) == (epoch, epoch, "c1", "http://c1", False)
    assert 20 < seen.expires_in_s <= 30


def test_the_lock_is_free_when_its_session_has_ended_long_before_the_lease_does(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    lead(engine, leader, "c1", lease_s=3600.0)
    assert not standby.look().free
    leader.close()
    until(lambda: standby.look().free, "the server has noticed")
    assert standby.look().expires_in_s > 0


@pytest.mark.promise("single-leader")
def test_only_one_of_two_that_saw_the_same_lease_gets_it(engine: Engine, session: Open) -> None:
    one, other = session(), session()
    seen = one.look()
    lead(engine, one, "c1")
    late = Writer(engine)
    with pytest.raises(Superseded, match="another controller was faster"):
        late.take_over(expected=seen.newest, claim=claim("c2", "", 30.0, free=True))
    late.close()
    assert other.look().holder == "c1"


def test_a_lease_that_is_renewed_lasts_and_one_that_was_taken_cannot_be_renewed(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1", lease_s=0.0)
    assert standby.look().expires_in_s <= 0
    leader.renew(epoch, 30.0)
    assert standby.look().expires_in_s > 20
    leader.renew(epoch, 0.0)
    lead(engine, standby, "c2")
    with pytest.raises(Superseded, match=f"epoch {epoch}"):
        leader.renew(epoch, 30.0)


def test_a_lease_that_is_renewed_while_another_one_is_about_to_take_it_stays(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1", lease_s=0.0)
    seen = standby.look()
    assert seen.expires_in_s <= 0
    assert not seen.free
    leader.renew(epoch, 30.0)
    late = Writer(engine)
    with pytest.raises(Superseded, match="renewed meanwhile"):
        late.take_over(expected=epoch, claim=claim("c2", "", 30.0, free=seen.free))
    late.close()
    assert standby.look().newest == epoch


def test_a_leader_hears_from_standbys_how_many_knock_at_them_but_not_from_itself(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    leader.tell("c1", 9)  # as a standby, a moment ago
    lead(engine, leader, "c1")
    assert leader.told() == Told()
    standby.tell("c2", 3)
    standby.tell("c2", 4)
    standby.tell("c3", 1)
    assert leader.told() == Told(knocks={"c2": 4, "c3": 1})


def test_what_was_told_is_not_believed_for_long_and_not_kept_for_ever(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    lead(engine, leader, "c1")
    standby.tell("c2", 4)
    standby.tell("c3", 4)
    with engine.begin() as connection:
        connection.execute(text("UPDATE knocks SET told_at = told_at - CASE controller WHEN 'c2' THEN 10 ELSE 1e6 END"))
    assert leader.told() == Told()
    standby.tell("c4", 1)
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT controller FROM knocks")).scalars()) == {"c2", "c4"}


def test_a_lease_that_was_given_up_is_kept_for_its_heir_for_a_while_and_each_time_in_a_row_counts(
    engine: Engine, session: Open
) -> None:
    leader, heir = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.resign(epoch, "c2")
    assert (heir.look().heir, heir.look().free) == ("c2", False)
    leader.close()
    until(lambda: heir.look().free, "the server has noticed")
    epoch = lead(engine, heir, "c2")
    assert heir.look().heir == ""
    assert heir.told() == Told(resignations=1)
    heir.resign(epoch, "c1")
    assert heir.told() == Told(resignations=2)
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET resigned_at = resigned_at - 60"))
    assert heir.look().heir == ""
    with engine.begin() as connection:
        connection.execute(text("UPDATE lease SET resigned_at = resigned_at - 3600"))
    assert heir.told() == Told()
    with pytest.raises(Superseded, match=f"epoch {epoch - 1}"):
        heir.resign(epoch - 1, "c1")


def test_who_looks_keeps_nobody_from_the_lock_though_nobody_waited_for_what_it_saw(
    engine: Engine, session: Open
) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.close()
    until(lambda: standby.look().free, "the server has noticed")
    again = session()
    assert again.hold(epoch)
    assert not standby.look().free


def test_what_a_take_over_that_came_to_nothing_had_locked_is_free_after_the_next_look(session: Open) -> None:
    one, other = session(), session()
    epoch = one.look().newest + 1
    assert one.hold(epoch)
    assert one.hold(epoch)
    assert not other.hold(epoch)
    one.look()
    assert other.hold(epoch)


def test_a_controller_that_falls_silent_while_it_takes_over_is_followed_and_one_that_speaks_is_left_alone(
    postgres: str, engine: Engine, session: Open
) -> None:
    taking = engine_of(parse_url(postgres), name="c1")
    taker, standby = LeaseSession(taking), session()
    epoch = taker.look().newest + 1
    assert taker.hold(epoch)
    with taking.connect() as writes:
        writes.execute(text("SELECT * FROM meta FOR UPDATE"))
        standby.end_silent_holder(epoch, 3600.0)
        taker.speak()
        assert not standby.hold(epoch)
        until(lambda: standby.end_silent_holder(epoch, 0.01) or standby.hold(epoch), "the lock to be free")
        lead(engine, standby, "c2")  # what the silent one had locked beside holds nobody up
        writes.invalidate()
    with pytest.raises(StoreAway):
        taker.speak()
    taking.dispose()


def test_a_database_that_only_answers_is_found_out(postgres: str) -> None:
    open_database(postgres).dispose()
    engine = create_engine(parse_url(postgres), connect_args={"options": "-c default_transaction_read_only=on"})
    session = LeaseSession(engine)
    assert session.look().holder == ""
    with pytest.raises(StoreAway, match="read-only"):
        session.try_writing()
    session.close()
    engine.dispose()


def test_a_session_that_broke_is_made_anew_without_its_locks(engine: Engine, session: Open) -> None:
    leader, standby = session(), session()
    epoch = lead(engine, leader, "c1")
    leader.abort()
    with pytest.raises(StoreAway):
        leader.renew(epoch, 30.0)
    assert standby.look().free
    assert leader.hold(epoch)
    assert not standby.look().free


def test_a_session_may_say_nothing_inside_a_transaction_for_as_long_as_was_said(postgres: str) -> None:
    engine = engine_of(parse_url(postgres), most_idle_s=5.0)
    with engine.connect() as connection:
        assert connection.execute(text("SHOW idle_in_transaction_session_timeout")).scalar() == "5s"
    engine.dispose()


def test_a_controller_that_was_stopped_inside_a_transaction_holds_nobody_up(postgres: str) -> None:
    open_database(postgres).dispose()
    stopped = engine_of(parse_url(postgres), most_idle_s=0.2)
    with stopped.connect() as connection:
        connection.execute(text("SELECT * FROM meta FOR UPDATE"))  # and then nothing more, for ever
        engine = engine_of(parse_url(postgres))
        writer = Writer(engine)
        assert writer.take_over().epoch == 1
        writer.close()
        engine.dispose()
        connection.invalidate()
    stopped.dispose()


@pytest.mark.parametrize("name", ["c1", "c1" * 50])
def test_the_sessions_of_a_controller_whose_lease_is_over_can_be_ended_and_no_others(
    postgres: str, session: Open, name: str
) -> None:
    stopped, other = (engine_of(parse_url(postgres), name=of) for of in (name, "c2"))
    with stopped.connect() as held, other.connect() as kept:
        held.execute(text("SELECT * FROM meta FOR UPDATE"))
        session().end_sessions_of(name)
        assert kept.execute(text("SELECT key FROM meta WHERE key = 'epoch' FOR UPDATE")).scalar() == "epoch"
        held.invalidate()
    stopped.dispose()
    other.dispose()


def test_a_candidate_that_leaves_frees_what_it_has_locked_before_its_lease_is_over(
    postgres: str, engine: Engine, session: Open
) -> None:
    standby = session()

    async def story() -> None:
        candidate = Candidate(
            engine_of(parse_url(postgres)),
            SYSTEM_CLOCK,
            name="c1",
            address="http://c1",
            lease_s=5.0,
            renew_s=1.0,
            threshold=Threshold(),
            knocks=Knocks(SYSTEM_CLOCK, 1.0),
        )
        store = Store(engine_of(parse_url(postgres)))
        won = await candidate.elected(store, lambda: NOTHING)
        seen = standby.look()
        assert (seen.holder, seen.epoch, seen.free) == ("c1", won.loaded.epoch, False)
        won.tenure.check()
        store.close()
        await candidate.close()

    asyncio.run(story())
    until(lambda: standby.look().free, "the server has noticed")
