"""Memory that a worker has touched is kept, and a standby touches some in advance.

A recovery builds a model anew. With glibc's defaults every tensor above 128 KiB is a mapping of its own, returned when
it is freed and faulted in page by page when the next generation asks again: 0.5 GB/s on a virtual machine where memory
that is already there is written at 20. For the host memory of 2.1 M parameters under AdamW with their gradients and
buckets that was more than half of a recovery.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

# ---- process
# What a forked process is made to look like: what it is called, how it takes signals, how its group is reached.

_PR_SET_NAME = 15
OOM_SCORE_ADJUSTMENT = 500
_libc = ctypes.CDLL(None)


def set_process_name(name: str) -> None:
    """What top and ``ps -o comm`` show (15 characters): forked children all have their fork server's command line."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def reset_signals() -> None:
    """What a process started from a shell has: default handlers, Ctrl-C as KeyboardInterrupt, nothing blocked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False for one that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def signal_group(pid: int, number: int) -> None:
    """Sends ``number`` to the process group that ``pid`` leads; nothing where there is none any more."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def raise_oom_score() -> None:
    """Where memory is short the kernel shall end a rank, which is replaced, before the vault that its state is in.

    A vault maps the slots of all ranks, so that it may look like the largest process of the node. Anybody may raise
    his own score; what was set for the whole job (by a container's runtime, say) is the least.
    """
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        file.write_text(str(max(int(file.read_text()), OOM_SCORE_ADJUSTMENT)))


# ---- warm
# What a standby does while nobody needs it, so that its first step after a promotion is not its slowest.
#
# A forked process copies each page that it is the first to write, and torch looks up each kernel once. A training step
# of a tiny model in advance takes 8 to 16 ms of that out of a recovery (medians of 15 forks each with and without it:
# DistributedDataParallel set-up and first step of 8 x Linear(512, 512), on two busy cores).


def warm_up_torch() -> None:
    """One step of a small transformer block with AdamW, on the CPU. Leaves torch's random numbers as they were."""
    # The launcher imports this module and must start without torch.
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        block = nn.Sequential(nn.Embedding(16, 32), nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))
        head = nn.Linear(32, 16)
        optimizer = torch.optim.AdamW([*block.parameters(), *head.parameters()])
        tokens = torch.zeros(2, 8, dtype=torch.long)
        loss = nn.functional.cross_entropy(head(block(tokens)).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's own bound (HEAP_MAX_SIZE / 2): larger blocks are mappings of their own whatever we say."""
MAX_KEPT_BYTES = 4 << 30
TOUCH_PIECE_BYTES = 16 << 20
TOUCH_STEP_BYTES = 64 << 20
MAX_TOUCH_BYTES = 1 << 30
"""A standby of a rank with more host memory than this touches this much: it costs memory while nobody needs it."""


def keep_freed_memory() -> bool:
    """Lets malloc keep what is freed, up to 4 GiB. Returns False where the C library has no mallopt."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (M_TRIM_THRESHOLD, min(MAX_KEPT_BYTES, 2**31 - 1)),
        (M_TOP_PAD, TOUCH_PIECE_BYTES),
    )
    return all(library.mallopt(name, value) for name, value in settings)


def pretouch_heap(nbytes: int) -> int:
    """Makes malloc hold ``nbytes`` bytes of memory that is there; returns how many. Call it in the main thread.

    They come from the heap that the main thread's tensors will come from, and go back to it.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    pieces = [library.malloc(TOUCH_PIECE_BYTES) for _ in range(min(nbytes, MAX_TOUCH_BYTES) // TOUCH_PIECE_BYTES)]
    for piece in pieces:
        if piece:
            ctypes.memset(piece, 0, TOUCH_PIECE_BYTES)
    for piece in reversed(pieces):
        if piece:
            library.free(piece)
    return sum(TOUCH_PIECE_BYTES for piece in pieces if piece)


def anonymous_bytes(pid: int | None = None) -> int:
    """Resident anonymous memory of a process; 0 where it is gone."""
    try:
        lines = Path("/proc", str(pid or os.getpid()), "status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def largest_rank_bytes() -> int:
    """The resident anonymous memory of the largest rank that the same fork server made; 0 where there is none."""
    server = os.getppid()
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    except OSError:
        return 0
    return max((anonymous_bytes(int(child)) for child in children if _is_rank_process(child)), default=0)


def _is_rank_process(pid: str) -> bool:
    try:
        return Path("/proc", pid, "comm").read_text().startswith("everstep-rank")
    except OSError:
        return False


class StandbyMemory:
    """A standby's memory while it waits: it follows that of the ranks, 64 MiB at a time."""

    def __init__(self) -> None:
        self._touched = 0

    def match_ranks(self) -> None:
        """Touches what the ranks have and this process has not; a rank's pages shared with the server count on both
        sides and cancel out."""
        missing = min(largest_rank_bytes() - anonymous_bytes(), TOUCH_STEP_BYTES)
        if missing >= TOUCH_PIECE_BYTES and self._touched < MAX_TOUCH_BYTES:
            self._touched = pretouch_heap(self._touched + missing)
