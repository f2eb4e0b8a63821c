"""What counts as harm to a program that did nothing wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.calm import harm
from bench.calm.harm import Harm, find_harm
from bench.calm.launched_run import Evidence, Note
from bench.calm.program import Program
from everstep.wire.v1.operator import Event

PROGRAM = Program("validation", "Rank 0 validates.", lambda run, diary: None, effects={"validation": 1})


def note(kind: str, rank: int = 0, pid: int = 0, generation: int = 1, **values: object) -> Note:
    return {"kind": kind, "rank": rank, "pid": pid or 100 + rank, "generation": generation, "at": 1.0, **values}


def calm_notes() -> list[Note]:
    validation = {"name": "validation", "step": 1}
    return [
        *(note("began", rank) for rank in (0, 1)),
        note("step", step=1, loss=0.5),
        note("effect begun", **validation),
        note("effect", **validation),
        *(note("final", rank, digest="d") for rank in (0, 1)),
        *(note("ended", rank) for rank in (0, 1)),
    ]


def evidence(notes: list[Note] | None = None, status: int | None = 0, output: str = "", **more: object) -> Evidence:
    return Evidence(status, 1.0, output, calm_notes() if notes is None else notes, **more)  # type: ignore[arg-type]


def event(kind: str, **detail: str) -> Event:
    return Event(id=1, at=1.0, kind=kind, sentence=f"{kind} happened", node="local", detail=detail)


def kinds(found: Evidence, plain: Evidence | None = None) -> dict[Harm, int]:
    return {one.harm: one.count for one in find_harm(PROGRAM, [found], plain)}


def test_harm_of_a_calm_run_is_empty() -> None:
    assert kinds(evidence(), evidence()) == {}


def test_harm_counts_killed_ranks_and_regroups() -> None:
    notes = [note("began", pid=99), *calm_notes()]
    assert kinds(evidence(notes)) == {Harm.KILLED: 1}
    again = [*calm_notes(), note("began", generation=3), note("ended", generation=3)]
    assert kinds(evidence(again)) == {Harm.REGROUPED: 2}


def test_harm_counts_a_rank_of_a_stopped_job_only_if_it_was_replaced() -> None:
    stopped = [note("began", 0), note("began", 1)]
    assert kinds(evidence([*stopped, *calm_notes()[2:-2]], status=1)) == {Harm.FAILED: 1}
    replaced = [note("began", pid=99), *stopped, *calm_notes()[2:-2]]
    assert kinds(evidence(replaced, status=1)) == {Harm.FAILED: 1, Harm.KILLED: 1}


@pytest.mark.parametrize("status", [1, None])
def test_harm_counts_a_wrong_end_as_failed(status: int | None) -> None:
    assert kinds(evidence(status=status)) == {Harm.FAILED: 1}


def test_harm_counts_effects_not_done_exactly_as_asked() -> None:
    assert kinds(evidence([*calm_notes(), note("effect begun", name="validation", step=2)])) == {Harm.EFFECTS: 1}
    assert kinds(evidence([one for one in calm_notes() if one["kind"] != "effect"])) == {Harm.EFFECTS: 1}


def test_harm_names_the_first_loss_that_differs() -> None:
    other = [one | ({"loss": 0.25} if one["kind"] == "step" else {}) for one in calm_notes()]
    (found,) = find_harm(PROGRAM, [evidence()], evidence(other))
    assert (found.harm, found.sentence) == (Harm.LOSSES, "loss of step 1 is 0.5, under torchrun 0.25")
    digests = [one | ({"digest": "e"} if one["kind"] == "final" else {}) for one in calm_notes()]
    assert kinds(evidence(), evidence(digests)) == {Harm.LOSSES: 1}


@pytest.mark.parametrize(
    ("said", "accuses"),
    [
        (event("verdict.evict"), True),
        (event("verdict.no_action"), False),
        (event("rank.hung"), True),
        (event("resumed"), False),
        (event("finding", key="sdc.audit_mismatch/strike"), True),
        (event("finding", key="host.disk/root"), False),
    ],
)
def test_harm_tells_accusations_from_other_events(said: Event, accuses: bool) -> None:
    assert kinds(evidence(events=[said])) == ({Harm.ACCUSED: 1} if accuses else {})


def test_harm_leaves_out_the_end_of_private_services() -> None:
    assert kinds(evidence(events=[event("launcher.left"), event("node.lost")])) == {}


def test_harm_finds_sentences_that_accuse() -> None:
    output = "no step finished for 1.0 s: treated as a hang\nrank 0 works alone for 5 s; rank 1 waits\nsample 1: hung"
    assert harm.accusing_lines(output) == ["no step finished for 1.0 s: treated as a hang"]


def test_harm_reports_files_and_what_is_left(tmp_path: Path) -> None:
    assert kinds(evidence(check="model.pt is damaged")) == {Harm.FILES: 1}
    assert kinds(evidence(left=["process everstep-rank"])) == {Harm.LEFT: 1}
