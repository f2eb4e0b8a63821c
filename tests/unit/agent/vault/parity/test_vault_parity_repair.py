"""Corrupt parity, or a shard that only parity holds, is rebuilt from the rest of its group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.layout.segment_header import PAGE_BYTES
from everstep.layout.slots import CHUNK_BYTES, SegmentView, chunk_count
from everstep.native import DIGEST_BYTES
from everstep.vocabulary import FindingKind
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import JOB, map_segment
from tests.unit.agent.vault.parity.parity_group import NODES, Group, started

SCRUB = ("--scrub-interval-s", "0.02")


@pytest.fixture
def group(program_forks: ForkPool) -> Iterator[Group]:
    """A group whose nodes n1, p and q scrub their slots."""
    with started(program_forks, dict.fromkeys(("n1", "p", "q"), SCRUB)) as fleet:
        group = Group(fleet)
        group.protect_all()
        yield group


def view_of(group: Group, node: str) -> SegmentView:
    name = "parity-7" if node in ("p", "q") else "own-0"
    return map_segment(Path(group.fleet.all[NODES.index(node)].segment_dir, JOB, name))


def report_of_repair(group: Group, node: str, place: int | None) -> str:
    """Flip a bit of the payload, or of the manifest if ``place`` is None, and return the report after the repair."""
    view = view_of(group, node)
    ((slot, header),) = view.sealed_slots()
    before = bytes(view.payload(slot))
    if place is not None:
        view.payload(slot)[place] ^= 4
    else:
        start = view.segment.slot_offset(slot) + PAGE_BYTES + DIGEST_BYTES * (chunk_count(header.payload_bytes) + 1)
        view._buffer[start + 11] ^= 1
    finding = group.fleet.supervisors[node].finding().finding.finding
    assert finding.kind is FindingKind.SLOT_CORRUPT
    assert finding.subject == ("job/parity-7/1:5" if node in ("p", "q") else "job/rank10/1:5")
    if "discarded" not in finding.message:
        assert bytes(view.payload(slot)) == before
        view.verify(slot)
    return finding.message


@pytest.mark.parametrize("node", ["p", "q"])
def test_corrupt_parity_row_is_rebuilt_from_members(group: Group, node: str) -> None:
    other = "q" if node == "p" else "p"
    group.fleet.all[NODES.index(other)].kill()
    for place in (5, CHUNK_BYTES + 9):
        assert "repaired from its parity group" in report_of_repair(group, node, place)


@pytest.mark.promise("bit-flips")
def test_parity_row_is_rebuilt_with_one_member_lost_but_not_two(group: Group) -> None:
    group.forget_nodes(("n2",), 2)
    assert "repaired from its parity group" in report_of_repair(group, "p", 5)
    assert "repaired from its parity group" in report_of_repair(group, "q", None)
    group.forget_nodes(("n2", "n3"), 3)
    assert "the slot is discarded" in report_of_repair(group, "p", 5)


@pytest.mark.promise("bit-flips")
def test_corrupt_unreplicated_shard_is_rebuilt_from_parity(group: Group) -> None:
    for place in (7, CHUNK_BYTES + 7, None):
        assert "repaired from its parity group" in report_of_repair(group, "n1", place)
    group.forget_nodes(("n3", "p"), 2)
    assert "the slot is discarded" in report_of_repair(group, "n1", 8), "Q alone bears one loss, and n3 is one"
