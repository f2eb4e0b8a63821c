"""Slots that vaults copy to others, over real sockets between real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from everstep.ids import Version
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import CHUNK_BYTES, SegmentView, slot_bytes_for
from everstep.vocabulary import FindingKind, Severity
from everstep.wire.v1 import local
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, RankMemory, VaultClient, Vaults, expect, map_segment, noise

pytestmark = pytest.mark.slow


def statistics(client: VaultClient) -> local.StatisticsAnswer:
    return client.statistics()


def slots_at(client: VaultClient) -> dict[Version, local.SlotInfo]:
    answer = client.inventory()
    return {slot.version: slot for slot in answer.slots}


def opened(slot: local.SlotInfo) -> tuple[SegmentView, int]:
    return map_segment(Path(slot.path)), slot.slot


def big_rank(fleet: Vaults, chunks: int) -> RankMemory:
    """Return a rank with a slot that takes a while to send."""
    rank = RankMemory(fleet.all[0].client(), rank=0, slot_bytes=slot_bytes_for(64, chunks * CHUNK_BYTES))
    rank.fill(0, Version(1, 1), noise(CHUNK_BYTES) * chunks)
    return rank


def test_sealed_slot_is_acknowledged_by_each_verified_copy(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2"), fleet.start("n3")
    clients = fleet.configure()
    rank = RankMemory(fleet.all[0].client(), rank=0)
    payload = noise(100_000)
    rank.fill(0, Version(1, 7), payload)
    answer = rank.sealed(0, Version(1, 7), ["n2", "n3"])
    assert isinstance(answer, local.Replicated)
    assert (answer.nodes, answer.failed) == (("n2", "n3"), {})
    for node in ("n2", "n3"):
        copy = slots_at(clients[node])[Version(1, 7)]
        assert (copy.node, copy.rank, copy.replica) == (node, 0, True)
        view, slot = opened(copy)
        view.verify(slot)
        assert view.payload(slot) == payload
        assert view.manifest(slot) == b"manifest"
    assert statistics(clients["n1"]).counters["replicated_slots"] == 2
    assert statistics(clients["n2"]).counters["received_bytes"] == len(payload) + len(b"manifest")


def test_large_payload_uses_several_connections(fleet: Vaults) -> None:
    fleet.start("n1", "--streams", "3", "--scrub-interval-s", "0"), fleet.start("n2")
    clients = fleet.configure()
    size = 20 * CHUNK_BYTES + 12345
    rank = RankMemory(fleet.all[0].client(), rank=5, slot_bytes=slot_bytes_for(100, size))
    payload = noise(CHUNK_BYTES) * 20 + noise(12345, seed=2)
    rank.fill(1, Version(1, 1), payload)
    assert rank.replicated(1, Version(1, 1), ["n2"]).nodes == ("n2",)
    view, slot = opened(slots_at(clients["n2"])[Version(1, 1)])
    view.verify(slot)
    assert view.payload(slot) == payload
    assert statistics(clients["n2"]).gauges["peer_connections"] >= 2


def test_committable_version_goes_before_newer_uncommittable(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    clients = fleet.configure()
    rank = RankMemory(fleet.all[0].client(), rank=0)
    for slot in range(4):
        rank.fill(slot, Version(1, slot), b"x" * 1000)
    fleet.all[1].stop()
    requests = [rank.post_sealed(0, Version(1, 0), ["n2"])]
    until(lambda: statistics(clients["n1"]).gauges["peer_connections"], "the first copy is under way")
    requests += [rank.post_sealed(slot, Version(1, slot), ["n2"], kept=slot in (1, 2)) for slot in range(1, 4)]
    assert expect(rank.client.wait(requests[1]), local.Replicated).failed == {"n2": "superseded by 1:2"}
    assert expect(rank.client.wait(requests[3]), local.Replicated).failed == {"n2": "superseded by 1:2"}
    fleet.all[1].process.send_signal(signal.SIGCONT)
    assert expect(rank.client.wait(requests[2]), local.Replicated).nodes == ("n2",)
    assert set(slots_at(clients["n2"])) == {Version(1, 0), Version(1, 2)}


@pytest.mark.promise("stale-refused")
def test_transfer_of_an_ended_generation_is_refused(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    clients = fleet.configure(fleet.all[1], generation=2)
    rank = RankMemory(fleet.all[0].client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    answer = rank.replicated(0, Version(1, 1), ["n2"])
    assert answer.nodes == ()
    assert answer.failed["n2"].startswith("stale: n2: job job is in generation 2, 1 is over")
    assert slots_at(clients["n2"]) == {}
    assert statistics(clients["n2"]).refused["stale"] == 1


def test_lost_or_unknown_peer_is_named_with_the_reason(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    fleet.all[1].kill()
    rank = RankMemory(fleet.all[0].client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    answer = rank.replicated(0, Version(1, 1), ["n2", "n9"])
    assert answer.nodes == ()
    assert answer.failed["n2"].startswith("unavailable: n2 does not answer at")
    assert answer.failed["n9"].startswith("not_found: n9 is not among the holders")


def test_restarted_peer_is_reached_over_a_new_connection(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    rank = RankMemory(fleet.all[0].client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    assert rank.replicated(0, Version(1, 1), ["n2"]).nodes == ("n2",)
    fleet.all[1].kill()
    fleet.all[1].start("--listen", fleet.all[1].address)
    fleet.configure(fleet.all[1])
    rank.fill(1, Version(1, 2), b"y")
    assert rank.replicated(1, Version(1, 2), ["n2"]).nodes == ("n2",)


def test_copies_of_kept_versions_are_not_overwritten(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    keep = Version(1, 1), Version(1, 2)
    rank = RankMemory(fleet.all[0].client(), rank=0)
    for step in range(1, 9):
        rank.fill(step % 5, Version(1, step), b"%d" % step)
        assert rank.replicated(step % 5, Version(1, step), ["n2"], keep=keep).nodes == ("n2",)
    copies = slots_at(fleet.all[1].client())
    assert set(copies) == {*keep, Version(1, 6), Version(1, 7), Version(1, 8)}


def test_corrupt_sender_bytes_are_found_by_receiver_and_owner(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    clients = fleet.configure()
    rank = big_rank(fleet, chunks=3)
    rank.view.payload(0)[CHUNK_BYTES + 3] ^= 1
    answer = rank.replicated(0, Version(1, 1), ["n2"])
    assert answer.nodes == ()
    assert answer.failed["n2"].startswith("digest_mismatch: n2: chunk 1")
    at_receiver = clients["n2"].finding().finding
    assert at_receiver.job == JOB
    assert (at_receiver.finding.kind, at_receiver.finding.subject) == (FindingKind.TRANSFER_CORRUPT, "n1")
    assert "chunk 1" in at_receiver.finding.message
    at_sender = clients["n1"].finding().finding.finding
    assert (at_sender.kind, at_sender.subject) == (FindingKind.SLOT_CORRUPT, "job/rank0/1:1")
    assert at_sender.severity is Severity.WARNING
    assert slots_at(clients["n1"]) == slots_at(clients["n2"]) == {}
    counted = statistics(clients["n2"])
    assert (counted.counters["corrupt_transfers"], counted.refused["digest_mismatch"]) == (1, 1)


def test_slot_refilled_while_being_sent_causes_no_finding(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    clients = fleet.configure()
    rank = big_rank(fleet, chunks=4)
    fleet.all[1].stop()
    request = rank.post_sealed(0, Version(1, 1), ["n2"])
    statistics(clients["n1"])  # the request before it on the loop has been taken up
    rank.view.begin(0, 0, Version(1, 2), b"", 1000)[:] = bytes(1000)
    fleet.all[1].process.send_signal(signal.SIGCONT)
    answer = rank.client.wait(request)
    assert isinstance(answer, local.RequestFailed) or expect(answer, local.Replicated).failed["n2"].startswith(
        "conflict"
    )
    assert slots_at(clients["n2"]) == {}
    assert statistics(clients["n2"]).counters["corrupt_transfers"] == 0
    assert statistics(clients["n1"]).counters["corrupt_slots"] == 0


def test_sender_killed_in_a_transfer_leaves_no_partial_copy(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2"), fleet.start("n3")
    clients = fleet.configure()
    big_rank(fleet, chunks=16).post_sealed(0, Version(1, 1), ["n2"])
    copies = fleet.all[1].segment_dir / JOB / "replica-0"
    until(lambda: copies.exists() and map_segment(copies).header(0), "the transfer is under way")
    fleet.all[0].kill()
    until(lambda: statistics(clients["n2"]).gauges["peer_connections"] == 0, "n2 noticed")
    finished = statistics(clients["n2"]).counters["received_slots"]
    assert len(slots_at(clients["n2"])) == finished
    rank = RankMemory(fleet.all[2].client(), rank=0)
    rank.fill(0, Version(1, 2), b"again")
    assert rank.replicated(0, Version(1, 2), ["n2"]).nodes == ("n2",)
    view = map_segment(copies)
    states = [header.state for slot in range(view.slots) if (header := view.header(slot)) is not None]
    assert states == [SlotState.SEALED] * (finished + 1)  # what was left in the middle made room


def test_receiver_killed_in_a_fill_discards_the_partial_copy(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    rank = big_rank(fleet, chunks=16)
    request = rank.post_sealed(0, Version(1, 1), ["n2"])
    copies = fleet.all[1].segment_dir / JOB / "replica-0"
    until(lambda: copies.exists() and map_segment(copies).header(0), "the transfer is under way")
    fleet.all[1].stop()
    sealed = bool(list(map_segment(copies).sealed_slots()))
    fleet.all[1].kill()
    answer = rank.client.wait(request)
    assert isinstance(answer, local.Replicated)
    assert sealed or answer.failed["n2"].startswith("unavailable")
    fleet.all[1].start()
    client = fleet.configure()["n2"]
    assert bool(slots_at(client)) == sealed
    assert rank.replicated(0, Version(1, 1), ["n2"]).nodes == ("n2",)
    view, slot = opened(slots_at(client)[Version(1, 1)])
    view.verify(slot)
