"""What a rank logs and reports while it listens to its agent."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import msgspec
import pytest

from everstep.clock import ManualClock
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.local import RankHeartbeat, ToAgent
from everstep.wire.v1.training import GenerationSpec
from everstep_trainer.base.progress import StepProgress
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.directives import DirectiveListener, MembershipState, ReceivedDirectives
from tests.support.fleet.generations import generation


def listener(where: MembershipState, sent: list[ToAgent] | None = None) -> DirectiveListener:
    """Return the listener of a rank that finished step 7 of its generation and began 40 collectives."""
    settings = HookSettings()
    progress = StepProgress(settings.step_window)
    progress.enter(1, lambda: 40)
    progress.finish_step(7)
    presence = SimpleNamespace(state=where, abort=lambda: None)
    send = (sent if sent is not None else []).append
    return DirectiveListener(ReceivedDirectives(), presence, progress, send, settings, ManualClock())  # type: ignore[arg-type]


def hung(number: int) -> NewGeneration:
    spec = generation(number)
    sentence = "rank 2 on n3 has not ticked for 0.3 s"
    return NewGeneration(spec=msgspec.structs.replace(spec, reason=GenerationReason.RANK_HUNG, sentence=sentence))


def test_ranks_log_their_stacks_when_another_rank_hangs(caplog: pytest.LogCaptureFixture) -> None:
    rank = listener(MembershipState.MEMBER)
    with caplog.at_level(logging.WARNING):
        rank.handle_message(hung(2))
        rank.handle_message(hung(2))
    (record,) = caplog.records
    assert "rank 2 on n3 has not ticked" in record.getMessage()
    assert "after step 7, in the last of 40 collectives" in record.getMessage()
    assert "test_ranks_log_their_stacks_when_another_rank_hangs" in record.getMessage()
    assert record.trace == "t2"  # type: ignore[attr-defined]


def test_tick_reports_the_begun_step_of_its_generation_only() -> None:
    settings = HookSettings()
    progress = StepProgress(settings.step_window)
    progress.enter(1, lambda: 0)
    progress.begin_step(8)
    progress.plan(300)
    presence = SimpleNamespace(state=MembershipState.NOT_A_MEMBER, abort=lambda: None)
    rank = DirectiveListener(ReceivedDirectives(), presence, progress, lambda _: None, settings, ManualClock())  # type: ignore[arg-type]
    for number, begun in ((1, 8), (2, 0)):
        spec = generation(number)
        rank.enter(spec, spec.roster[0])
        tick = rank.make_tick()
        assert tick is not None
        assert (tick.generation, tick.started_step, tick.until_step) == (number, begun, 300)
    progress.enter(2, lambda: 0)
    assert progress.begun_step == 0
    progress.resume_from(5)
    assert progress.begun_step == 5


def test_rank_ticks_when_it_enters_a_generation() -> None:
    sent: list[ToAgent] = []
    spec = generation(1)
    listener(MembershipState.JOINING, sent).enter(spec, spec.roster[0])
    assert [(type(tick), tick.generation) for tick in sent] == [(RankHeartbeat, 1)]  # type: ignore[union-attr]


def test_ticks_are_rare_only_while_steps_end_on_full_cores() -> None:
    rank = listener(MembershipState.MEMBER)
    rank.enter(generation(1), generation(1).roster[0])

    def is_rare_after(step: int, *, full: bool) -> bool:
        rank.progress.finish_step(step)
        rank.progress.are_cores_full = full
        rank.make_tick()
        return rank.may_tick_rarely()

    assert not is_rare_after(8, full=False)
    assert is_rare_after(9, full=True)
    assert not is_rare_after(9, full=True), "a stall must be seen as soon as ever"
    assert is_rare_after(10, full=True)


@pytest.fixture
def orders() -> ReceivedDirectives:
    return ReceivedDirectives()


def next_number(orders: ReceivedDirectives, timeout_s: float) -> int:
    directive = orders.wait_next(0, timeout_s)
    assert isinstance(directive, GenerationSpec)
    return directive.number


@pytest.mark.promise("stale-refused")
def test_an_older_or_equal_generation_is_dropped(orders: ReceivedDirectives) -> None:
    assert orders.add_generation(generation(5))
    assert not orders.add_generation(generation(5))
    assert not orders.add_generation(generation(4))
    assert next_number(orders, 0) == 5


def test_a_newer_generation_ends_the_running_one_at_once(orders: ReceivedDirectives) -> None:
    orders.add_generation(generation(2))
    assert orders.is_generation_over(1, 0)
    assert orders.is_superseded(1)


def test_the_end_of_the_job_ends_every_generation(orders: ReceivedDirectives) -> None:
    orders.add_generation(generation(3, after_step=100))
    orders.add_stop(StopJob(job="job", ok=True, reason="done"))
    assert orders.is_generation_over(3, 0)
    assert isinstance(orders.wait_next(3, 0), StopJob)


def test_waiting_ends_with_a_generation_or_timeout(orders: ReceivedDirectives) -> None:
    assert orders.wait_next(0, 0.0) is None
    thread = threading.Thread(target=lambda: orders.add_generation(generation(1)))
    thread.start()
    assert next_number(orders, 10) == 1
    thread.join()
