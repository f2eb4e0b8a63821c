"""Run a vault: ``python -m everstep_agent.vault.process SETTINGS``, with the ``VaultSettings`` as a JSON object.

Once the vault serves, ``vault.json`` in its run directory holds {"pid", "address"}. SIGTERM and SIGINT end it in order.
With ``die_with_parent`` it then unlinks all segments. Otherwise they stay for the next vault of this node, unless no
job is here. With ``linger_s`` it ends by itself, and unlinks all, after so many seconds without a connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import msgspec

from everstep.errors import EverstepError, Unavailable
from everstep.host.parent_process import die_with_parent
from everstep.host.private_files import private_directory
from everstep.layout.vault_status import LOCK_FILE, VaultStatusFile, write_status
from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.lifecycle import acquire_lock, log_to_stderr, write_atomically
from everstep_agent.vault.memory.adoption import SegmentAdoption
from everstep_agent.vault.memory.segments import SegmentStore
from everstep_agent.vault.service import Vault
from everstep_agent.vault.settings import VaultSettings, decode_settings

# How long an unused vault stays, and how the kernel ranks it when memory is short.

CHECK_INTERVAL_S = 0.5  # seconds between checks; a small part of any sensible linger
OOM_SCORE_ADJUSTMENT = -800
"""Far behind every rank, but not exempt: a kernel that may kill no process at all would have to panic."""


async def wait_for_idle(
    clients: Collection[object], linger_s: float | None, note: VaultStatusFile, write: Callable[[VaultStatusFile], None]
) -> None:
    """Return once no client was connected for ``linger_s`` (None: never); ``write`` the status file's ``note``."""
    interval_s = CHECK_INTERVAL_S if linger_s is None else min(CHECK_INTERVAL_S, linger_s / 4)
    was_idle: bool | None = None
    since = SYSTEM_CLOCK.monotonic()
    while True:
        is_idle = not clients
        if is_idle != was_idle:
            was_idle, since, now = is_idle, SYSTEM_CLOCK.monotonic(), SYSTEM_CLOCK.wall()
            ends_at = None if linger_s is None else now + linger_s
            try:
                write(msgspec.structs.replace(note, idle_since=now, ends_at=ends_at) if is_idle else note)
            except OSError as error:  # the memory file system is full: the slots matter, the note does not
                log.warning("the vault's status file could not be written: %s", error)
        elif is_idle and linger_s is not None and SYSTEM_CLOCK.monotonic() - since >= linger_s:
            break
        await asyncio.sleep(interval_s)
    log.warning("no client for %g s: exiting and freeing all slots", linger_s)


def lower_oom_score() -> bool:
    """Ask the kernel to kill ranks, which are replaced, before this process. Returns False if not permitted."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJUSTMENT))
    except PermissionError:
        return False
    return True


log = logging.getLogger("everstep_agent.vault")


def lock_directory(directory: Path, flag: str) -> int:
    """Lock a directory for this vault. Raises ConfigurationError if another vault or user has it, Unavailable if it
    cannot be written; the message names the setting ``flag``."""
    refusal = f"another vault uses {directory}; stop it, or give another {flag}"
    try:
        return acquire_lock(private_directory(directory, flag) / LOCK_FILE, refusal)
    except OSError as error:
        raise Unavailable(f"cannot write to {directory}: {error.strerror}; give another {flag}") from error


async def serve(settings: VaultSettings, parent: int) -> None:
    """Run a vault until SIGTERM or SIGINT, the end of ``parent`` (``die_with_parent``), or the end of ``linger_s``."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    if settings.die_with_parent:
        die_with_parent(parent)
    lower_oom_score()
    locks = [lock_directory(settings.run_dir, "--run-dir"), lock_directory(settings.segment_dir, "--segment-dir")]
    store = SegmentStore(settings.segment_dir, settings.node, settings.memory_limit)
    adoption = SegmentAdoption(store)
    found = await asyncio.to_thread(adoption.adopt_segments)
    vault = Vault(settings, store, adoption, SYSTEM_CLOCK)
    note = VaultStatusFile(pid=os.getpid(), run_dir=str(settings.run_dir))
    wait_idle = partial(wait_for_idle, vault.clients, settings.linger_s, note, partial(write_status, locks[1]))
    waits: list[asyncio.Task[object]] = []
    alone = False
    try:
        await vault.start()
        write_atomically(settings.ready_file, {"pid": os.getpid(), "address": vault.peer_server.address})
        context = {"node": settings.node}
        log.info("serving at %s; %d sealed slots will be checked", vault.peer_server.address, found, extra=context)
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(wait_idle())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        alone = waits[1].done() and not stop.is_set()
    finally:
        for wait in waits:
            wait.cancel()
        await vault.stop()
        _clean_up(settings, store, keep=vault.has_jobs and not settings.die_with_parent and not alone)
        for lock in locks:
            os.close(lock)


def _clean_up(settings: VaultSettings, store: SegmentStore, keep: bool) -> None:
    settings.ready_file.unlink(missing_ok=True)
    (settings.run_dir / LOCK_FILE).unlink(missing_ok=True)
    if keep:
        context = {"node": settings.node}
        log.info("slots of %d jobs remain in %s", len(store.jobs()), settings.segment_dir, extra=context)
    else:
        store.delete_all()


def main() -> None:
    parent = os.getppid()
    try:
        settings = decode_settings(sys.argv[1])
        log_to_stderr(settings.log_format, settings.log_level)
        asyncio.run(serve(settings, parent))
    except (EverstepError, OSError) as error:
        raise SystemExit(f"everstep vault: {error}") from error


if __name__ == "__main__":
    main()
