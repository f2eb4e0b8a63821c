"""How a vault begins and ends, what it keeps of an earlier one, and what it has no room for."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep_agent.vault.process import OOM_SCORE_ADJUSTMENT, lower_oom_score
from everstep_trainer.launch.forking.process_setup import raise_oom_score

from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, SLOTS_PER_RANK, SlotState, slot_bytes_for
from everstep.layout.vault_status import read_status
from everstep.wire.v1 import local
from tests.support.forked import ForkPool
from tests.support.vaults import (
    JOB,
    RankMemory,
    VaultClient,
    Vaults,
    noise,
    process_gone,
    shared_memory_left,
    until,
    vault_settings,
    vaults,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet() -> Iterator[Vaults]:
    with vaults() as running:
        yield running


def versions(client: VaultClient) -> set[Version]:
    answer = client.ask(local.Inventory, job=JOB)
    assert isinstance(answer, local.InventoryAnswer)
    return {slot.version for slot in answer.slots}


def start_refused(settings: str) -> str:
    """The error message of a vault that does not start."""
    command = [sys.executable, "-m", "everstep_agent.vault.process", settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    return ended.stderr


def test_segment_is_private_and_fully_allocated(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0, slot_bytes=100_000)
    found = rank.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_blocks * 512 >= found.st_size
    assert rank.view.slots == 5
    assert rank.view.slot_bytes == 102_400
    assert stat.S_IMODE(vault.segment_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((vault.run_dir / "vault.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((vault.run_dir / "vault.json").stat().st_mode) == 0o600


def test_segment_is_requested_near_the_rank_numa_node(fleet: Vaults, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a machine with one node all that can be seen is that another one is refused, and done without."""
    vault = fleet.start("n1")
    said = {"job": JOB, "local_rank": 0, "slot_bytes": 4096, "slots": SLOTS_PER_RANK}
    assert isinstance(vault.client().ask(local.OpenSegment, **said, numa_node=1000), local.SegmentOpened)
    assert "slots are not bound to NUMA node 1000" in capfd.readouterr().err


def test_restarted_rank_finds_its_slots(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    before = RankMemory(vault.client(), rank=0)
    before.fill(2, Version(1, 9), b"kept")
    after = RankMemory(vault.client(), rank=0)
    assert after.path == before.path
    after.view.verify(2)
    assert after.view.payload(2) == b"kept"


def test_growing_segment_carries_its_good_slots(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    small = RankMemory(vault.client(), rank=0, slot_bytes=8192)
    small.fill(0, Version(1, 1), b"good")
    small.fill(1, Version(1, 2), b"bad")
    small.view.payload(1)[0] ^= 1
    small.view.begin(2, 0, Version(1, 3), b"", 10)
    large = RankMemory(vault.client(), rank=0, slot_bytes=1 << 20)
    assert large.view.slot_bytes == 1 << 20
    assert [(slot, header.version) for slot, header in large.view.sealed_slots()] == [(0, Version(1, 1))]
    large.view.verify(0)
    assert sorted(p.name for p in large.path.parent.iterdir()) == ["own-0"]


@pytest.mark.promise("finished-step-survives")
def test_fully_copied_slot_of_a_dead_rank_is_sealed(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0)
    rank.fill(0, Version(1, 1), b"sealed")
    rank.copy(1, Version(1, 2), noise(900_000))
    rank.view.begin(2, 0, Version(1, 3), b"", 10)
    assert versions(vault.client()) == {Version(1, 1), Version(1, 2)}
    rank.view.verify(1)
    assert rank.view.header(2).state is SlotState.FILLING  # type: ignore[union-attr]


def test_copied_slot_survives_segment_growth_and_vault_restart(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0, slot_bytes=8192)
    rank.copy(0, Version(1, 1), b"whole")
    RankMemory(vault.client(), rank=0, slot_bytes=1 << 20).copy(3, Version(1, 2), b"as well")
    vault.kill()
    vault.start()
    assert versions(vault.client()) == {Version(1, 1), Version(1, 2)}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"slot_bytes": 0}, "configuration"),
        ({"slot_bytes": 1 << 60}, "configuration"),
        ({"slots": 1000}, "configuration"),
        ({"local_rank": -1}, "configuration"),
        ({"slot_bytes": 1 << 46}, "slot_memory"),
    ],
)
def test_an_absurd_segment_is_refused_and_leaves_nothing(fleet: Vaults, fields: dict[str, int], code: str) -> None:
    vault = fleet.start("n1")
    answer = vault.client().ask(
        local.OpenSegment, job=JOB, **({"local_rank": 0, "slot_bytes": 4096, "slots": SLOTS_PER_RANK} | fields)
    )
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == code
    assert [p for p in shared_memory_left(fleet) if "lock" not in p] == []


def test_request_over_the_limit_is_refused_with_arithmetic(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--memory-limit", str(10 << 20), "--scrub-interval-s", "0")
    client = vault.client()
    first = client.ask(local.OpenSegment, job=JOB, local_rank=0, slot_bytes=1 << 20, slots=SLOTS_PER_RANK)
    assert isinstance(first, local.SegmentOpened)
    second = client.ask(local.OpenSegment, job=JOB, local_rank=1, slot_bytes=2 << 20, slots=SLOTS_PER_RANK)
    assert isinstance(second, local.RequestFailed)
    assert second.code == "slot_memory"
    assert "5 slots of 2097152 bytes for job/own-1 needs 10514432 bytes; 5271552 of the memory limit 10485760" in (
        second.message
    )
    assert isinstance(
        client.ask(local.OpenSegment, job=JOB, local_rank=1, slot_bytes=4096, slots=SLOTS_PER_RANK), local.SegmentOpened
    )
    assert client.ask(local.Statistics).refused == {"slot_memory": 1}


def test_a_peer_without_room_refuses_the_copy_and_serves_on(fleet: Vaults) -> None:
    fleet.start("n1"), fleet.start("n2", "--memory-limit", str(1 << 20), "--scrub-interval-s", "0")
    clients = fleet.configure()
    rank = RankMemory(fleet.all[0].client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    assert rank.sealed(0, Version(1, 1), ["n2"]).failed["n2"].startswith("slot_memory: n2: 5 slots of 1048576 bytes")
    assert versions(clients["n2"]) == set()


@pytest.fixture
def tiny_tmpfs(fleet: Vaults) -> Iterator[Path]:
    """A memory file system of 4 MiB at the segment directory of node ``tiny``."""
    place = fleet.segments / "tiny"
    place.mkdir(mode=0o700)
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m,mode=0700", "none", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this system does not let us mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    for vault in fleet.all:
        vault.close()
    subprocess.run(["umount", "-l", place], check=True)


def test_full_file_system_is_an_error_with_the_arithmetic(fleet: Vaults, tiny_tmpfs: Path) -> None:
    vault = fleet.start("tiny")
    client = vault.client()
    refused = client.ask(local.OpenSegment, job=JOB, local_rank=0, slot_bytes=1 << 20, slots=SLOTS_PER_RANK)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "slot_memory"
    assert str(tiny_tmpfs) in refused.message
    rank = RankMemory(client, rank=0, slot_bytes=1 << 18)  # half of the 4 MiB stays free
    for slot in range(4):
        rank.fill(slot, Version(1, slot), noise(250_000))
    assert len(versions(client)) == 4


def test_restarted_vault_keeps_only_slots_with_valid_digests(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0, slot_bytes=slot_bytes_for(64, CHUNK_BYTES + 5))
    rank.fill(0, Version(1, 1), noise(CHUNK_BYTES + 5))
    rank.fill(1, Version(1, 2), b"rotten")
    rank.view.payload(1)[2] ^= 8
    rank.view.begin(2, 0, Version(1, 3), b"", 10)
    vault.kill()
    (rank.path.parent / ".own-1").write_bytes(b"a draft that was never finished")
    (rank.path.parent / "own-7").write_bytes(b"no segment")
    vault.start()
    client = vault.client()
    assert versions(client) == {Version(1, 1)}
    assert rank.view.header(1) is None
    assert sorted(p.name for p in rank.path.parent.iterdir()) == ["own-0"]
    again = RankMemory(client, rank=0)
    again.view.verify(0)


def test_rank_finishes_a_fill_across_a_vault_restart(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0)
    payload = rank.view.begin(0, 0, Version(1, 1), b"", 1000)
    vault.kill()
    vault.start()
    payload[:] = b"x" * 1000
    rank.view.seal(0)
    client = vault.client()
    assert versions(client) == {Version(1, 1)}


def test_scratch_file_of_a_living_rank_survives_the_vault(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    rank = RankMemory(vault.client(), rank=0)
    scratch = rank.path.parent / "scratch-0"
    scratch.write_bytes(b"mine")
    vault.kill()
    vault.start()
    assert scratch.read_bytes() == b"mine"


def test_forgotten_job_leaves_no_file(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    supervisor = fleet.configure()["n1"]
    rank = RankMemory(vault.client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    assert isinstance(supervisor.ask(local.ForgetJob, job=JOB), local.RequestDone)
    assert not rank.path.parent.exists()
    assert versions(supervisor) == set()
    assert rank.view.payload(0) == b"x"
    assert rank.sealed(0, Version(1, 1), []).code == "not_found"


def test_rank_of_a_forgotten_job_gets_no_segment(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    fleet.configure()["n1"].ask(local.ForgetJob, job=JOB)
    refused = vault.client().ask(local.OpenSegment, job=JOB, local_rank=0, slot_bytes=100_000, slots=SLOTS_PER_RANK)
    assert isinstance(refused, local.RequestFailed)
    assert refused.code == "not_found"
    assert [p for p in shared_memory_left(fleet) if "lock" not in p] == []
    fleet.configure()
    RankMemory(vault.client(), rank=0, slot_bytes=100_000)


def test_orderly_end_leaves_only_the_slots(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    fleet.configure()
    rank = RankMemory(vault.client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    assert vault.end() == 0
    assert [Path(p).name for p in shared_memory_left(fleet)] == [".vault.lock", "own-0"]
    assert list(vault.run_dir.iterdir()) == []
    vault.start()
    assert versions(vault.client()) == {Version(1, 1)}


def test_an_orderly_end_without_jobs_leaves_nothing_at_all(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    assert vault.end() == 0
    assert not vault.segment_dir.exists()
    assert list(vault.run_dir.iterdir()) == []


def test_an_orderly_end_with_the_parent_leaves_nothing_at_all(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--die-with-parent", "true")
    fleet.configure()
    RankMemory(vault.client(), rank=0).fill(0, Version(1, 1), b"x")
    assert vault.end() == 0
    assert not vault.segment_dir.exists()
    assert list(vault.run_dir.iterdir()) == []


def test_vault_with_a_killed_parent_ends_and_cleans_up(fleet: Vaults) -> None:
    run_dir, segment_dir = fleet.base / "n1", fleet.segments / "n1"
    settings = vault_settings("n1", run_dir, segment_dir, "--die-with-parent", "true")
    command = [sys.executable, "-m", "everstep_agent.vault.process", settings]
    program = f"import subprocess; subprocess.Popen({command!r}).wait()"
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        until((run_dir / "vault.json").exists, "the vault serves")
        client = VaultClient(run_dir / "vault.sock")
        RankMemory(client, rank=0)
        pid = int((run_dir / "vault.json").read_text().split('"pid":')[1].split(",")[0])
    finally:
        parent.kill()
        parent.wait()
    until(lambda: process_gone(pid), "the vault is gone too")
    client.close()
    assert not segment_dir.exists()
    assert list(run_dir.iterdir()) == []


def test_two_vaults_cannot_share_a_directory(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    other = fleet.base / "other"
    said = start_refused(vault_settings("n1", other, vault.segment_dir))
    assert f"another vault uses {vault.segment_dir}" in said
    said = start_refused(vault_settings("n1", vault.run_dir, other))
    assert f"another vault uses {vault.run_dir}" in said
    assert versions(vault.client()) == set()


def test_unusable_segment_dir_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = start_refused(vault_settings("n1", tmp_path / "run", tmp_path / "file" / "n1"))
    assert said.splitlines() == [
        f"everstep vault: cannot use the directory {tmp_path}/file/n1: Not a directory; give another --segment-dir"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--node", "a/b"], "at `$.node`"),
        (["--listen", "0.0.0.0:0"], "use the address by which they reach this node"),
        (["--listen", "nowhere"], "is not host:port"),
        (["--memory-limit", "-1"], "at `$.memory_limit`"),
        (["--run-dir", "/tmp/" + "x" * 120], "use a shorter --run-dir"),
        (["--streams", "99"], "at `$.streams`"),
        (["--linger-s", "0"], "at `$.linger_s`"),
    ],
)
def test_unusable_settings_are_refused_with_advice(tmp_path: Path, options: list[str], words: str) -> None:
    assert words in start_refused(vault_settings("n1", tmp_path / "run", tmp_path / "segments", *options))


def test_interrupt_ends_the_vault_in_order(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--die-with-parent", "true")
    vault.process.send_signal(signal.SIGINT)
    assert vault.process.wait(60) == 0
    assert not vault.segment_dir.exists()


def test_malformed_frame_ends_only_its_connection(fleet: Vaults) -> None:
    vault = fleet.start("n1")
    for junk in (b"\x00\x00\x00\x04junk", b"\xff\xff\xff\xff", b"\x00\x00\x00\x09half"):
        client = vault.client()
        client.raw(junk)
        if junk.endswith(b"half"):
            client.close()
            continue
        failed = client.wait(0)
        assert isinstance(failed, local.RequestFailed)
        assert failed.code == "malformed"
        assert client.closed()
    client = vault.client()
    until(lambda: client.ask(local.Statistics).refused.get("malformed") == 3, "all three are counted")


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_oom_killer_prefers_ranks_over_the_vault(fleet: Vaults, forks: ForkPool) -> None:
    vault = fleet.start("n1")
    before, may, after = forks.start(spared).result()
    assert after == (OOM_SCORE_ADJUSTMENT if may else before)
    assert oom_score(vault.process.pid) == after < forks.start(stepped_forward).result()


def spared() -> tuple[int, bool, int]:
    before = oom_score(os.getpid())
    return before, lower_oom_score(), oom_score(os.getpid())


def stepped_forward() -> int:
    raise_oom_score()
    return oom_score(os.getpid())


def test_unused_vault_ends_and_frees_its_slots(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--linger-s", "0.2", "--scrub-interval-s", "0")
    rank = RankMemory(vault.client(), rank=0)
    rank.fill(0, Version(1, 1), b"x")
    vault.process.kill()
    vault.process.wait()
    vault.start()  # over the slots of the one before, and nobody connects
    assert vault.process.wait(60) == 0
    assert not vault.segment_dir.exists()
    assert list(vault.run_dir.iterdir()) == []


def test_a_vault_stays_as_long_as_a_rank_is_connected(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--linger-s", "0.2", "--scrub-interval-s", "0")
    client = vault.client()
    RankMemory(client, rank=0).fill(0, Version(1, 1), b"x")
    until(lambda: (note := read_status(vault.segment_dir)) is not None and note.idle_since is None, "it says so")
    client.close()
    note = until(lambda: read_status(vault.segment_dir), "it says that nobody is there")
    assert note.pid == vault.process.pid
    assert vault.process.wait(60) == 0
    assert not vault.segment_dir.exists()
