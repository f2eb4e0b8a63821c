"""Prepare a worker's process: name, signals, OOM score, and memory touched in advance.

A recovery builds a model anew. With glibc's defaults every tensor above 128 KiB is its own mapping, which is returned
when freed and faulted in again page by page, at 0.5 GB/s on a virtual machine instead of 20 GB/s. That was more than
a third of a recovery. So a worker keeps memory that it has touched, and a standby touches some in advance.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from everstep.host.processes import status_field

# ---- process: name, signals and group

_PR_SET_NAME, _PR_GET_NAME = 15, 16
OOM_SCORE_ADJUSTMENT = 500
_libc = ctypes.CDLL(None)


def set_process_name(name: str) -> None:
    """Set the name in top and ``ps -o comm`` (15 characters), since forks share their server's command line."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def process_name() -> str:
    """Return the name that ``set_process_name`` sets."""
    name = ctypes.create_string_buffer(16)
    _libc.prctl(_PR_GET_NAME, name, 0, 0, 0)
    return name.value.decode(errors="replace")


def reset_signals() -> None:
    """Reset signals as for a process started from a shell: default handlers, KeyboardInterrupt, nothing blocked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers announce an end."""


@contextlib.contextmanager
def notices_blocked() -> Iterator[None]:
    """Block NOTICE_SIGNALS for processes that are started meanwhile, which inherit the mask.

    Slurm sends them to every process of a job step, and they would end those that are not the script's.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOTICE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_group(pid: int, number: int) -> None:
    """Send ``number`` to the process group that ``pid`` leads, if it exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def raise_oom_score() -> None:
    """Make the kernel kill a rank, which is replaced, before the vault that holds its state, when memory is short.

    A vault maps the slots of all ranks, so that it may look like the node's largest process. A higher score stays.
    """
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        file.write_text(str(max(int(file.read_text()), OOM_SCORE_ADJUSTMENT)))


def warm_up_torch() -> None:
    """Run one step of a small transformer block with AdamW on the CPU; torch's random state is preserved.

    A forked process copies each page that it is the first to write, and torch looks up each kernel once. Doing that in
    advance saves 8 to 16 ms of a recovery.
    """
    # Imported here: the launcher imports this module and must start without torch.
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
"""glibc's own bound (HEAP_MAX_SIZE / 2): larger blocks are always their own mappings."""
TOUCH_PIECE_BYTES = 16 << 20
TOUCH_STEP_BYTES = 64 << 20
MAX_TOUCH_BYTES = 1 << 30
"""Most memory that a standby touches in advance: it costs memory while the standby is not needed."""


def keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to 2 GiB, if the C library has mallopt."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        _libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        _libc.mallopt(M_TOP_PAD, TOUCH_PIECE_BYTES)


def pretouch_heap(nbytes: int) -> int:
    """Make malloc hold ``nbytes`` of resident memory; return how many. Call it in the main thread.

    The memory comes from the heap that the main thread's tensors will use, and goes back to it.
    """
    _libc.malloc.restype = ctypes.c_void_p
    _libc.malloc.argtypes = [ctypes.c_size_t]
    _libc.free.argtypes = [ctypes.c_void_p]
    count = min(nbytes, MAX_TOUCH_BYTES) // TOUCH_PIECE_BYTES
    pieces = [piece for piece in (_libc.malloc(TOUCH_PIECE_BYTES) for _ in range(count)) if piece]
    for piece in pieces:
        ctypes.memset(piece, 0, TOUCH_PIECE_BYTES)
    for piece in reversed(pieces):
        _libc.free(piece)
    return len(pieces) * TOUCH_PIECE_BYTES


def anonymous_bytes(pid: int) -> int:
    """Return the resident anonymous memory of a process; 0 if it is gone."""
    return int(status_field(pid, "RssAnon")) * 1024


def largest_rank_bytes() -> int:
    """Return the resident anonymous memory of the same fork server's largest rank; 0 if there is none."""
    server, largest = os.getppid(), 0
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{server}/task/{server}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path("/proc", child, "comm").read_text().startswith("everstep-rank"):
                    largest = max(largest, anonymous_bytes(int(child)))
    return largest


class StandbyMemory:
    """Grows a waiting standby's memory to that of the ranks, 64 MiB at a time."""

    def __init__(self) -> None:
        self._touched = 0

    def match_ranks(self) -> None:
        """Touch the memory that ranks have and this process lacks; pages shared with the server count on both sides."""
        missing = min(largest_rank_bytes() - anonymous_bytes(os.getpid()), TOUCH_STEP_BYTES)
        if missing >= TOUCH_PIECE_BYTES and self._touched < MAX_TOUCH_BYTES:
            self._touched = pretouch_heap(self._touched + missing)
