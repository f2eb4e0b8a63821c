"""Tensor and pipeline blocks stay whole, within a domain on request, and change as little as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import JobSpec
from everstep_controller.core.records import max_seats, min_seats
from everstep_controller.core.seats.membership import choose_seats, spec_error
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences, sent

NODES = [f"n{i}" for i in range(8)]
names = st.lists(st.sampled_from(NODES), unique=True)
few = st.lists(st.sampled_from(NODES), unique=True, max_size=6)
racks = st.fixed_dictionaries({node: st.sampled_from(["", "r1", "r2"]) for node in NODES})


def _chunks(seats: Sequence[str], block: int) -> list[tuple[str, ...]]:
    return [tuple(seats[at : at + block]) for at in range(0, len(seats), block)]


def _in_place(group: tuple[str, ...], old: Sequence[tuple[str, ...]]) -> int:
    """Return how many nodes of a block keep their seats in the most similar old block."""
    return max((sum(a == b for a, b in zip(group, other, strict=False)) for other in old), default=0)


def _score(seats: Sequence[str], before: Sequence[str], block: int) -> tuple[int, int, int]:
    old, new = _chunks(before, block), _chunks(seats, block)
    return len(new), sum(group in old for group in new), sum(_in_place(group, old) for group in new)


def _best(
    before: list[str], able: list[str], most: int, block: int, domains: dict[str, str] | None
) -> tuple[int, int, int]:
    """Slow and plain: the best score of all rosters that may be."""
    best = (0, 0, 0)
    for count in range(1, min(most, len(able)) // block + 1):
        for seats in permutations(able, count * block):
            if domains is None or all(
                len({domains[node] for node in group}) == 1 and domains[group[0]] for group in _chunks(seats, block)
            ):
                best = max(best, _score(seats, before, block))
    return best


@pytest.mark.promise("rosters-whole")
@given(few, few, st.integers(1, 6), st.sampled_from([2, 3]))
def test_seats_match_best_size_with_least_change(before: list[str], able: list[str], most: int, block: int) -> None:
    before = before[: len(before) // block * block]
    seats = choose_seats(before, able, most, block)
    assert len(seats) == len(set(seats))
    assert set(seats) <= set(able)
    assert _score(seats, before, block) == _best(before, able, most, block, None)


@pytest.mark.promise("rosters-whole")
@given(few, few, racks, st.integers(1, 6))
def test_seats_match_best_choice_within_racks(
    before: list[str], able: list[str], rack: dict[str, str], most: int
) -> None:
    before = [
        node for group in _chunks(before, 2) if len(group) == 2 and len({rack[n] for n in group}) == 1 for node in group
    ]
    seats = choose_seats(before, able, most, 2, rack)
    assert all(len({rack[node] for node in group}) == 1 and rack[group[0]] for group in _chunks(seats, 2))
    assert _score(seats, before, 2) == _best(before, able, most, 2, rack)


@given(names, names, st.sampled_from([1, 2, 3]))
def test_intact_blocks_keep_order_and_seats(before: list[str], lost: list[str], block: int) -> None:
    before = before[: len(before) // block * block]
    spares = [f"s{i}" for i in range(len(before))]
    seats = choose_seats(before, [n for n in before if n not in lost] + spares, len(before), block)
    assert all(seats[at] == node for at, node in enumerate(before) if node not in lost)
    alone = choose_seats(before, [n for n in before if n not in lost], len(before), block)
    whole = [group for group in _chunks(before, block) if not set(group) & set(lost)]
    assert [group for group in _chunks(alone, block) if group in whole] == whole


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"min_nodes": 5, "max_nodes": 7, "block_nodes": 4}, "no whole number of blocks of 4"),
        ({"min_nodes": 1, "max_nodes": 3, "block_nodes": 4}, "a multiple of 4 between them"),
        ({"min_nodes": 4, "max_nodes": 3}, "min_nodes 4 is above max_nodes 3"),
        ({"max_nodes": 4, "block_within": "rack"}, "leave out block_within"),
    ],
)
def test_contradictory_job_shape_is_refused_at_join(wrong: dict[str, Any], text: str) -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    before = len(fleet.effects)
    fleet.join("n1", **wrong)
    assert text in sent(fleet.effects[before:], StopJob)["n1"].reason
    assert "job" not in fleet.state.jobs
    assert text in logged_sentences(fleet.effects, "launcher.refused")[0]


def test_job_bounds_are_rounded_to_whole_blocks() -> None:
    spec = JobSpec(job="j", min_nodes=3, max_nodes=11, block_nodes=4)
    assert (min_seats(spec), max_seats(spec), spec_error(spec)) == (4, 8, "")
