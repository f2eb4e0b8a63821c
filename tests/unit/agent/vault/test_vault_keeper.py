"""The supervisor's side of the vault, with real vault processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep_agent.config import AgentSettings
from everstep_agent.lifecycle import acquire_lock
from everstep_agent.vault import manager as vault_keeper
from everstep_agent.vault.manager import VaultManager

from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.layout.vault_status import LOCK_FILE
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import local
from everstep.wire.v1.training import FindingRaised, PeerConnectionLost
from tests.support.held_vault import HELD
from tests.support.processes import is_running
from tests.support.vaults import RankMemory, VaultClient
from tests.support.waiting import until

pytestmark = pytest.mark.slow  # starts processes


class Place:
    """Directories for the vaults of one test, and keepers over them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.run_dir = base / "run"
        self.run_dir.mkdir(mode=0o700)
        self.findings: list[FindingRaised] = []
        self.peers_lost: list[PeerConnectionLost] = []
        self.changes = 0
        self.pids: set[int] = set()

    def keeper(self, **settings: Any) -> VaultManager:
        def on_change() -> None:
            self.changes += 1

        chosen = AgentSettings(
            node="n1",
            controllers=("http://127.0.0.1:1",),
            run_dir=self.run_dir,
            segment_dir=self.base / "segments" / "n1",
            **settings,
        )
        return VaultManager(chosen, SYSTEM_CLOCK, self.findings.append, self.peers_lost.append, on_change)

    async def started(self, **settings: Any) -> VaultManager:
        keeper = self.keeper(**settings)
        await keeper.start()
        self.pids.add(keeper.pid)
        return keeper


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place(Path(tempfile.mkdtemp(prefix="ev-keeper-")))
    yield made
    for pid in made.pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(made.base)


def play(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_a_started_vault_is_left_and_taken_over_and_ended(place: Place) -> None:
    async def story() -> None:
        first = await place.started()
        pid, address = first.pid, first.address
        first.detach()
        second = await place.started()
        assert (second.pid, second.address) == (pid, address)
        await second.stop()
        until(lambda: not is_running(pid), "the vault is gone")
        assert not (place.base / "segments").exists() or not list((place.base / "segments").rglob("*"))

    play(story())


def test_stop_removes_slots_even_of_a_lost_vault(place: Place) -> None:
    async def story() -> None:
        keeper = await place.started()
        slots = place.base / "segments" / "n1" / "j" / "own-0"
        slots.parent.mkdir(parents=True)
        slots.write_bytes(b"slots")
        os.kill(keeper.pid, signal.SIGKILL)
        await keeper._read_until_closed()
        await keeper.stop()
        assert not slots.exists()

    play(story())


def test_stop_keeps_slots_of_a_vault_never_started(place: Place) -> None:
    async def story() -> None:
        slots = place.base / "segments" / "n1" / "j" / "own-0"
        slots.parent.mkdir(parents=True)
        slots.write_bytes(b"slots")
        await place.keeper().stop()
        assert slots.exists()

    play(story())


def test_starting_or_ending_vault_is_waited_for(place: Place) -> None:
    """That of an agent that was killed while it started one, say."""

    async def story() -> None:
        other = acquire_lock(place.run_dir / LOCK_FILE, "held")
        keeper = place.keeper()
        starting = asyncio.create_task(keeper.start())
        await asyncio.wait([starting], timeout=1.0)
        assert not starting.done()
        os.close(other)
        await starting
        place.pids.add(keeper.pid)
        assert is_running(keeper.pid)
        await keeper.stop()

    play(story())


@pytest.mark.promise("vault-restart")
def test_slowly_adopting_vault_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hashes for ever, longer than a vault is given to begin."""
    command = vault_keeper.vault_command
    held = place.base / "held"
    held.touch()

    def slow(settings: AgentSettings, listen: str) -> list[str]:
        return [
            "tests.support.held_vault" if word == "everstep_agent.vault.process" else word
            for word in command(settings, listen)
        ]

    async def story() -> None:
        keeper = await place.started()
        client = VaultClient(place.run_dir / "vault.sock")
        RankMemory(client, rank=0).fill(0, Version(1, 9), b"kept")
        client.close()
        os.kill(keeper.pid, signal.SIGKILL)
        await keeper._read_until_closed()
        monkeypatch.setenv(HELD, str(held))
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

    play(asyncio.wait_for(story(), 60.0))


def test_vault_never_serving_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault_keeper, "READY_TIMEOUT_S", 0.5)

    async def story() -> None:
        other = acquire_lock(place.run_dir / LOCK_FILE, "held")
        with pytest.raises(Unavailable, match=r"another vault has locked .* but does not answer"):
            await place.keeper().start()
        os.close(other)

    play(story())


def test_cancelled_start_leaves_no_vault(place: Place) -> None:
    async def story() -> None:
        keeper = place.keeper()
        starting = asyncio.create_task(keeper.start())
        while keeper._child is None:
            await asyncio.sleep(0)
        pid = keeper._child.pid
        starting.cancel()
        await asyncio.wait([starting])
        assert not is_running(pid)

    play(story())


def test_ready_file_of_a_non_listening_process_is_ignored(place: Place) -> None:
    async def story() -> None:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.bind(str(place.run_dir / "vault.sock"))
            stranger.listen()
            (place.run_dir / "vault.json").write_text(json.dumps({"pid": os.getppid(), "address": "127.0.0.1:1"}))
            keeper = await place.started()
            assert keeper.pid not in (os.getpid(), os.getppid())
            await keeper.stop()

    play(story())


@pytest.mark.parametrize("content", ["", "{", '{"pid": "x"}', "\xff", '{"x":' + "[" * 100_000])
def test_damaged_ready_file_is_ignored(place: Place, content: str) -> None:
    async def story() -> None:
        (place.run_dir / "vault.json").write_text(content, encoding="latin-1")
        keeper = await place.started()
        await keeper.stop()

    play(story())


def test_working_directory_shadows_no_vault_import(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.base / "xxhash.py").write_text("raise SystemExit('shadowed')")
    monkeypatch.chdir(place.base)

    async def story() -> None:
        keeper = await place.started()
        await keeper.stop()

    play(story())


def test_vault_start_failure_is_an_error_with_its_status(place: Place) -> None:
    async def story() -> None:
        (place.base / "segments").write_text("a file where a directory should be")
        with pytest.raises(Unavailable, match="ended with status"):
            await place.keeper().start()

    play(story())


def test_statistics_are_none_without_a_serving_vault(place: Place) -> None:
    async def story() -> None:
        keeper = await place.started()
        serving = asyncio.create_task(keeper.run())
        statistics = await keeper.statistics(20.0)
        assert statistics is not None
        assert "sealed_slots" in statistics.gauges
        serving.cancel()
        await keeper.stop()
        assert await keeper.statistics(0.01) is None

    play(story())


def test_vault_obeys_the_memory_limit_of_agent_settings(place: Place) -> None:
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

    play(story())


def test_vault_ignoring_sigterm_is_killed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_agent.vault.manager.EXIT_TIMEOUT_S", 0.2)

    async def story() -> None:
        keeper = await place.started()
        os.kill(keeper.pid, signal.SIGSTOP)
        await keeper.stop()
        until(lambda: not is_running(keeper.pid), "the vault is gone")

    play(story())
