"""What a rank does with the words of its agent, apart from obeying them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import msgspec
import pytest
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.directives import DirectiveListener, MembershipState, ReceivedDirectives
from everstep_trainer.runtime.progress import StepProgress

from everstep.clock import ManualClock
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import NewGeneration
from tests.support.generations import generation


def attendant(where: MembershipState) -> DirectiveListener:
    """A rank that finished step 7 of its generation, and began 40 collectives."""
    settings = HookSettings()
    progress = StepProgress(settings.step_window)
    progress.enter(1, lambda: 40)
    progress.finish_step(7)
    presence = SimpleNamespace(state=where, abort=lambda: None)
    return DirectiveListener(ReceivedDirectives(), presence, progress, lambda _: None, settings, ManualClock())  # type: ignore[arg-type]


def hung(number: int) -> NewGeneration:
    spec = generation(number)
    sentence = "rank 2 on n3 has not ticked for 0.3 s"
    return NewGeneration(spec=msgspec.structs.replace(spec, reason=GenerationReason.RANK_HUNG, sentence=sentence))


def test_ranks_log_their_stacks_when_another_rank_hangs(caplog: pytest.LogCaptureFixture) -> None:
    rank = attendant(MembershipState.MEMBER)
    with caplog.at_level(logging.WARNING):
        rank.handle_message(hung(2))
        rank.handle_message(hung(2))
    (record,) = caplog.records
    assert "rank 2 on n3 has not ticked" in record.getMessage()
    assert "after step 7, in the last of 40 collectives" in record.getMessage()
    assert "test_ranks_log_their_stacks_when_another_rank_hangs" in record.getMessage()
    assert record.trace == "t2"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("where", "message"),
    [(MembershipState.NOT_A_MEMBER, hung(2)), (MembershipState.MEMBER, NewGeneration(spec=generation(2)))],
)
def test_stacks_are_logged_only_for_hangs(
    where: MembershipState, message: NewGeneration, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        attendant(where).handle_message(message)
    assert not caplog.records


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


def test_tick_that_the_next_generation_overtakes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = attendant(MembershipState.NOT_A_MEMBER)
    spec, following = generation(1), generation(2)
    rank.enter(spec, spec.roster[0])

    def read_loss() -> None:  # meanwhile the main thread goes on
        rank.enter(following, following.roster[0])
        rank.progress.finish_step(186)

    monkeypatch.setattr(rank.progress.loss, "value", read_loss)
    assert rank.make_tick() is None
    tick = rank.make_tick()
    assert tick is not None
    assert (tick.generation, tick.step) == (2, 186)
