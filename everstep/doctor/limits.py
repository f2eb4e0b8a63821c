"""Check what this process may do: open files, locked memory, threads, /proc, the state directory and the agent."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.doctor.results import CheckResult, fail, ok, warn

ENOUGH_FILES, FEWEST_FILES = 4096, 1024
RDMA_LOCKED_BYTES = 64 << 20
SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket."""
RUN_SOCKET = "run-12345678/agent/agent.sock"
"""Path of a private agent's socket below the state directory."""


def check_limits(files: int, locked_bytes: int, has_rdma: bool) -> Iterator[CheckResult]:
    """Check the soft limits of open files and locked memory; ``resource.RLIM_INFINITY`` is no limit."""
    unlimited = files == resource.RLIM_INFINITY
    if unlimited or files >= ENOUGH_FILES:
        yield ok("open files", "no limit" if unlimited else f"up to {files}")
    else:
        report = fail if files < FEWEST_FILES else warn
        yield report("open files", f"up to {files}: raise it to {ENOUGH_FILES} (ulimit -n, or LimitNOFILE of a unit)")
    if not has_rdma:
        yield ok("locked memory", "no InfiniBand device needs it")
    elif locked_bytes == resource.RLIM_INFINITY or locked_bytes >= RDMA_LOCKED_BYTES:
        yield ok("locked memory", "enough for InfiniBand")
    else:
        yield warn(
            "locked memory",
            f"up to {locked_bytes >> 10} KiB: InfiniBand registers more; raise it (ulimit -l unlimited, LimitMEMLOCK)",
        )


def check_threads(environ: Mapping[str, str], cores: int, ranks: int) -> Iterator[CheckResult]:
    """Check OMP_NUM_THREADS for ``ranks`` ranks on this node."""
    text = environ.get("OMP_NUM_THREADS", "")
    if not text:
        chosen = "each rank gets 1" if ranks > 1 else f"the rank gets as many as cores ({cores})"
        yield ok("OMP_NUM_THREADS", f"not set: {chosen}")
    elif not text.isdigit() or int(text) < 1:
        yield fail("OMP_NUM_THREADS", f"{text!r} is no number of threads: set it to 1 or more, or unset it")
    elif int(text) * ranks > cores:
        yield warn(
            "OMP_NUM_THREADS",
            f"{ranks} ranks with {text} threads compete for {cores} cores: set it to {max(1, cores // ranks)}",
        )
    else:
        yield ok("OMP_NUM_THREADS", f"{ranks} ranks with {text} threads on {cores} cores")


def check_proc(sees_others: bool) -> Iterator[CheckResult]:
    """Check that processes of other users can be seen, as an agent of its own user needs."""
    if sees_others:
        yield ok("/proc", "processes of other users can be seen")
    else:
        yield warn(
            "/proc",
            "processes of other users are hidden (hidepid): an agent that runs as another user than the ranks cannot "
            "tell a stopped rank from a busy one; run it as the same user, or mount /proc with hidepid=0",
        )


def check_state_dir(directory: Path) -> Iterator[CheckResult]:
    """Check the directory in which launchers keep logs and sockets of private runs."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    length = len(os.fsencode(directory / RUN_SOCKET))
    if length > SOCKET_PATH_BYTES:
        yield fail(
            "state directory",
            f"sockets below {directory} would have paths of {length} bytes, and the kernel allows {SOCKET_PATH_BYTES}: "
            "set XDG_STATE_HOME to a shorter path, or give --state-dir",
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield fail("state directory", f"{existing} cannot be written: set XDG_STATE_HOME, or give --state-dir")
    else:
        yield ok("state directory", f"{directory} can be used")


def connect_error(path: Path) -> str:
    """Return why a Unix socket cannot be connected to; "" if it can."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        try:
            connection.connect(str(path))
        except OSError as error:
            return str(error)
    return ""


def check_agent(path: Path, exists: bool, error: str) -> Iterator[CheckResult]:
    """Check the node's agent, by its socket and the error of connecting to it."""
    if not exists:
        yield ok("agent", f"there is no {path}: everstep-launch runs a private agent and controller")
    elif error:
        yield fail(
            "agent",
            f"nothing answers at {path} ({error}), and everstep-launch would wait there: start everstep-agent, run as "
            "a user that may connect, or give --standalone",
        )
    else:
        yield ok("agent", f"an agent answers at {path}")


def check_native(library: Path, disabled: bool, loaded: bool) -> Iterator[CheckResult]:
    """Check the compiled library that copies and hashes in one pass."""
    if loaded:
        yield ok("native library", "snapshots are copied and hashed in one pass")
    else:
        reason = "this machine has no AVX2, or it was made for another one"
        if disabled:
            reason = "EVERSTEP_NATIVE=0 turns it off"
        elif not library.exists():
            reason = (
                "it was not compiled: install a C compiler, and install everstep again with EVERSTEP_NATIVE=require"
            )
        yield warn("native library", f"snapshots are hashed in a second pass: {reason}")
