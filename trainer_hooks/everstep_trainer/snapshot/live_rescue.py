"""Store the last finished step for ranks of this node that died before they had stored their share of it.

When a generation ends by a loss, each survivor still holds the state after its last finished step, unless an update has
begun. It first stores its own share, if that is not done. Then it looks at the slots of the node's other ranks. Where
one of them lacks the version and its process can store nothing any more, the survivor stores that rank's share from its
own tensors, into that rank's slots. All this happens before the training function's objects are released, so no state
is held twice, and before any rank can begin to restore (docs/decisions/0114).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from time import sleep

import xxhash

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.host.processes import PROC, is_exiting, read_stat
from everstep.ids import Version
from everstep.layout.manifests import Manifest, encode_manifest
from everstep.layout.segment_header import segment_name
from everstep.layout.slot_header import SlotHeader
from everstep.layout.slots import SegmentView
from everstep.wire.v1.training import Member
from everstep_trainer.slots.copy import write_blob
from everstep_trainer.slots.shares import RankShare
from everstep_trainer.slots.vault_client import MappedSegment
from everstep_trainer.snapshot.job import SnapshotJob
from everstep_trainer.snapshot.planner import OtherShares, make_slot_targets
from everstep_trainer.state.python_state import PythonState, encode

log = logging.getLogger(__name__)

RESCUE_WAIT_S = 5.0
"""Longest wait for other ranks of the node to store their shares or to end. They leave within ``leave_timeout_s``, and
a new generation cannot begin without them in any case."""
FIRST_POLL_S = 0.001
LAST_POLL_S = 0.02
NO_PYTHON_STATE = encode(PythonState({}, {}, {}, {})).data()
"""Python state of a share stored for a dead rank, whose own is lost: a restore takes another rank's."""

# ---- who may store


class Storing(Enum):
    """What a rank may still do in a generation. BUSY: its process may store its share. OVER: it is dead, or stores
    nothing more. UNKNOWN: it has not planned in this generation, so nothing tells."""

    BUSY = auto()
    OVER = auto()
    UNKNOWN = auto()


_files: dict[Path, int] = {}
"""Open lock files of this process: closing one would release a lock that it holds on the same file."""
_files_lock = threading.Lock()
_OWNER, _RESCUE = 0, 1  # bytes of the file that are locked: by the rank itself, and by who stores for it
_START = 19  # the field of /proc/PID/stat, counted from the state, that tells processes of one number apart


class StoringLocks:
    """A lock file for each local rank of a node, in ``folder``: locked while the rank may store its own share.

    They are POSIX record locks. The kernel releases them when the process ends, whatever the reason. Processes that a
    rank forks, such as data loaders, do not inherit them. A process that is killed is over as soon as all its threads
    are exiting, long before its memory is freed and its files are closed. Each process makes a file of its own, so that
    none waits for the one before.
    """

    def __init__(self, folder: Path, generation: int) -> None:
        self._folder, self._generation = folder, str(generation).encode()

    def hold(self, local_rank: int) -> None:
        """Hold this process's own lock: it may store from now on. Raises OSError."""
        path = self._folder / f"storing-{local_rank}"
        new = path.with_name(f"{path.name}.new")
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER)
        os.write(file, b"%s %d %s" % (self._generation, os.getpid(), read_stat(PROC / "self")[_START].encode()))
        new.rename(path)
        with _files_lock:
            _replace(path, file)

    def take(self, local_rank: int, *, may_be_exiting: bool) -> Storing:
        """Take the right to store for another rank, if it is OVER; ``release`` gives it back.

        Args:
            local_rank: The rank.
            may_be_exiting: Whether an exiting process counts as dead. Not where a GPU may still write into its slots.

        Raises:
            OSError: The lock file cannot be read.
        """
        file = self._open(local_rank)
        if file is None:
            return Storing.UNKNOWN
        if not _lock(file, _RESCUE):
            return Storing.BUSY
        mark = os.pread(file, 100, 0).split()
        if len(mark) != 3 or mark[0] != self._generation:
            found = Storing.UNKNOWN
        elif _lock(file, _OWNER):
            fcntl.lockf(file, fcntl.LOCK_UN, 1, _OWNER)
            found = Storing.OVER
        else:
            found = Storing.OVER if may_be_exiting and _is_exiting(mark[1], mark[2]) else Storing.BUSY
        if found is not Storing.OVER:
            self.release(local_rank)
        return found

    def release(self, local_rank: int) -> None:
        """Release what ``take`` gave. Raises OSError."""
        self._unlock(local_rank, _RESCUE)

    def end(self, local_rank: int) -> None:
        """Release this process's own lock: it stores nothing more. Raises OSError."""
        self._unlock(local_rank, _OWNER)

    def _unlock(self, local_rank: int, at: int) -> None:
        if (file := self._open(local_rank)) is not None:
            fcntl.lockf(file, fcntl.LOCK_UN, 1, at)

    def _open(self, local_rank: int) -> int | None:
        """Return the lock file of a rank; None if the rank has never made one."""
        path = self._folder / f"storing-{local_rank}"
        with _files_lock:
            file = _files.get(path)
            try:
                if file is None or not os.path.samestat(os.fstat(file), path.stat()):
                    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    _replace(path, file)
            except FileNotFoundError:
                return None
            return file


def _replace(path: Path, file: int) -> None:
    if (old := _files.get(path)) is not None:
        os.close(old)
    _files[path] = file


def _lock(file: int, at: int) -> bool:
    """Lock one byte of the file, unless another process has."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):  # fcntl(2) allows both
        return False
    return True


def _is_exiting(pid: bytes, start: bytes, processes: Path = PROC) -> bool:
    """Return whether all threads of the process are exiting. ``start`` tells it from another one of this number."""
    folder = processes / pid.decode()
    try:
        if read_stat(folder)[_START] != start.decode():
            return False  # another process of this number, as in another container
        threads = [read_stat(thread) for thread in (folder / "task").iterdir()]
    except (OSError, IndexError):
        return False  # it ended just now, and its lock with it
    return bool(threads) and all(map(is_exiting, threads))


# ---- storing from live state


def store_live(
    view: SegmentView, slot: int, rank: int, manifest: Manifest, blob: bytes, share: RankShare, job: SnapshotJob
) -> bool:
    """Fill and seal ``slot`` with a share of the version of ``job``, whose state is still live.

    Args:
        view: The segment of ``rank``, which no other process writes.
        slot: The slot to fill.
        rank: The rank whose share this is.
        manifest: The slot's manifest.
        blob: The Python state to store with it.
        share: The rank's share, in parts of this process's layout.
        job: The snapshot of the last finished step, with its tensors and its record of writes.

    Returns:
        False, with the slot empty, if the state changed meanwhile.
    """
    encoded = encode_manifest(manifest)
    payload = view.begin(slot, rank, job.version, encoded, manifest.payload_bytes)
    write_blob(payload, manifest, blob)
    copied = job.sources.copy(share, make_slot_targets(view, slot, manifest), digest=False)
    job.sources.mover.finish()
    if not job.is_unchanged():
        view.discard(slot)
        return False
    digests = None if copied.chunks is None else [xxhash.xxh3_128_digest(encoded), *copied.chunks]
    view.seal(slot, digests)
    return True


def is_stored(view: SegmentView, rank: int, version: Version) -> bool:
    """Return whether a complete slot of the segment holds the rank's share of the version."""
    return any((header.rank, header.version) == (rank, version) for _, header in view.complete_slots())


class LiveRescue:
    """One survivor's part in storing what others of its node left unstored.

    Args:
        folder: The folder of the node's segments of the job.
        locks: The locks of the node's ranks.
        job: The snapshot of the survivor's last finished step.
        other_shares: The shares of other ranks that the survivor holds live.
        choose_slot: Returns the slot of a rank to fill, from its headers. Raises OutOfSlotMemory.
    """

    def __init__(
        self,
        folder: Path,
        locks: StoringLocks,
        job: SnapshotJob,
        other_shares: OtherShares,
        choose_slot: Callable[[list[SlotHeader | None]], int],
        log_fields: Mapping[str, object],
    ) -> None:
        self._folder, self._locks, self._job = folder, locks, job
        self._other_shares, self._choose_slot = other_shares, choose_slot
        self._log_fields = log_fields
        self._segments: dict[int, MappedSegment] = {}

    def run(self, others: list[Member], clock: Clock, wait_s: float) -> None:
        """Wait until each rank of ``others`` has stored its share or stores nothing more; then store it for them."""
        deadline, pause_s = clock.monotonic() + wait_s, FIRST_POLL_S
        while others := [member for member in others if not self._is_settled(member)]:
            if clock.monotonic() > deadline:
                ranks = ", ".join(str(member.rank) for member in others)
                message = "ranks %s neither stored step %d nor ended within %g s: it may be computed again"
                log.info(message, ranks, self._job.version.step, wait_s, extra=dict(self._log_fields))
                return
            sleep(pause_s)
            pause_s = min(LAST_POLL_S, 1.5 * pause_s)

    def _is_settled(self, member: Member) -> bool:
        """Return whether nothing is left to do or to wait for; store the rank's share if no other rank will."""
        try:
            segment = self._segment(member)
            if is_stored(segment.view, member.rank, self._job.version):
                return True
            storing = self._locks.take(member.local_rank, may_be_exiting=not self._job.sources.is_on_gpu)
            if storing is not Storing.OVER:
                return storing is Storing.UNKNOWN
            try:
                self._store_share(segment.view, member.rank)
            finally:
                self._locks.release(member.local_rank)
        except (EverstepError, OSError, ValueError, RuntimeError) as error:
            step = self._job.version.step
            log.warning("cannot store step %d for rank %d: %s", step, member.rank, error, extra=dict(self._log_fields))
        return True

    def _segment(self, member: Member) -> MappedSegment:
        if member.rank not in self._segments:
            self._segments[member.rank] = MappedSegment(str(self._folder / segment_name("own", member.local_rank)))
        return self._segments[member.rank]

    def _store_share(self, view: SegmentView, rank: int) -> None:
        if is_stored(view, rank, self._job.version):  # by the rank itself, or by another survivor
            return
        slot = self._choose_slot(view.headers())
        share, manifest = self._other_shares.shares[rank], self._other_shares.manifest(rank)
        if store_live(view, slot, rank, manifest, NO_PYTHON_STATE, share, self._job):
            version = self._job.version
            log.info("stored version %s for rank %d, which had not", version, rank, extra=dict(self._log_fields))
