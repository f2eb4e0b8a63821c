"""Ranks follow from the seats of a generation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.agent import Gpu, Host
from everstep.wire.v1.training import GenerationSpec, JobSpec
from tests.support.fleet.generations import generation

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


GPU = Gpu(
    index=0,
    uuid="u",
    name="H100",
    pci_bus_id="0000:1b:00",
    memory_bytes=1,
    part_number="692-2G520",
    vbios="96",
    inforom="G5",
)
HOST = Host(vendor="NVIDIA", product="DGXH100", serial="1", chassis_serial="2", kernel="6.8.0-40-generic")


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (GPU, ("name", "pci_bus_id", "part_number", "vbios", "inforom")),
        (HOST, ("vendor", "product", "kernel")),
    ],
)
def test_equal_strings_of_registrations_are_interned(text: Gpu | Host, shared: tuple[str, ...]) -> None:
    body = msgspec.json.encode(text)
    first, other = (msgspec.json.decode(body, type=type(text)) for _ in range(2))
    assert first == other == text
    assert all(getattr(first, name) is getattr(other, name) for name in shared)
