"""Start a vault: ``python -m everstep_agent.vault.process --node N --run-dir D --segment-dir S``.

When it serves, ``D/vault.json`` says {"pid", "address"}. SIGTERM and SIGINT end it in order: with --die-with-parent all
segments are unlinked; without, they stay for the next vault of this node, unless no job is here. With --linger it ends
by itself, and unlinks all, after so many seconds without a connection.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.layout.vault_status import LOCK_FILE, VaultStatusFile, write_status
from everstep.parent_process import die_with_parent
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.lifecycle import acquire_lock, log_to_stderr, private_directory, write_atomically
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.segments import SegmentStore
from everstep_agent.vault.service import Vault
from everstep_agent.vault.settings import VaultSettings

# How long an unused vault stays, and how the kernel ranks it when memory is short.

CHECK_INTERVAL_S = 0.5
"""Seconds between checks; a small part of any sensible linger."""

OOM_SCORE_ADJUSTMENT = -800
"""Far behind every rank, but not exempt: a kernel that may kill no process at all would have to panic."""


class IdleExitTimer:
    """Measure how long no client has been connected to a vault.

    Args:
        clients: The connected supervisors and ranks.
        linger_s: Seconds the vault stays without clients; None for no limit.
        note: The vault's note; ``write_status`` stores it.
    """

    def __init__(
        self,
        clients: Collection[object],
        linger_s: float | None,
        clock: Clock,
        note: VaultStatusFile,
        write_status: Callable[[VaultStatusFile], None],
    ) -> None:
        self._clients = clients
        self._linger_s = linger_s
        self._clock = clock
        self._note = note
        self._write_status = write_status

    async def wait(self) -> None:
        """Return once no client was connected for ``linger_s``."""
        alone_since: float | None = self._note_idle()
        while self._linger_s is None or alone_since is None or self._clock.monotonic() - alone_since < self._linger_s:
            await asyncio.sleep(
                CHECK_INTERVAL_S if self._linger_s is None else min(CHECK_INTERVAL_S, self._linger_s / 4)
            )
            if self._clients:
                if alone_since is not None:
                    self._try_write_status(self._note)
                alone_since = None
            elif alone_since is None:
                alone_since = self._note_idle()
        log.warning("nobody came for %g s: ending, and freeing all slots", self._linger_s)

    def _note_idle(self) -> float:
        now = self._clock.wall()
        ends_at = None if self._linger_s is None else now + self._linger_s
        self._try_write_status(msgspec.structs.replace(self._note, idle_since=now, ends_at=ends_at))
        return self._clock.monotonic()

    def _try_write_status(self, note: VaultStatusFile) -> None:
        try:
            self._write_status(note)
        except OSError as error:  # the memory file system is full: the slots matter, the note does not
            log.warning("what this vault says of itself could not be written: %s", error)


def lower_oom_score() -> bool:
    """Ask the kernel to kill ranks, which are replaced, before this process. Returns False if not permitted.

    Ranks raise their own score (``everstep_trainer.launch.process_setup``), which needs no permission.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT))
    except PermissionError:
        return False
    return True


log = logging.getLogger("everstep_agent.vault")


def parse_arguments(arguments: Sequence[str] | None = None) -> VaultSettings:
    """Return the validated settings of a command line.

    Raises ConfigurationError; argparse exits the process on unknown options.
    """
    parser = argparse.ArgumentParser(
        prog="python -m everstep_agent.vault.process", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--node", required=True, help="this node's name in the fleet")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory for vault.sock and vault.json")
    parser.add_argument("--segment-dir", type=Path, required=True, help="directory on a memory file system for slots")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port for other vaults; port 0 takes a free one")
    parser.add_argument("--memory-limit", type=int, help="bytes that all slots may take; the file system's by default")
    parser.add_argument("--die-with-parent", action="store_true", help="end, and unlink everything, with the parent")
    parser.add_argument("--linger", type=float, help="seconds to stay with nobody connected; for ever by default")
    parser.add_argument("--scrub-interval", type=float, default=1.0, help="seconds between rounds of hashing; 0: none")
    parser.add_argument("--streams", type=int, default=2, help="connections that carry one large payload")
    parser.add_argument("--send-rate", type=float, help="bytes a second to all other vaults; no bound by default")
    parser.add_argument("--log-format", default="text", choices=("text", "json"), help="json: one object a line")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    given = parser.parse_args(arguments)
    log_to_stderr(given.log_format, given.log_level)
    return VaultSettings(
        node=given.node,
        run_dir=given.run_dir.absolute(),
        segment_dir=given.segment_dir.absolute(),
        listen=given.listen,
        memory_limit=given.memory_limit,
        die_with_parent=given.die_with_parent,
        linger_s=given.linger,
        scrub_interval_s=given.scrub_interval,
        streams=given.streams,
        send_bytes_per_s=given.send_rate,
    ).validate()


def lock_directory(directory: Path) -> int:
    """Lock a directory for this vault. Raises ConfigurationError if another vault or user has it."""
    refusal = f"another vault lives in {directory}; stop it, or give another directory"
    return acquire_lock(private_directory(directory) / LOCK_FILE, refusal)


async def serve(settings: VaultSettings, parent: int) -> None:
    """Run a vault until SIGTERM or SIGINT, the end of ``parent`` (``die_with_parent``), or the end of ``linger_s``."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if settings.die_with_parent:
        die_with_parent(parent)
    lower_oom_score()
    held = [lock_directory(settings.run_dir), lock_directory(settings.segment_dir)]
    store = SegmentStore(settings.segment_dir, settings.node, settings.memory_limit)
    adoption = SegmentAdoption(store)
    found = await asyncio.to_thread(adoption.adopt_segments)
    vault = Vault(settings, store, adoption, SYSTEM_CLOCK)
    note = VaultStatusFile(pid=os.getpid(), run_dir=str(settings.run_dir))
    linger = IdleExitTimer(vault.clients, settings.linger_s, SYSTEM_CLOCK, note, partial(write_status, held[1]))
    waits: list[asyncio.Task[object]] = []
    alone = False
    try:
        await vault.start()
        write_atomically(settings.ready_file, {"pid": os.getpid(), "address": vault.peer_server.address})
        context = {"node": settings.node}
        log.info("serving at %s, %d sealed slots are to be checked", vault.peer_server.address, found, extra=context)
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(linger.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        alone = waits[1].done() and not stop.is_set()
    finally:
        for wait in waits:
            wait.cancel()
        await vault.stop()
        _clean_up(settings, store, keep=vault.has_jobs and not settings.die_with_parent and not alone)
        for lock in held:
            os.close(lock)


def _clean_up(settings: VaultSettings, store: SegmentStore, keep: bool) -> None:
    settings.ready_file.unlink(missing_ok=True)
    (settings.run_dir / LOCK_FILE).unlink(missing_ok=True)
    if keep:
        log.info("%d jobs' slots stay in %s", len(store.jobs()), settings.segment_dir, extra={"node": settings.node})
        return
    store.delete_all()
    _remove_if_empty(settings.segment_dir.parent)


def _remove_if_empty(directory: Path) -> None:
    """Remove the user's own directory above those of the nodes, once the last vault is gone."""
    if not directory.name.startswith("everstep-"):
        return
    try:
        directory.rmdir()
    except OSError:
        pass  # another node's vault is still there


def main() -> None:
    parent = os.getppid()
    try:
        asyncio.run(serve(parse_arguments(), parent))
    except ConfigurationError as error:
        raise SystemExit(f"everstep vault: {error}") from error


if __name__ == "__main__":
    main()
