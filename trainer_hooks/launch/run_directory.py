"""Where a launcher's private services live: made for one launcher, left by one that is killed, taken over by the next.

A launcher that ends in order takes its directory and its vault's memory along. One that is killed leaves both, and for
a while its vault: a launcher of the same job goes on with them, any other sweeps away what nobody is waiting in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.errors import ConfigurationError, Unavailable
from everstep.vault_note import is_held, read_note

log = logging.getLogger(__name__)

SEGMENTS = Path("/dev/shm")  # noqa: S108 - shared memory is the point
SOCKET_PATH_BYTES = 107
"""What sockaddr_un holds."""
POLL_S = 0.02
GONE_WAIT_S = 15.0
"""For processes that have been told to end, or killed; freeing a vault's memory takes longest."""


def state_dir(given: str | None, environ: Mapping[str, str]) -> Path:
    """Where logs and private services' files go: --state-dir, or $XDG_STATE_HOME/everstep."""
    if given is not None:
        return Path(given).resolve()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "everstep"


class RunDirectory:
    """A directory (mode 0700) that is this launcher's own, by a lock that ends with it.

    Args:
        state_dir: where it is made, as ``run-*``.
        job: whose; what a killed launcher of the same job left is taken over where its checkpoints are in memory still.

    Raises ConfigurationError where the path is too long for sockets, Unavailable where the services of the launcher
    before do not end.
    """

    def __init__(self, state_dir: Path, job: str) -> None:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(state_dir / ".lock"):
            taken = _take_over(state_dir, job)
            self.path, self._lock = taken or _make(state_dir, job)
        self.taken_over = taken is not None
        if len(os.fsencode(self.path / "agent" / "agent.sock")) > SOCKET_PATH_BYTES - 8:
            self.remove()
            raise ConfigurationError(
                f"{self.path} is too long a path for unix sockets (at most {SOCKET_PATH_BYTES} bytes with the "
                "socket's name): give a shorter --state-dir"
            )
        if self.taken_over:
            log.info("going on with what job %s, whose launcher was killed, left in memory: %s", job, self.path.name)
            _end_services(self.path)

    @property
    def segments(self) -> Path:
        return segment_dir(self.path)

    def leave(self) -> None:
        """Lets go of it; the next launcher of the job finds everything."""
        os.close(self._lock)

    def remove(self) -> None:
        """Ends the vault, where its agent could not, and unlinks everything."""
        _end_vault(self.path)
        _remove(self.path)
        os.close(self._lock)


def segment_dir(run_dir: Path) -> Path:
    """Where the vault keeps its segments; named after the run directory, so that sweeping finds it."""
    return SEGMENTS / f"everstep-{os.getuid()}" / run_dir.name


def _make(state_dir: Path, job: str) -> tuple[Path, int]:
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=state_dir))
    lock = os.open(run_dir / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (run_dir / "job").write_text(job)
    return run_dir, lock


def _take_over(state_dir: Path, job: str) -> tuple[Path, int] | None:
    """What the job's last launcher left; what others left and nobody waits in is swept away."""
    found = None
    for left in sorted(state_dir.glob("run-*")):
        lock = os.open(left / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if found is None and _holds(left, job):
            found = left, lock
            continue
        if not is_held(segment_dir(left)):
            _remove(left)
        os.close(lock)
    return found


def _holds(run_dir: Path, job: str) -> bool:
    """Whether the directory is of that job and checkpoints of it are in memory; after a boot they are not."""
    with contextlib.suppress(OSError):
        of_job = (run_dir / "job").read_text() == job and (run_dir / "operator.token").exists()
        return of_job and any((segment_dir(run_dir) / job).glob("own-*"))
    return False


def _end_services(run_dir: Path) -> None:
    """They follow their launcher by themselves, the agent before the vault is taken from it."""
    for ready_file in (run_dir / "agent" / "agent.json", run_dir / "controller.json"):
        pid = _pid_in(ready_file)
        if not _gone(pid, run_dir):
            log.warning("process %d of the launcher before did not end within %g s; killing it", pid, GONE_WAIT_S)
            _kill(pid, run_dir)
    _wait_for_agent(run_dir / "agent" / "agent.lock")


def _wait_for_agent(lock_file: Path) -> None:
    """Returns when nobody holds the agent's lock: one that had just been started again says its pid nowhere yet.

    Raises Unavailable where it is held on.
    """
    for _ in range(int(GONE_WAIT_S / POLL_S)):
        if not is_held(lock_file.parent, lock_file.name):
            return
        time.sleep(POLL_S)
    raise Unavailable(f"an agent of the launcher before holds {lock_file}; end it, or give another --state-dir")


def _end_vault(run_dir: Path) -> None:
    """That of an agent that was killed and not started again."""
    note = read_note(segment_dir(run_dir))
    if note is not None and is_held(segment_dir(run_dir)):
        _kill(note.pid, run_dir)


def _kill(pid: int, run_dir: Path) -> None:
    """Raises Unavailable where the process stays: two must not work over one directory."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if not _gone(pid, run_dir):
        raise Unavailable(f"process {pid} over {run_dir} does not end; end it, or give another --state-dir")


def _gone(pid: int, run_dir: Path) -> bool:
    """Whether the process that was started over ``run_dir`` has ended, or does so in time."""
    try:
        descriptor = os.pidfd_open(pid) if pid > 0 else -1
    except ProcessLookupError:
        return True
    if descriptor < 0:
        return True
    try:
        is_other = os.fsencode(run_dir) not in Path(f"/proc/{pid}/cmdline").read_bytes()  # the number is used again
        return is_other or bool(select.select([descriptor], [], [], GONE_WAIT_S)[0])
    except (FileNotFoundError, ProcessLookupError):
        return True
    finally:
        os.close(descriptor)


def _pid_in(ready_file: Path) -> int:
    try:
        return int(json.loads(ready_file.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove(run_dir: Path) -> None:
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(segment_dir(run_dir), ignore_errors=True)
