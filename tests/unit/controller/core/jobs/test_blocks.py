"""Tensor x pipeline blocks stay whole, within a domain where asked, and change as little as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from everstep_controller.core.jobs.membership import choose_seats, spec_error
from everstep_controller.core.records import max_seats, min_seats
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import JobSpec
from tests.support.core_fleet import CoreFleet, audits, sent

NODES = [f"n{i}" for i in range(8)]
names = st.lists(st.sampled_from(NODES), unique=True)
few = st.lists(st.sampled_from(NODES), unique=True, max_size=6)
racks = st.fixed_dictionaries({node: st.sampled_from(["", "r1", "r2"]) for node in NODES})


def _chunks(seats: Sequence[str], block: int) -> list[tuple[str, ...]]:
    return [tuple(seats[at : at + block]) for at in range(0, len(seats), block)]


def _in_place(one: tuple[str, ...], old: Sequence[tuple[str, ...]]) -> int:
    """How many of a block's nodes sit where they sat, in the one old block that it resembles most."""
    return max((sum(a == b for a, b in zip(one, other, strict=False)) for other in old), default=0)


def _score(seats: Sequence[str], before: Sequence[str], block: int) -> tuple[int, int, int]:
    old, new = _chunks(before, block), _chunks(seats, block)
    return len(new), sum(one in old for one in new), sum(_in_place(one, old) for one in new)


def _best(
    before: list[str], able: list[str], most: int, block: int, domains: dict[str, str] | None
) -> tuple[int, int, int]:
    """Slow and plain: the best score of all rosters that may be."""
    best = (0, 0, 0)
    for count in range(1, min(most, len(able)) // block + 1):
        for seats in permutations(able, count * block):
            if domains is None or all(
                len({domains[node] for node in one}) == 1 and domains[one[0]] for one in _chunks(seats, block)
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
    before = [node for one in _chunks(before, 2) if len(one) == 2 and len({rack[n] for n in one}) == 1 for node in one]
    seats = choose_seats(before, able, most, 2, rack)
    assert all(len({rack[node] for node in one}) == 1 and rack[one[0]] for one in _chunks(seats, 2))
    assert _score(seats, before, 2) == _best(before, able, most, 2, rack)


@given(names, names, st.integers(1, 9))
def test_block_of_one_node_matches_general_rule(before: list[str], able: list[str], most: int) -> None:
    assert choose_seats(before, able, most) == choose_seats(before, able, most, 1, dict.fromkeys(NODES, "here"))


@given(names, names, st.sampled_from([1, 2, 3]))
def test_intact_blocks_keep_order_and_seats(before: list[str], lost: list[str], block: int) -> None:
    before = before[: len(before) // block * block]
    spares = [f"s{i}" for i in range(len(before))]
    seats = choose_seats(before, [n for n in before if n not in lost] + spares, len(before), block)
    assert all(seats[at] == node for at, node in enumerate(before) if node not in lost)
    alone = choose_seats(before, [n for n in before if n not in lost], len(before), block)
    whole = [one for one in _chunks(before, block) if not set(one) & set(lost)]
    assert [one for one in _chunks(alone, block) if one in whole] == whole


# --- what a job may ask for --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_nodes": 5, "max_nodes": 7, "block_nodes": 4}, "no whole number of blocks of 4"),
        ({"min_nodes": 1, "max_nodes": 3, "block_nodes": 4}, "a multiple of 4 between them"),
        ({"min_nodes": 4, "max_nodes": 3}, "min_nodes 4 is above max_nodes 3"),
        ({"max_nodes": 4, "block_within": "rack"}, "leave out block_within"),
    ],
)
def test_contradictory_job_shape_is_refused_at_join(wrong: dict[str, object], words: str) -> None:
    fleet = CoreFleet()
    fleet.register("n1")
    before = len(fleet.effects)
    fleet.join("n1", **wrong)
    assert words in sent(fleet.effects[before:], StopJob)["n1"].reason
    assert "job" not in fleet.state.jobs
    assert words in audits(fleet.effects, "launcher.refused")[0]


def test_job_bounds_are_rounded_to_whole_blocks() -> None:
    spec = JobSpec(job="j", min_nodes=3, max_nodes=11, block_nodes=4)
    assert (min_seats(spec), max_seats(spec), spec_error(spec)) == (4, 8, "")
