"""When a rank that hangs counts as named."""

from __future__ import annotations

import pytest

from bench.calm.hang_programs import HANGS
from bench.calm.hangs import named_after
from bench.calm.launched_run import Evidence, Note
from everstep.wire.v1.operator import Event

HUNG: Note = {"kind": "hang", "rank": 1, "pid": 1, "generation": 1, "at": 100.0}


def named(name: str, *said: tuple[float, str, str], notes: list[Note] | None = None) -> float | None:
    events = [Event(id=n, at=at, kind=kind, sentence=text) for n, (at, kind, text) in enumerate(said, 1)]
    return named_after(HANGS[name], Evidence(0, 1.0, "", [HUNG] if notes is None else notes, events))[0]


def test_hang_is_named_by_the_first_judgement_with_its_rank() -> None:
    said = [
        (99.0, "rank.hung", "rank 1 was slow before"),
        (100.2, "rank.stalled", "rank 0 has made no progress"),
        (100.5, "rank.hung", "rank 1 on local is stopped; it is killed and replaced"),
    ]
    assert named("stopped_by_a_signal", *said) == pytest.approx(0.5)
    assert named("stopped_by_a_signal", *said[:2]) is None


def test_rank_that_is_said_to_work_is_not_named_as_hanging() -> None:
    said = [
        (105.0, "rank.stalled", "rank 1 works alone at train.py:16 for 5 s; rank 0 waits"),
        (160.0, "rank.stalled", "rank 1 has been in one call at train.py:16 for 60 s: it may never end"),
    ]
    assert named("endless_loop_in_c", *said) == 60.0


def test_mismatched_collectives_need_both_ranks_named() -> None:
    name = "collectives_over_different_groups"
    assert named(name, (101.0, "rank.hung", "rank 0 blocks all")) is None
    assert named(name, (101.0, "rank.hung", "rank 0 is in one collective and rank 1 in another")) == 1.0


def test_program_that_did_not_hang_is_not_named() -> None:
    assert named("endless_sleep", (101.0, "rank.hung", "rank 1"), notes=[]) is None
