"""Start and end of a vault, the slots that it takes over from an earlier vault, and the limits of its memory."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.ids import Version
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import CHUNK_BYTES, SLOTS_PER_RANK, slot_bytes_for
from everstep.layout.vault_status import read_status
from everstep.wire.v1 import local
from everstep_agent.vault.process import OOM_SCORE_ADJUSTMENT, lower_oom_score
from everstep_trainer.launch.forking.process_setup import raise_oom_score
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import (
    JOB,
    RankMemory,
    VaultClient,
    Vaults,
    noise,
    process_gone,
    shared_memory_left,
    vault_settings,
    vaults,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet() -> Iterator[Vaults]:
    with vaults() as running:
        yield running


def versions(client: VaultClient) -> set[Version]:
    return {slot.version for slot in client.inventory().slots}


def start_refused(settings: str) -> str:
    """Return the error message of a vault that refuses to start."""
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
def test_absurd_segment_is_refused_and_leaves_nothing(fleet: Vaults, fields: dict[str, int], code: str) -> None:
    vault = fleet.start("n1")
    answer = vault.client().ask(
        local.OpenSegment, job=JOB, **({"local_rank": 0, "slot_bytes": 4096, "slots": SLOTS_PER_RANK} | fields)
    )
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == code
    assert [p for p in shared_memory_left(fleet) if "lock" not in p] == []


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
    (rank.path.parent / ".own-1").write_bytes(b"an unfinished draft")
    (rank.path.parent / "own-7").write_bytes(b"no segment")
    vault.start()
    client = vault.client()
    assert versions(client) == {Version(1, 1)}
    assert rank.view.header(1) is None
    assert sorted(p.name for p in rank.path.parent.iterdir()) == ["own-0"]
    again = RankMemory(client, rank=0)
    again.view.verify(0)


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
    until(lambda: process_gone(pid), "the vault to end as well")
    client.close()
    assert not segment_dir.exists()
    assert list(run_dir.iterdir()) == []


def test_unusable_segment_dir_is_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = start_refused(vault_settings("n1", tmp_path / "run", tmp_path / "file" / "n1"))
    assert message.splitlines() == [
        f"everstep vault: cannot use the directory {tmp_path}/file/n1: Not a directory; give another --segment-dir"
    ]


@pytest.mark.parametrize(
    ("options", "text"),
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
def test_unusable_settings_are_refused_with_advice(tmp_path: Path, options: list[str], text: str) -> None:
    assert text in start_refused(vault_settings("n1", tmp_path / "run", tmp_path / "segments", *options))


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
    until(lambda: client.statistics().refused.get("malformed") == 3, "all three are counted")


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


def test_vault_stays_as_long_as_a_rank_is_connected(fleet: Vaults) -> None:
    vault = fleet.start("n1", "--linger-s", "0.2", "--scrub-interval-s", "0")
    client = vault.client()
    RankMemory(client, rank=0).fill(0, Version(1, 1), b"x")
    until(lambda: (note := read_status(vault.segment_dir)) is not None and note.idle_since is None, "it says so")
    client.close()
    note = until(lambda: read_status(vault.segment_dir), "the vault to record that it is idle")
    assert note.pid == vault.process.pid
    assert vault.process.wait(60) == 0
    assert not vault.segment_dir.exists()
