"""A controller and an agent for one launcher alone, when none was given or found.

They live in a directory of their own (``run_directory``) with a secret and a token made for the occasion, listen on
loopback, die with the launcher, and are started again when they die before it. Of a launcher that is killed the vault
stays for a while, with the checkpoints: a launcher of the same job that comes in time goes on with it (decision 0036).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from everstep.clock import Clock
from everstep.errors import ConfigurationError, Unavailable
from everstep.lineage import PARENT_VARIABLE
from everstep.tokens import TokenRole, mint
from trainer_hooks.launch.deaths import death
from trainer_hooks.launch.run_directory import RunDirectory, segment_dir
from trainer_hooks.launch.summary import read_detail, summary

log = logging.getLogger(__name__)

NODE = "local"
START_WAIT_S = 60.0
"""Until a service must say that it is ready; it takes about a second, on a loaded machine several."""
END_WAIT_S = 10.0
KEPT_LOGS = 40
"""Log files of earlier runs that are kept, two for each."""
RESTARTS = 5
RESTART_WINDOW_S = 60.0
"""So many unexpected ends of one service within this time are cured by another start; one more is no coincidence."""
POLL_S = 0.02
EARLY_KILLS = 3
"""Kills (by the kernel for want of memory, say) of one service in a row that it may meet before it is ready."""
AGENT_AWAY_S = 30.0
"""How long the vault is without agent and ranks at most, where all of them were killed at once, on a loaded machine."""
NEEDED = {
    "controller": ("controller.main", "fastapi", "uvicorn", "sqlalchemy", "alembic", "prometheus_client"),
    "agent": ("agent.main", "pynvml", "prometheus_client"),
}


class PrivateServices:
    """The pair of them.

    Args:
        state_dir: where logs stay, and the run directory is made.
        name: of the logs; the job's.
        clock: for the deadline of the start.
        linger_s: how long the vault waits for another launcher where this one is killed; None: not at all.
    """

    def __init__(self, state_dir: Path, name: str, clock: Clock, linger_s: float | None = None) -> None:
        self._state_dir = state_dir
        self._name = name
        self._clock = clock
        self._linger_s = linger_s
        self._place: RunDirectory | None = None
        self._serves = False
        self._services: list[Service] = []
        self._address = ""

    async def start(self) -> Path:
        """Starts both; returns the agent's socket once it is there.

        Raises ConfigurationError where a package is missing, or the directory cannot be written, Unavailable with the
        log's end where one does not come up.
        """
        _check_installed()
        logs = self._state_dir / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True, mode=0o700)
            _prune(logs)
            place = self._place = await asyncio.to_thread(RunDirectory, self._state_dir, self._name)
            run_dir = place.path
            if not place.taken_over:
                _write_secrets(run_dir)
        except OSError as error:
            raise ConfigurationError(
                f"logs and services of the launcher cannot be kept in {self._state_dir}: {error}; name another "
                "directory with --state-dir"
            ) from error
        controller = Service(
            "controller", logs / f"{self._name}.controller.log", run_dir / "controller.json", self._clock
        )
        self._services.append(controller)
        address = self._address = await self._start_controller(controller, run_dir)
        agent = Service("agent", logs / f"{self._name}.agent.log", run_dir / "agent" / "agent.json", self._clock)
        self._services.append(agent)
        await agent.start(lambda _: _agent_command(run_dir, address, self._linger_s))
        self._serves = True
        return run_dir / "agent" / "agent.sock"

    async def summary(self) -> list[str]:
        """Return what the controller makes of the job, in lines for people; nothing where there is none to ask."""
        if self._place is None or not self._serves:
            return []
        token = self._place.path / "operator.token"
        detail = await read_detail(f"http://{self._address}", token, self._name)
        return [] if detail is None else summary(detail)

    async def end(self) -> None:
        """Ends the agent, then the controller, and removes the run directory.

        One that was taken over stays where its services did not come up: what it holds may be wanted all the same.
        """
        for service in reversed(self._services):
            await service.end()
        self._services.clear()
        place, self._place = self._place, None
        if place is None:
            return
        if place.taken_over and not self._serves:
            log.warning("what the killed launcher left stays in memory: everstep vault list, everstep vault drop")
            place.leave()
        else:
            place.remove()

    async def _start_controller(self, service: Service, run_dir: Path) -> str:
        def command(last: Mapping[str, object] | None) -> list[str]:
            listen = str(last["address"]) if last is not None else "127.0.0.1:0"
            return _controller_command(run_dir, listen)

        ready = await service.start(command)
        token = run_dir / "operator.token"
        log.info(
            "to look: EVERSTEP_CONTROLLER=http://%s EVERSTEP_TOKEN_FILE=%s everstep status", ready["address"], token
        )
        return str(ready["address"])


class Service:
    """One of the pair: started, watched, started again, ended."""

    def __init__(self, name: str, log_file: Path, ready_file: Path, clock: Clock) -> None:
        self._name = name
        self._log_file = log_file
        self._ready_file = ready_file
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, command: Callable[[Mapping[str, object] | None], list[str]]) -> Mapping[str, object]:
        """Starts it and keeps it; returns what its ready file says.

        ``command`` makes the command line, given what the ready file said the last time (None at first). Raises
        Unavailable with the end of its log where it does not come up.
        """
        ready = await self._launch(command(None))
        self._watch = asyncio.create_task(self._keep(command, ready), name=f"keep {self._name}")
        return ready

    async def end(self) -> None:
        """SIGTERM, and SIGKILL to its process group where that is not enough."""
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
                await death(process)
        except TimeoutError:
            log.warning("the private %s did not end within %s s; killing it", self._name, END_WAIT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    async def _launch(self, command: list[str]) -> Mapping[str, object]:
        """Starts it until it is ready; one that is killed meanwhile is not at fault, and is started again."""
        for _ in range(EARLY_KILLS):
            try:
                return await self._launch_once(command)
            except Unavailable as error:
                status = self._process.returncode if self._process is not None else None
                if status is None or status >= 0:
                    raise
                log.warning("%s", error)
        return await self._launch_once(command)

    async def _launch_once(self, command: list[str]) -> Mapping[str, object]:
        try:
            process = self._process = self._begin(command)
        except OSError as error:
            raise Unavailable(f"the private {self._name} cannot be started: {error}") from error
        deadline = self._clock.monotonic() + START_WAIT_S
        while (ready := self._read_ready(process.pid)) is None:
            if process.poll() is not None:
                raise Unavailable(self._failure(f"ended with status {process.returncode} while starting"))
            if self._clock.monotonic() > deadline:
                raise Unavailable(self._failure(f"was not ready within {START_WAIT_S:g} s"))
            await asyncio.sleep(POLL_S)
        return ready

    def _begin(self, command: list[str]) -> subprocess.Popen[bytes]:
        self._ready_file.unlink(missing_ok=True)
        descriptor = os.open(self._log_file, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # A session of its own: Ctrl-C in the terminal is for the launcher, which ends it in order.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    def _read_ready(self, pid: int) -> Mapping[str, object] | None:
        try:
            said: dict[str, object] = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return None
        return said if said.get("pid") == pid else None

    async def _keep(
        self, command: Callable[[Mapping[str, object] | None], list[str]], ready: Mapping[str, object]
    ) -> None:
        ends: deque[float] = deque(maxlen=RESTARTS + 1)
        while True:
            process = self._process
            assert process is not None
            status = await death(process)
            ends.append(self._clock.monotonic())
            if len(ends) > RESTARTS and ends[-1] - ends[0] < RESTART_WINDOW_S:
                log.error(
                    "the private %s ended %d times within %g s, the last time with status %s; training goes on without "
                    "it (log: %s)",
                    self._name,
                    len(ends),
                    RESTART_WINDOW_S,
                    status,
                    self._log_file,
                )
                return
            log.warning(
                "the private %s ended with status %s; starting it again (log: %s)", self._name, status, self._log_file
            )
            try:
                ready = await self._launch(command(ready))
            except Unavailable as error:
                log.error("%s", error)
                return

    def _failure(self, what: str) -> str:
        try:
            lines = self._log_file.read_text(errors="replace").splitlines()[-15:]
        except OSError:
            lines = []
        shown = "\n".join(f"  | {line}" for line in lines) or "  | (nothing)"
        return f"the private {self._name} {what}; the end of {self._log_file}:\n{shown}"


# -P below: "agent" and "controller" are names that a user's own directory may have too.


def _controller_command(run_dir: Path, listen: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "controller.main", "serve", "--listen", listen]
    command += ["--database", f"sqlite:///{run_dir / 'controller.db'}", "--secret-file", str(run_dir / "secret")]
    return [*command, "--preset", "lab", "--ready-file", str(run_dir / "controller.json"), "--die-with-parent"]


def _agent_command(run_dir: Path, controller: str, linger_s: float | None) -> list[str]:
    command = [sys.executable, "-P", "-m", "agent.main", "--node", NODE, "--controller", f"http://{controller}"]
    command += ["--token-file", str(run_dir / "agent.token"), "--run-dir", str(run_dir / "agent")]
    command += ["--segment-dir", str(segment_dir(run_dir)), "--vault-listen", "127.0.0.1:0"]
    if linger_s is None:
        command += ["--leave-vault", "agent", "--vault-linger-s", str(AGENT_AWAY_S)]
    else:
        command += ["--leave-vault", "parent", "--vault-linger-s", str(linger_s)]
    return [*command, "--metrics-listen", "127.0.0.1:0", "--stop-vault", "--die-with-parent"]


def _write_secrets(run_dir: Path) -> None:
    secret = secrets.token_hex(32)
    _write_private(run_dir / "secret", secret)
    _write_private(run_dir / "agent.token", mint(secret.encode(), TokenRole.AGENT, NODE))
    _write_private(run_dir / "operator.token", mint(secret.encode(), TokenRole.OPERATOR, "launcher"))


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)


def _check_installed() -> None:
    missing = {extra: [name for name in names if not _installed(name)] for extra, names in NEEDED.items()}
    gone = {extra: names for extra, names in missing.items() if names}
    if gone:
        what = "; ".join(f"the {extra} lacks {', '.join(names)}" for extra, names in gone.items())
        raise ConfigurationError(
            "no agent was given (--agent-socket) or found, and a private controller and agent cannot be started: "
            f"{what}. Install them with: pip install 'everstep[{','.join(sorted(gone))}]'"
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _prune(logs: Path) -> None:
    by_age = sorted(logs.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[KEPT_LOGS:]:
        old.unlink(missing_ok=True)
