"""The processes of the demonstration: one controller, and per node an agent with its vault and a launcher."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from everstep.bearer_tokens import TokenRole, mint

START_DEADLINE_S = 180.0
PREFIX = "everstep-demo-"
OWNER = "owner.pid"


def wait_for(condition: Callable[[], bool], what: str, deadline_s: float = START_DEADLINE_S) -> None:
    """Returns when ``condition`` holds. Raises TimeoutError naming ``what`` when it does not within the deadline."""
    end = time.perf_counter() + deadline_s
    while not condition():
        if time.perf_counter() > end:
            raise TimeoutError(f"{what}: not within {deadline_s:.0f} s")
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """``pid`` and every process below it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, []))
    return found


def sweep() -> None:
    """Removes what worlds left behind whose process was killed: their processes have ended with it by themselves."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        try:
            owner = int((folder / OWNER).read_text())
        except (OSError, ValueError):
            continue
        if not Path(f"/proc/{owner}").exists():
            _remove(folder)
            _remove(Path("/dev/shm", folder.name))


class Node:
    """One pretended machine: a virtual GPU, an agent with its vault, a launcher with its rank, a kernel log."""

    virtual = "default:1"
    """The virtual machine: ``default:N`` has N GPUs."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.world = world
        self.folder = world.folder / name
        self.folder.mkdir(mode=0o700)
        self.kernel_log = self.folder / "kmsg"
        self.kernel_log.touch()
        self.control = self.folder / "gpu.json"
        self.boots = 0
        self.agent: subprocess.Popen[bytes] | None = None
        self.launcher: subprocess.Popen[bytes] | None = None

    @property
    def agent_socket(self) -> Path:
        return self.folder / "agent.sock"

    @property
    def environment(self) -> dict[str, str]:
        """What everything that the machine runs has in its environment, and can be known by."""
        return {"DEMO_STEPS": str(self.world.steps.resolve()), "DEMO_NODE": self.name}

    def boot(self, *, vault_outlives: bool = False) -> None:
        """A new life of the machine: its agent starts, as systemd would start it."""
        self.boots += 1
        self.set_gpu()
        self.start_agent(vault_outlives=vault_outlives)

    def start_agent(self, *, vault_outlives: bool = False) -> None:
        """Starts the agent. ``vault_outlives``: as on a real node; neither of the two then ends with this process."""
        token = self.folder / "token"
        self.world.write_secret(token, mint(self.world.secret, TokenRole.AGENT, self.name))
        (self.folder / "agent.json").unlink(missing_ok=True)
        self.agent = self.world.start(
            f"{self.name}-agent",
            [
                "-m",
                "everstep_agent.main",
                "--node",
                self.name,
                "--controller",
                self.world.url,
                "--token-file",
                str(token),
            ]
            + ["--run-dir", str(self.folder), "--segment-dir", str(self.world.shared_memory / self.name)]
            + ["--virtual", self.virtual, "--virtual-control", str(self.control), "--kernel-log", str(self.kernel_log)]
            + ["--rack", f"rack-{self.name}", *([] if vault_outlives else ["--die-with-parent"])],
            self.environment,
        )

    def set_gpu(self, **state: object) -> None:
        """Writes the virtual machine's control file: its boot, and the state of GPU 0."""
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps({"boot_id": f"{self.name}-boot-{self.boots}", "gpus": {"0": state}}))
        new.rename(self.control)

    @property
    def booted(self) -> bool:
        return (self.folder / "agent.json").exists()

    def join(self, command: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Starts the launcher with the training script."""
        everything = {**self.environment, "GLOO_SOCKET_IFNAME": "lo", **environment}
        self.launcher = self.world.start(f"{self.name}-train", command, everything)

    def processes(self) -> list[int]:
        """Everything that the machine runs, by its environment: also what outlived the process that started it."""
        wanted = {f"{name}={value}".encode() for name, value in self.environment.items()}
        return [pid for pid in _all_processes() if wanted <= set(_environment_of(pid))]

    def rank_pid(self, generation: int) -> int | None:
        """The process of this node that has made its newest step in ``generation``; None where there is none."""
        if self.launcher is None:
            return None
        for pid in descendants(self.launcher.pid):
            row = last_row(self.world.steps / f"{self.name}-{pid}.jsonl")
            if row is not None and row["generation"] == generation:
                return pid
        return None

    def kill(self) -> None:
        """SIGKILL to everything the machine runs, at once: agent, sensors, vault, launcher, fork server, rank."""
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for process in (self.launcher, self.agent):
                if process is not None:
                    process.wait()


def last_row(log: Path) -> dict[str, Any] | None:
    """The last whole line of a rank's step log; None where there is no log, or nothing in it yet."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # cut short: by the beginning of what was read, or by a SIGKILL
            continue
        if isinstance(row, dict):
            return row
    return None


def _all_processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    """A process's environment as it was at its start; empty for one that is gone, dead or another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


class World:
    """Everything the demonstration starts. A context manager: nothing is left behind.

    ``settings``: lines of TOML for the controller, beside the lab preset.
    """

    settings = ""

    def __init__(self, out: Path, names: list[str]) -> None:
        self.out = out
        self.logs = out / "logs"
        self.steps = out / "steps"
        for folder in (self.logs, self.steps):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # short: unix socket paths end at 107 bytes
        (self.folder / OWNER).write_text(str(os.getpid()))
        self.shared_memory = Path("/dev/shm", self.folder.name)
        self.secret = secrets.token_hex(32).encode()
        self.secret_file = self.folder / "secret"
        self.write_secret(self.secret_file, self.secret.decode())
        self.operator_token = mint(self.secret, TokenRole.OPERATOR, "demo")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.url = ""
        self.controller: subprocess.Popen[bytes] | None = None
        self.nodes = {name: Node(self, name) for name in names}

    def write_secret(self, path: Path, text: str) -> None:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def start(
        self, name: str, arguments: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts ``python ARGUMENTS`` with its output in ``logs/NAME.log``."""
        with (self.logs / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONUNBUFFERED": "1",
                    "XDG_STATE_HOME": str(self.folder / "state"),  # nothing is left in the user's own
                    **(environment or {}),
                },
            )
        self.processes.append(process)
        return process

    def start_controller(self) -> None:
        """Starts the controller, on the port it had before if it had one, and waits until it serves."""
        self.spawn_controller()
        wait_for(self.controller_ready.exists, "the controller is ready")
        self.url = "http://" + json.loads(self.controller_ready.read_text())["address"]

    @property
    def controller_ready(self) -> Path:
        return self.folder / "controller.json"

    def spawn_controller(self) -> None:
        """Starts the controller and does not wait."""
        ready, file = self.controller_ready, self.folder / "settings.toml"
        ready.unlink(missing_ok=True)
        file.write_text(self.settings)
        listen = self.url.removeprefix("http://") or "127.0.0.1:0"
        self.controller = self.start(
            "controller",
            [
                "-m",
                "everstep_controller.main",
                "serve",
                "--listen",
                listen,
                "--preset",
                "lab",
                "--ready-file",
                str(ready),
            ]
            + ["--database", f"sqlite:///{self.folder}/controller.sqlite", "--secret-file", str(self.secret_file)]
            + ["--settings", str(file), "--die-with-parent"],
        )

    def boot_nodes(self, *, vaults_outlive: bool = False, deadline_s: float = START_DEADLINE_S) -> None:
        """Boots every machine, and waits until all their agents are up."""
        for node in self.nodes.values():
            node.boot(vault_outlives=vaults_outlive)
        for node in self.nodes.values():
            wait_for(lambda node=node: node.booted, f"the agent of {node.name} is up (see {self.logs})", deadline_s)  # type: ignore[misc]

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything, gently first, then surely, and removes folder and shared memory."""
        with _deferred_interrupts():
            launchers_first = sorted(
                self.processes, key=lambda p: b"trainer" not in " ".join(map(str, p.args)).encode()
            )
            for process in launchers_first:
                if process.poll() is None:
                    process.terminate()
            end = time.perf_counter() + 5
            while time.perf_counter() < end and any(process.poll() is None for process in self.processes):
                time.sleep(0.02)
            for process in self.processes:
                if process.poll() is None:
                    for pid in reversed(descendants(process.pid)):
                        os.kill(pid, signal.SIGKILL)
                    process.wait()
            for node in self.nodes.values():
                node.kill()  # what outlived its agent
            for path in (self.folder, self.shared_memory):
                _remove(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _deferred_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not cut the cleaning-up short."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
