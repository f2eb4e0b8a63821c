"""A generation says its seats; ranks follow from them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.training import GenerationSpec, JobSpec
from tests.support.generations import generation

SPEC: GenerationSpec = msgspec.structs.replace(
    generation(1), seats=("b", "a"), spec=JobSpec(job="j", max_nodes=2, nproc_per_node=2)
)


def test_ranks_are_consecutive_on_each_node() -> None:
    assert [(m.rank, m.node, m.local_rank) for m in SPEC.roster] == [
        (0, "b", 0),
        (1, "b", 1),
        (2, "a", 0),
        (3, "a", 1),
    ]


def test_node_outside_the_roster_has_no_ranks() -> None:
    assert SPEC.members_on("c") == SPEC.members_on(None) == ()
    assert SPEC.member_at("c", 0) is SPEC.member_at("a", 2) is None
    with pytest.raises(IndexError):
        SPEC.node_of(4)


@given(st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=6, unique=True), st.integers(1, 9))
def test_roster_lookups_agree_with_the_roster(seats: list[str], each: int) -> None:
    spec = msgspec.structs.replace(SPEC, seats=tuple(seats), spec=JobSpec(job="j", nproc_per_node=each))
    assert spec.world_size == len(spec.roster)
    assert [m.rank for m in spec.roster] == list(range(spec.world_size))
    for member in spec.roster:
        assert spec.node_of(member.rank) == member.node
        assert spec.member_at(member.node, member.local_rank) == member
        assert [node for node in seats if spec.has_rank_on(node, member.rank)] == [member.node]
        assert member in spec.members_on(member.node)
    for node in (*seats, "elsewhere"):
        assert list(spec.ranks_on(node)) == [rank for rank in range(spec.world_size) if spec.has_rank_on(node, rank)]
    assert not spec.has_rank_on(seats[0], spec.world_size)


def test_encoded_generation_size_is_independent_of_rank_count() -> None:
    eight = msgspec.structs.replace(SPEC, spec=JobSpec(job="j", max_nodes=2, nproc_per_node=8))
    assert len(msgspec.json.encode(eight)) == len(msgspec.json.encode(SPEC))
    assert msgspec.json.decode(msgspec.json.encode(eight), type=GenerationSpec).roster == eight.roster
