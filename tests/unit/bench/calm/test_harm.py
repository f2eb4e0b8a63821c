"""The kinds of harm to an honest program."""

from __future__ import annotations

import pytest

from bench.calm.hang_programs import HANGS
from bench.calm.hangs import named_after
from bench.calm.harm import Harm, find_harm
from bench.calm.launched_run import Evidence, Note
from bench.calm.program import Program
from everstep.wire.v1.operator import Event

PROGRAM = Program("validation", "Rank 0 validates.", lambda run, diary: None, effects={"validation": 1})


def note(kind: str, rank: int = 0, pid: int = 0, generation: int = 1, **values: object) -> Note:
    return {"kind": kind, "rank": rank, "pid": pid or 100 + rank, "generation": generation, "at": 1.0, **values}


def calm_notes() -> list[Note]:
    return [
        *(note("began", rank) for rank in (0, 1)),
        note("step", step=1, loss=0.5),
        note("effect begun", name="validation", step=1),
        note("effect", name="validation", step=1),
        *(note("final", rank, digest="d") for rank in (0, 1)),
        *(note("ended", rank) for rank in (0, 1)),
    ]


def evidence(notes: list[Note] | None = None, status: int | None = 0, output: str = "", **more: object) -> Evidence:
    return Evidence(status, 1.0, output, calm_notes() if notes is None else notes, **more)  # type: ignore[arg-type]


def kinds(found: Evidence, plain: Evidence | None = None) -> dict[Harm, int]:
    return {harm.harm: harm.count for harm in find_harm(PROGRAM, [found], plain)}


def test_harm_counts_killed_ranks_and_regroups() -> None:
    notes = [note("began", pid=99), *calm_notes()]
    assert kinds(evidence(notes)) == {Harm.KILLED: 1}
    again = [*calm_notes(), note("began", generation=3), note("ended", generation=3)]
    assert kinds(evidence(again)) == {Harm.REGROUPED: 2}


@pytest.mark.parametrize("status", [1, None])
def test_harm_counts_a_wrong_end_as_failed(status: int | None) -> None:
    assert kinds(evidence(status=status)) == {Harm.FAILED: 1}


HUNG: Note = {"kind": "hang", "rank": 1, "pid": 1, "generation": 1, "at": 100.0}


def named(name: str, *sentences: tuple[float, str, str], notes: list[Note] | None = None) -> float | None:
    events = [Event(id=n, at=at, kind=kind, sentence=text) for n, (at, kind, text) in enumerate(sentences, 1)]
    return named_after(HANGS[name], Evidence(0, 1.0, "", [HUNG] if notes is None else notes, events))[0]


def test_hang_is_named_by_the_first_judgement_with_its_rank() -> None:
    sentences = [
        (99.0, "rank.hung", "rank 1 was slow before"),
        (100.2, "rank.stalled", "rank 0 has made no progress"),
        (100.5, "rank.hung", "rank 1 on local is stopped; it is killed and replaced"),
    ]
    assert named("stopped_by_a_signal", *sentences) == pytest.approx(0.5)
    assert named("stopped_by_a_signal", *sentences[:2]) is None


def test_rank_reported_as_working_is_not_named_as_hanging() -> None:
    sentences = [
        (105.0, "rank.stalled", "rank 1 works alone at train.py:16 for 5 s; rank 0 waits"),
        (160.0, "rank.stalled", "rank 1 has been in one call at train.py:16 for 60 s: it may never end"),
    ]
    assert named("endless_loop_in_c", *sentences) == 60.0
