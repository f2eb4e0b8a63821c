"""A vault serves its peers despite foreign connections, a lack of threads or descriptors, or a removed directory."""

from __future__ import annotations

import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.errors import EverstepError
from everstep.ids import Version, split_address
from everstep.log_lines import BURST
from everstep.vocabulary import FindingKind
from everstep.wire.framing import encode_frame
from everstep.wire.v1.transfer import NONCE_BYTES, Greeting, InventoryList, InventoryRequest, Ready
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.reading import SlotFinder
from everstep_agent.vault.memory.segments import SegmentStore
from everstep_agent.vault.reporting import FindingReporter, VaultCounters
from everstep_agent.vault.settings import VaultSettings
from everstep_agent.vault.transfer.peer_server import MAX_UNAUTHENTICATED, PeerServer
from everstep_agent.vault.transfer.peers import PeerLossDetector
from everstep_agent.vault.transfer.receiving import SlotReceiver
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, RankMemory, VaultClient, Vaults, two_vaults
from tests.unit.agent.vault.transfer.test_vault_strangers import Wire, put


@pytest.fixture
def pair(program_forks: ForkPool) -> Iterator[Vaults]:
    with two_vaults(program_forks) as running:
        yield running


@pytest.mark.promise("strangers")
def test_silent_strangers_give_way_to_peers(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    client = fleet.configure()["n1"]
    wire = Wire(vault.address)
    silent = [socket.create_connection(split_address(vault.address)) for _ in range(MAX_UNAUTHENTICATED + 20)]
    try:
        for _ in range(2):
            channel = wire.proved()
            channel.send(InventoryRequest())
            assert channel.receive_answer(InventoryList).slots == ()
        silent[0].settimeout(30.0)
        while silent[0].recv(4096):
            pass
        until(lambda: _connections(client) <= MAX_UNAUTHENTICATED + 2, "those that gave way are gone")
    finally:
        wire.close()
        for connection in silent:
            connection.close()


def _connections(client: VaultClient) -> int:
    answer = client.statistics()
    return int(answer.gauges["peer_connections"])


def test_strangers_leave_few_and_short_lines_in_the_log(server: PeerServer, caplog: pytest.LogCaptureFixture) -> None:
    """A peer that offers thousands of protocol versions had all of them logged."""
    caplog.set_level(logging.INFO)
    offered = tuple(range(1000, 2000))
    greeting = Greeting(protocols=offered, job=JOB, node="n2", peer="n1", nonce=bytes(NONCE_BYTES))
    for _ in range(3 * BURST):
        with socket.create_connection(split_address(server.address), 30.0) as stranger:
            stranger.sendall(encode_frame(greeting))
            while stranger.recv(4096):
                pass
    lines = [record.getMessage() for record in caplog.records if "refused a request" in record.getMessage()]
    assert len(lines) == BURST
    assert max(map(len, lines)) < 300


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    book, tally, clock = JobTable(), VaultCounters(), ManualClock()
    store = SegmentStore(tmp_path, "n1", None)
    findings = FindingReporter("n1", clock, tally, lambda _: None)
    made = PeerServer(
        VaultSettings(node="n1", run_dir=tmp_path, segment_dir=tmp_path),
        SegmentAdoption(store),
        book,
        SlotFinder(store, findings),
        SlotReceiver(store, book, findings, tally),
        tally,
        PeerLossDetector("n1", book, clock, lambda _: None),
        clock,
    )
    made.start()
    yield made
    made.stop()


def test_unexpected_error_is_answered_to_the_requester(pair: Vaults) -> None:
    """A closed connection would look like a lost vault."""
    n1 = pair.all[0]
    (n1.segment_dir / JOB).write_text("a file where a folder should be")
    wire = Wire(n1.address)
    channel = wire.proved()
    channel.send(put(b"x"))
    with pytest.raises(EverstepError, match=r"Error: \[Errno"):
        channel.receive_answer(Ready)
    wire.close()
    assert pair.supervisors["n1"].statistics().refused == {"internal": 1}
    assert pair.supervisors["n1"].peers_lost == []


def test_removed_slot_directory_is_recreated_and_reported(pair: Vaults) -> None:
    n1, n2 = pair.all
    mine, theirs = RankMemory(n1.client(), rank=0), RankMemory(n2.client(), rank=1)
    theirs.fill(0, Version(1, 1), b"one")
    assert theirs.replicated(0, Version(1, 1), ["n1"]).nodes == ("n1",)
    mine.fill(0, Version(1, 1), b"mine")
    shutil.rmtree(n1.segment_dir)
    theirs.fill(1, Version(1, 2), b"two")
    assert theirs.replicated(1, Version(1, 2), ["n1"]).nodes == ("n1",)
    found = pair.supervisors["n1"].finding().finding.finding
    assert found.kind is FindingKind.SLOT_CORRUPT
    assert "RemoveIPC=no" in found.message
    again = RankMemory(mine.client, rank=0)
    assert again.path.exists()
    assert {header.version for _, header in again.view.sealed_slots()} == {Version(1, 1)}, (
        "carried over from what was mapped"
    )
    inventory = pair.supervisors["n1"].inventory()
    assert {(slot.rank, slot.version.step) for slot in inventory.slots} == {(0, 1), (1, 1), (1, 2)}


def test_connections_to_a_former_vault_address_are_closed(pair: Vaults) -> None:
    n1, n2 = pair.all
    rank = RankMemory(n1.client(), rank=0)
    client = pair.supervisors["n1"]
    for generation in range(1, 4):
        rank.fill(0, Version(generation, 1), b"x")
        assert rank.replicated(0, Version(generation, 1), ["n2"], generation=generation).nodes == ("n2",)
        assert _connections(client) == 1
        n2.kill()
        n2.start()
        client = pair.configure(generation=generation + 1)["n1"]
        assert _connections(client) == 0, "the one that there was led to another address"
