"""The supervisor's side of the vault, with real vault processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.layout.vault_status import LOCK_FILE
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import local
from everstep.wire.v1.training import FindingRaised, PeerConnectionLost
from everstep_agent.config import AgentSettings
from everstep_agent.lifecycle import acquire_lock
from everstep_agent.vault import manager as vault_keeper
from everstep_agent.vault.manager import VaultManager
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until
from tests.support.vaults.slow_vault import HASHING_BLOCKED_BY
from tests.support.vaults.vault_process import RankMemory, VaultClient

pytestmark = pytest.mark.slow  # starts processes


class VaultDirectories:
    """Directories for the vaults of one test, and managers of them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.run_dir = base / "run"
        self.run_dir.mkdir(mode=0o700)
        self.findings: list[FindingRaised] = []
        self.peers_lost: list[PeerConnectionLost] = []
        self.changes = 0
        self.pids: set[int] = set()

    def new_manager(self, **settings: Any) -> VaultManager:
        def on_change() -> None:
            self.changes += 1

        chosen = AgentSettings.from_values(
            node="n1",
            controllers=("http://127.0.0.1:1",),
            run_dir=self.run_dir,
            segment_dir=self.base / "segments" / "n1",
            **settings,
        )
        return VaultManager(chosen, SYSTEM_CLOCK, self.findings.append, self.peers_lost.append, on_change)

    async def started(self, **settings: Any) -> VaultManager:
        keeper = self.new_manager(**settings)
        await keeper.start()
        self.pids.add(keeper.pid)
        return keeper


@pytest.fixture
def place() -> Iterator[VaultDirectories]:
    made = VaultDirectories(Path(tempfile.mkdtemp(prefix="ev-keeper-")))
    yield made
    for pid in made.pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(made.base)


def run_story(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_started_vault_is_left_and_taken_over_and_ended(place: VaultDirectories) -> None:
    async def story() -> None:
        first = await place.started()
        pid, address = first.pid, first.address
        first.detach()
        second = await place.started()
        assert (second.pid, second.address) == (pid, address)
        await second.stop()
        until(lambda: not is_running(pid), "the vault is gone")
        assert not (place.base / "segments").exists() or not list((place.base / "segments").rglob("*"))

    run_story(story())


def test_stop_removes_slots_even_of_a_lost_vault(place: VaultDirectories) -> None:
    async def story() -> None:
        keeper = await place.started()
        slots = place.base / "segments" / "n1" / "j" / "own-0"
        slots.parent.mkdir(parents=True)
        slots.write_bytes(b"slots")
        os.kill(keeper.pid, signal.SIGKILL)
        await keeper._read_until_closed()
        await keeper.stop()
        assert not slots.exists()

    run_story(story())


def test_job_that_ends_while_the_vault_is_down_leaves_no_slots(place: VaultDirectories) -> None:
    async def story() -> None:
        keeper = await place.started()
        slots = place.base / "segments" / "n1" / "j"
        slots.mkdir(parents=True)
        (slots / "own-0").write_bytes(b"slots")
        running = asyncio.create_task(keeper.run())
        await asyncio.sleep(0)
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.forget("j")
        try:
            async with asyncio.timeout(60):
                while slots.exists():
                    await asyncio.sleep(0.01)
                while keeper._forgotten:
                    await asyncio.sleep(0.01)
        finally:
            running.cancel()
            await asyncio.wait([running])
            place.pids.add(keeper.pid)
            await keeper.stop()

    run_story(story())


def test_starting_or_ending_vault_is_waited_for(place: VaultDirectories) -> None:
    """The temporary file may be that of an agent that was killed while it started a vault."""

    async def story() -> None:
        other = acquire_lock(place.run_dir / LOCK_FILE, "held")
        keeper = place.new_manager()
        starting = asyncio.create_task(keeper.start())
        await asyncio.wait([starting], timeout=1.0)
        assert not starting.done()
        os.close(other)
        await starting
        place.pids.add(keeper.pid)
        assert is_running(keeper.pid)
        await keeper.stop()

    run_story(story())


@pytest.mark.promise("vault-restart")
def test_slowly_adopting_vault_is_kept(place: VaultDirectories, monkeypatch: pytest.MonkeyPatch) -> None:
    """The vault hashes for longer than a vault may take to start."""
    command = vault_keeper.vault_command
    held = place.base / "held"
    held.touch()

    def slow(settings: AgentSettings, listen: str) -> list[str]:
        return [
            "tests.support.vaults.slow_vault" if word == "everstep_agent.vault.process" else word
            for word in command(settings, listen)
        ]

    async def story() -> None:
        keeper = await place.started()
        client = VaultClient(place.run_dir / "vault.sock")
        RankMemory(client, rank=0).fill(0, Version(1, 9), b"kept")
        client.close()
        os.kill(keeper.pid, signal.SIGKILL)
        await keeper._read_until_closed()
        monkeypatch.setenv(HASHING_BLOCKED_BY, str(held))
        monkeypatch.setattr(vault_keeper, "vault_command", slow)
        await keeper.start()
        place.pids.add(keeper.pid)
        serving = asyncio.create_task(keeper.run())
        assert await sealed_slots(keeper) == 0
        held.unlink()
        while not await sealed_slots(keeper):
            await asyncio.sleep(0.01)
        assert keeper.restarts == 0
        serving.cancel()
        await keeper.stop()

    async def sealed_slots(keeper: VaultManager) -> float:
        statistics = await keeper.statistics(20.0)
        assert statistics is not None
        return statistics.gauges["sealed_slots"]

    run_story(asyncio.wait_for(story(), 60.0))


def test_vault_never_serving_is_reported(place: VaultDirectories, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_keeper, "READY_TIMEOUT_S", 0.5)

    async def story() -> None:
        other = acquire_lock(place.run_dir / LOCK_FILE, "held")
        with pytest.raises(Unavailable, match=r"another vault has locked .* but does not answer"):
            await place.new_manager().start()
        os.close(other)

    run_story(story())


def test_vault_start_failure_is_an_error_with_its_status(place: VaultDirectories) -> None:
    async def story() -> None:
        (place.base / "segments").write_text("a file where a directory should be")
        with pytest.raises(Unavailable, match="ended with status"):
            await place.new_manager().start()

    run_story(story())


def test_vault_obeys_the_memory_limit_of_agent_settings(place: VaultDirectories) -> None:
    async def story() -> None:
        keeper = await place.started(vault_memory_limit_bytes=1 << 20)
        rank = VaultClient(place.run_dir / "vault.sock")
        try:
            answer = rank.ask(local.OpenSegment, job="j", local_rank=0, slot_bytes=1 << 20, slots=SLOTS_PER_RANK)
        finally:
            rank.close()
        assert isinstance(answer, local.RequestFailed), answer
        assert answer.code == "slot_memory"
        assert f"memory limit {1 << 20}" in answer.message
        await keeper.stop()

    run_story(story())
