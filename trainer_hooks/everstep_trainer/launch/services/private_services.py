"""Run a controller and an agent for one launcher alone, when no agent was given or found.

They live in their own directory, with a secret and a token made for this run, and listen on loopback; where launchers
of several nodes meet at an endpoint, only the first node runs the controller (``job_rendezvous``). They end with the
launcher, and are restarted if they die earlier. If the launcher is killed, its vault stays for a while with the
checkpoints, and the job's next launcher continues with it (decision 0019).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import select
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.client import Client, read_token
from everstep.clock import Clock
from everstep.errors import DECODE_ERRORS, ConfigurationError, EverstepError, Unavailable
from everstep.host.parent_process import PARENT_VARIABLE
from everstep.host.private_files import make_private_directories, private_directory
from everstep.host.state_directory import preferred_state_directory, state_directory, why_unusable
from everstep.layout.vault_status import Pid, is_locked, read_status
from everstep_trainer.launch.forking.fork_client import wait_for_exit
from everstep_trainer.launch.forking.process_setup import notices_blocked
from everstep_trainer.launch.options import RunStart, path_encoding_error
from everstep_trainer.launch.services.daemon_call import call_in_daemon
from everstep_trainer.launch.services.job_rendezvous import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    LOOPBACK,
    Endpoint,
    ServiceNetwork,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
SEGMENT_ROOT = Path("/dev/shm")  # noqa: S108 - shared memory is the point
SEGMENT_DIR_FILE = "segment-dir"
"""File in a run directory that names the folder of its segments, if it is not the default one."""
SOCKET_PATH_BYTES = 107  # of a path in sockaddr_un
POLL_S = 0.02
EXIT_WAIT_S = 15.0  # for processes that were asked to end or killed; freeing a vault's memory takes longest


def resolve_state_dir(flag_value: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder of logs and private services' files: --state-dir, or ``state_directory``."""
    return state_directory(environ) if flag_value is None else Path(flag_value).resolve()


def prepare_state_dir(flag_value: str | None, environ: Mapping[str, str]) -> Path:
    """Return the folder as ``resolve_state_dir`` does; log once if it replaces one in the home directory.

    Raises ConfigurationError if the path cannot be used or another user has made the replacement, Unavailable if it
    cannot be made.
    """
    folder, wanted = resolve_state_dir(flag_value, environ), preferred_state_directory(environ)
    if problem := path_encoding_error(str(folder)):
        raise ConfigurationError(f"--state-dir: {problem}")
    if flag_value is None and folder != wanted:
        private_directory(folder, "--state-dir")  # below /tmp, where other users could have made it
        log.debug("logs and sockets are in %s instead of %s: %s", folder, wanted, why_unusable(wanted))
    return folder


class PrivateRunDirectory:
    """A directory (mode 0700) in ``state_dir``, as ``run-*``, owned by this launcher through a lock that ends with it.

    A launcher that is killed leaves its directory and, for a while, its vault. The job's next launcher continues with
    them if the checkpoints are still in memory; other launchers remove those that no launcher waits for. Raises
    ConfigurationError for a path too long for sockets or a job that must run alone and does not, Unavailable if the
    previous launcher's services do not end.
    """

    def __init__(self, state_dir: Path, job: str, start: RunStart, segments: Path | None = None) -> None:
        make_private_directories(state_dir)
        with os.fdopen(_open_lock(state_dir / ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken = _take_over(state_dir, job, start)
            if taken is None:
                self.path = Path(tempfile.mkdtemp(prefix="run-", dir=state_dir))
                self._lock = _open_lock(self.path / "lock")
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                (self.path / "job").write_text(job)
                if segments is not None:
                    (self.path / SEGMENT_DIR_FILE).write_bytes(os.fsencode(segments / self.path.name))
            else:
                self.path, self._lock = taken
        self.was_taken_over = taken is not None
        if len(os.fsencode(self.path / "agent" / "agent.sock")) > SOCKET_PATH_BYTES - 8:
            self.remove()
            raise ConfigurationError(
                f"{self.path} is too long a path for unix sockets (at most {SOCKET_PATH_BYTES} bytes with the "
                "socket's name): give a shorter --state-dir"
            )
        if self.was_taken_over:
            log.info("continuing with the checkpoints that the killed launcher of job %s left: %s", job, self.path.name)
            _end_services(self.path)

    def release(self) -> None:
        """Release the directory; the job's next launcher continues with it."""
        os.close(self._lock)

    def remove(self) -> None:
        """End the vault if its agent could not, and delete everything."""
        segments = segment_dir(self.path)
        status = read_status(segments)
        if status is not None and is_locked(segments):
            _kill(status.pid, self.path)
        _remove(self.path)
        os.close(self._lock)


def segment_dir(run_dir: Path) -> Path:
    """Return the folder of the vault's segments; named after the run directory, so that sweeping finds it."""
    with contextlib.suppress(FileNotFoundError):
        return Path(os.fsdecode((run_dir / SEGMENT_DIR_FILE).read_bytes()))
    return SEGMENT_ROOT / f"everstep-{os.getuid()}" / run_dir.name


def _take_over(state_dir: Path, job: str, start: RunStart) -> tuple[Path, int] | None:
    """Return the directory of the job's last launcher if it is to be continued, and remove other abandoned ones."""
    found = None
    for left in sorted(state_dir.glob("run-*")):
        lock = _open_lock(left / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            if start.is_alone and _job_of(left) == job:
                raise ConfigurationError(
                    f"job {job} runs already on this machine and writes to the same folder: give another --job"
                ) from None
            continue
        if found is None and start.takes_over and _holds_job(left, job):
            found = left, lock
        else:
            if not is_locked(segment_dir(left)):
                _remove(left)
            os.close(lock)
    return found


def _job_of(run_dir: Path) -> str:
    with contextlib.suppress(OSError):
        return (run_dir / "job").read_text()
    return ""


def _holds_job(run_dir: Path, job: str) -> bool:
    """Return whether the directory belongs to the job and its checkpoints are in memory; after a boot they are not."""
    with contextlib.suppress(OSError):
        of_job = _job_of(run_dir) == job and (run_dir / "operator.token").exists()
        return of_job and any((segment_dir(run_dir) / job).glob("own-*"))
    return False


def _end_services(run_dir: Path) -> None:
    """End the previous launcher's services; they end by themselves, the agent before its vault is taken over."""
    for ready_file in (run_dir / "agent" / "agent.json", run_dir / "controller.json"):
        ready = _read_ready(ready_file)
        if ready is not None and not _wait_for_exit(ready.pid, run_dir):
            message = "process %d of the previous launcher did not end within %g s; killing it"
            log.warning(message, ready.pid, EXIT_WAIT_S)
            _kill(ready.pid, run_dir)
    for _ in range(int(EXIT_WAIT_S / POLL_S)):  # an agent that just restarted has not written its pid yet
        if not is_locked(run_dir / "agent", "agent.lock"):
            return
        time.sleep(POLL_S)
    raise Unavailable(f"an agent of the previous launcher still uses {run_dir}; end it, or give another --state-dir")


def _kill(pid: int, run_dir: Path) -> None:
    """Kill a process; raise Unavailable if it stays: two must not work in one directory."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    if not _wait_for_exit(pid, run_dir):
        raise Unavailable(f"process {pid}, which uses {run_dir}, does not end; end it, or give another --state-dir")


def _wait_for_exit(pid: int, run_dir: Path) -> bool:
    """Return whether the process that was started for ``run_dir`` has ended, or ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
        try:
            is_other = os.fsencode(run_dir) not in Path(f"/proc/{pid}/cmdline").read_bytes()  # the pid was reused
            return is_other or bool(select.select([descriptor], [], [], EXIT_WAIT_S)[0])
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return True


class ServiceReady(msgspec.Struct, frozen=True):
    """What a service writes once it is ready."""

    pid: Pid
    address: str = ""  # where the controller listens


def _read_ready(file: Path) -> ServiceReady | None:
    with contextlib.suppress(OSError, *DECODE_ERRORS):
        return msgspec.json.decode(file.read_bytes(), type=ServiceReady)
    return None


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


def _remove(run_dir: Path) -> None:
    segments = segment_dir(run_dir)  # the run directory knows
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(segments, ignore_errors=True)


START_WAIT_S = 60.0  # longest start of a service; it takes about a second, or several on a loaded machine
END_WAIT_S = 10.0
END_NOTICE_WAIT_S = 5.0  # longest wait for the other nodes' agents to leave at the end of a job
MAX_LOGS = 40  # log files of earlier runs to keep, two per run
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""Window of MAX_RESTARTS: that many unexpected ends of one service lead to a restart; one more is no coincidence."""
MAX_EARLY_KILLS = 3
"""Kills of one service in a row (such as by the kernel, for lack of memory) that are tolerated before it is ready."""
VAULT_WITHOUT_AGENT_S = 30.0
"""Longest time that the vault is without agent and ranks, if all were killed at once on a loaded machine."""
REQUIRED_MODULES = {
    "controller": ("everstep_controller", "fastapi", "uvicorn", "sqlalchemy", "alembic", "prometheus_client"),
    "agent": ("everstep_agent", "pynvml", "prometheus_client"),
}


class PrivateServices:
    """A private controller and agent; logs stay in ``state_dir``, and the run directory is made there.

    ``name`` is that of the job and of the logs. ``linger_s``: how long the vault waits for another launcher if this one
    is killed; None: not at all. ``network``: how they are reached; by default on loopback, by this launcher alone.
    ``start``: how other runs of the name on this machine are treated. ``segments``: the folder for folders of segments.
    """

    def __init__(
        self,
        state_dir: Path,
        name: str,
        clock: Clock,
        linger_s: float | None = None,
        network: ServiceNetwork | None = None,
        start: RunStart | None = None,
        segments: Path | None = None,
    ) -> None:
        self._start, self._segments = start or RunStart(), segments
        self._network = network or ServiceNetwork()
        # A home may be shared by the nodes of a cluster: launchers of other nodes must not sweep this one's directory.
        self._state_dir = state_dir / self._network.node if self._network.controller is not None else state_dir
        self._output_flags = ["--launcher-state-dir", str(state_dir)]  # launchers of all nodes keep their output there
        self._name = name
        self._clock = clock
        self._linger_s = linger_s
        self._run_directory: PrivateRunDirectory | None = None
        self._serves = False
        self._services: list[PrivateService] = []
        self._url = ""

    @property
    def has_controller(self) -> bool:
        """True if the controller runs, and runs here."""
        return self._serves and self._network.listen is not None

    @property
    def may_show(self) -> bool:
        """True if this launcher shows the job's progress: the one where the controller runs."""
        return self.has_controller

    min_pause_s = 0.0
    """Least seconds between two questions: this controller has nothing else to do."""

    def controller(self) -> tuple[str, ssl.SSLContext | None]:
        """Return the controller's URL and the context to connect with, once the services have started."""
        assert self._run_directory is not None
        return self._url, self._network.tls(self._run_directory.path)

    async def start(self) -> Path:
        """Start both; return the agent's socket once it is there.

        Raises ConfigurationError if a package is missing or the directory cannot be written, Unavailable with the end
        of its log if a service does not start.
        """
        _check_installed()
        logs, network = self._state_dir / "logs", self._network
        try:
            make_private_directories(logs)
            _prune(logs)
            place = self._run_directory = await call_in_daemon(
                partial(PrivateRunDirectory, self._state_dir, self._name, self._start, self._segments)
            )
            run_dir = place.path
            if not place.was_taken_over or network.controller is not None:  # another secret may be given since
                await asyncio.to_thread(network.write_credentials, run_dir)
        except OSError as error:
            raise ConfigurationError(
                f"cannot keep logs and services in {self._state_dir}: {error}; give another --state-dir"
            ) from error
        self._url = network.controller or ""
        if network.listen is not None:
            listen, log_file = network.listen, logs / f"{self._name}.controller.log"
            controller = PrivateService("controller", log_file, run_dir / "controller.json", self._clock)
            self._services.append(controller)
            address = await controller.start(
                lambda last: [*controller_command(run_dir, last or listen, network), *self._output_flags]
            )
            self._url = self._url or f"http://{address}"
            if network.controller is not None:
                log.debug("this is the first node of job %s: its controller listens at %s", self._name, self._url)
        log_file, ready_file = logs / f"{self._name}.agent.log", run_dir / "agent" / "agent.json"
        agent = PrivateService("agent", log_file, ready_file, self._clock, segment_dir(run_dir))
        self._services.append(agent)
        await agent.start(lambda _: _agent_command(run_dir, self._url, self._linger_s, network))
        self._serves = True
        return run_dir / "agent" / "agent.sock"

    async def ask(self, request: Callable[[Client], T]) -> T | None:
        """Return the controller's answer to a request, made in a thread; None if there is none to ask, or it failed."""
        if not self._serves:
            return None

        def asked() -> T:
            with self._client() as client:
                return request(client)

        try:
            return await asyncio.to_thread(asked)
        except EverstepError:
            return None

    async def stop_job(self, reason: str) -> None:
        """Order the end of the job, since this launcher's controller is about to end; other launchers are told."""
        await self.ask(lambda client: client.stop_job(self._name, reason=reason))

    async def wait_for_other_nodes(self) -> None:
        """Wait until the other nodes' agents have left, which know of the job's end then; END_NOTICE_WAIT_S at most."""

        def others(client: Client) -> bool:
            return any(node.connected and node.node != self._network.node for node in client.nodes())

        deadline = self._clock.monotonic() + END_NOTICE_WAIT_S
        while await self.ask(others) and self._clock.monotonic() < deadline:
            await asyncio.sleep(0.1)

    def _client(self) -> Client:
        assert self._run_directory is not None
        url, tls = self.controller()
        return Client(url, read_token(str(self._run_directory.path / "operator.token")), tls=tls)

    async def end(self) -> None:
        """End the agent, then the controller, and remove the run directory.

        A directory that was taken over stays if its services did not start: its checkpoints may still be wanted.
        """
        for service in reversed(self._services):
            await service.end()
        self._services.clear()
        place, self._run_directory = self._run_directory, None
        if place is None:
            return
        if place.was_taken_over and not self._serves:
            log.warning("checkpoints of the killed launcher stay in memory: see everstep vault list and drop")
            place.release()
        else:
            place.remove()

    def how_to_watch(self) -> str:
        """Return the command that shows the job, once the services have started.

        It has no token, because logs are shared.
        """
        assert self._run_directory is not None
        run_dir = self._run_directory.path
        if self._network.controller is not None:
            variables = f"EVERSTEP_CONTROLLER={self._url} EVERSTEP_CA_FILE={run_dir / AUTHORITY_FILE}"
            return f"{variables} EVERSTEP_TOKEN_FILE={run_dir / 'operator.token'} everstep status"
        is_default = self._state_dir == resolve_state_dir(None, os.environ)
        place = "" if is_default else f" --state-dir {shlex.quote(str(self._state_dir))}"
        return f"everstep open {self._name}{place}"


class PrivateService:
    """One of the two services, which is started, supervised, restarted and ended; ``segments``: its vault's folder."""

    def __init__(self, name: str, log_file: Path, ready_file: Path, clock: Clock, segments: Path | None = None) -> None:
        self._name = name
        self._log_file = log_file
        self._ready_file = ready_file
        self._segments = segments
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, command: Callable[[str], list[str]]) -> str:
        """Start the service and supervise it; return the address in its ready file.

        ``command`` makes the command line from the service's last address ("" at first). Raises Unavailable, with the
        end of the log, if the service does not start.
        """
        address = await self._launch(command(""))
        self._watch = asyncio.create_task(self._supervise(command, address), name=f"keep {self._name}")
        return address

    async def end(self) -> None:
        """End the service with SIGTERM, and its process group with SIGKILL if that is not enough."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(END_WAIT_S):
                await wait_for_exit(process)
        except TimeoutError:
            log.warning("the private %s did not end within %s s; killing it", self._name, END_WAIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    async def _launch(self, command: list[str]) -> str:
        """Start the service until it is ready; restart it if it is killed meanwhile."""
        for _ in range(MAX_EARLY_KILLS):
            try:
                return await self._launch_once(command)
            except Unavailable as error:
                status = self._process.returncode if self._process is not None else None
                if status is None or status >= 0:
                    raise
                log.warning("%s", error)
        return await self._launch_once(command)

    async def _launch_once(self, command: list[str]) -> str:
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        try:
            self._ready_file.unlink(missing_ok=True)
            with os.fdopen(os.open(self._log_file, flags, 0o600), "ab") as output, notices_blocked():
                # In its own session, so that Ctrl-C in the terminal reaches only the launcher, which ends it in order.
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,
                )
        except OSError as error:
            raise Unavailable(f"the private {self._name} cannot be started: {error}") from error
        deadline = self._clock.monotonic() + START_WAIT_S
        while (ready := _read_ready(self._ready_file)) is None or ready.pid != process.pid:
            if process.poll() is not None:
                raise Unavailable(self._failure(f"ended with status {process.returncode} while starting"))
            if self._clock.monotonic() > deadline:
                raise Unavailable(self._failure(f"was not ready within {START_WAIT_S:g} s"))
            await asyncio.sleep(POLL_S)
        return ready.address

    async def _supervise(self, command: Callable[[str], list[str]], address: str) -> None:
        ends: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        while True:
            process = self._process
            assert process is not None
            status = await wait_for_exit(process)
            ends.append(self._clock.monotonic())
            place = f"(log: {self._log_file})"
            if len(ends) > MAX_RESTARTS and ends[-1] - ends[0] < RESTART_WINDOW_S:
                often = f"{len(ends)} times within {RESTART_WINDOW_S:g} s, last with status {status}"
                log.error("the private %s ended %s; training continues without it %s", self._name, often, place)
                return
            log.warning("the private %s ended with status %s; restarting it %s", self._name, status, place)
            try:
                address = await self._launch(command(address))
            except Unavailable as error:
                log.error("%s", error)
                return

    def _failure(self, summary: str) -> str:
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self._log_file.read_text(errors="replace").splitlines()[-15:]
        if _is_full(self._log_file.parent):
            place = f"the file system of {self._log_file.parent} is full"
            return f"the private {self._name} {summary}: {place}; make room, or give another --state-dir"
        if self._segments is not None and _is_read_only(self._segments):
            place = f"the file system of {self._segments} is read-only"
            return f"the private {self._name} {summary}: {place}; give another --segment-dir, or mount it writable"
        shown = "\n".join(f"  | {line}" for line in lines or ["(nothing)"])
        return f"the private {self._name} {summary}; the end of {self._log_file}:\n{shown}"


def _is_full(directory: Path) -> bool:
    """Return whether less than a page of a file system is left to this user."""
    try:
        status = os.statvfs(directory)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < 4096 or (status.f_files > 0 and status.f_favail == 0)


def _is_read_only(directory: Path) -> bool:
    """Return whether the file system on which a directory is, or would be made, is mounted read-only."""
    for place in (directory, *directory.parents):
        with contextlib.suppress(OSError):
            return bool(os.statvfs(place).f_flag & os.ST_RDONLY)
    return False


# -P below: a user's directory may have modules named "agent" and "controller" too.


def controller_command(run_dir: Path, listen: str, network: ServiceNetwork) -> list[str]:
    """Return the command of a controller that listens at ``listen``, with the credentials in ``run_dir``."""
    command = [sys.executable, "-P", "-m", "everstep_controller.main", "serve", "--listen", listen]
    command += ["--database", f"sqlite:///{run_dir / 'controller.db'}", "--secret-file", str(run_dir / "secret")]
    if network.controller is not None:
        command += ["--tls-certificate", str(run_dir / CERTIFICATE_FILE), "--tls-key", str(run_dir / KEY_FILE)]
        command += ["--advertise", network.controller.partition("://")[2]]
    return [*command, "--preset", network.preset, "--ready-file", str(run_dir / "controller.json"), "--die-with-parent"]


def _agent_command(run_dir: Path, controller: str, linger_s: float | None, network: ServiceNetwork) -> list[str]:
    command = [sys.executable, "-P", "-m", "everstep_agent.main", "--node", network.node]
    command += ["--controller", controller, "--token-file", str(run_dir / "agent.token")]
    if network.controller is not None:
        command += ["--ca-file", str(run_dir / AUTHORITY_FILE)]
    command += ["--run-dir", str(run_dir / "agent"), "--segment-dir", str(segment_dir(run_dir))]
    command += ["--vault-listen", str(Endpoint(network.address, 0))]
    command += ["--vault-survives-kill-of", "agent" if linger_s is None else "parent"]
    command += ["--vault-linger-s", str(VAULT_WITHOUT_AGENT_S if linger_s is None else linger_s)]
    return [*command, "--metrics-listen", f"{LOOPBACK}:0", "--stop-vault-on-exit", "--die-with-parent"]


def _check_installed() -> None:
    lacking = {}
    for extra, names in REQUIRED_MODULES.items():
        if missing := [name for name in names if importlib.util.find_spec(name) is None]:
            lacking[extra] = f"the {extra} lacks {', '.join(missing)}"
    if lacking:
        raise ConfigurationError(
            "no agent was given (--agent-socket) or found, and a private controller and agent cannot be started: "
            f"{'; '.join(lacking.values())}. Install them with: pip install 'everstep[{','.join(sorted(lacking))}]'"
        )


def _prune(logs: Path) -> None:
    by_age = sorted(logs.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[MAX_LOGS:]:
        old.unlink(missing_ok=True)
