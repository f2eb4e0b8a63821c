"""The trainer example as its pod runs it, in namespaces of its own, beside an agent that is as in the chart's pod.

Process ids, mounts and network are the container's. It shares with the agent what the example mounts: the directory of
the sockets, read-only, and the vault's directory below /dev/shm. The rest of the machine is read-only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from everstep.bearer_tokens import TokenRole, mint
from tests.integration import step_log
from tests.support.fleet.controllers import LONG_SILENCES, SECRET, ControllerProcess
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until

ROOT = Path(__file__).parents[3]
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]
CONTAINER = ["--pid", "--fork", "--mount-proc", "--net", "--kill-child"]
DEADLINE_S = 120.0


def _cannot() -> bool:
    if shutil.which("unshare") is None:
        return True
    return subprocess.run([*UNSHARE, *CONTAINER, "true"], capture_output=True, check=False).returncode != 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_cannot(), reason="this machine makes no namespaces for this user"),
]

# The base is outside /tmp, /run and /dev/shm, which become the container's own.
MOUNTS = """
set -e
base=$1 kind=$2 memory=$3; shift 3
mount --bind "$memory" "$base/memory"
mount -t tmpfs tmpfs /run
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /run/everstep /dev/shm/everstep
mount --bind "$base/run" /run/everstep
mount --bind "$base/memory" /dev/shm/everstep
if [ $kind = trainer ]; then
  mount -o remount,bind,ro /run/everstep
  mount -t tmpfs -o mode=1777 tmpfs /tmp
  mount --bind "$base/work" "$base/work"
  mount -o remount,bind,ro /
  python=$1
  "$python" -c 'import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1))'  # SIOCSIFFLAGS, IFF_UP
fi
exec "$@"
"""
TRAIN = """
import os, pathlib, signal, time, torch
import everstep

HERE = pathlib.Path(__file__).parent

def once(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100_000):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        with (HERE / "steps").open("a") as file:
            file.write(f"{run.rank} {run.generation} {step}\\n")
        if run.rank == 1 and (HERE / "kill").exists() and once("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if run.rank == 1 and (HERE / "stop").exists() and once("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if run.rank == 1 and (HERE / "again").exists() and once("killed-again"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (HERE / "goal").exists() and step >= int((HERE / "goal").read_text()):
            break

everstep.main(train)
"""


class Node:
    """One machine: what its agent and its trainers share, and its processes."""

    def __init__(self, base: Path, memory: Path, controller: ControllerProcess) -> None:
        self.base, self.memory, self.controller = base, memory, controller
        self.work = base / "work"
        for name in ("run", "memory", "work"):
            (base / name).mkdir()
        (self.work / "train.py").write_text(TRAIN)
        (base / "token").write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        self.started: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()

    def _start(self, kind: str, namespaces: list[str], command: list[str]) -> subprocess.Popen[bytes]:
        shell = ["sh", "-c", MOUNTS, "sh", str(self.base), kind, str(self.memory), *command]
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("EVERSTEP_", "TMPDIR"))}
        environment = ours | {"PYTHONPATH": ":".join(sys.path), "XDG_STATE_HOME": "/tmp/state", "OMP_NUM_THREADS": "1"}
        with (self.base / f"{kind}.log").open("ab") as log:
            made = subprocess.Popen(
                [*UNSHARE, *namespaces, *shell], stdout=log, stderr=log, cwd=self.work, env=environment
            )
        self.started.append(made)
        return made

    def start_agent(self) -> dict[str, int]:
        """Starts an agent in the machine's process ids and network, as hostPID and hostNetwork do."""
        (self.base / "run" / "agent.json").unlink(missing_ok=True)
        command = [sys.executable, "-m", "everstep_agent.main", "--node=n1", f"--controller={self.controller.url}"]
        command += [f"--token-file={self.base / 'token'}", "--run-dir=/run/everstep", "--virtual=default:2"]
        self._start("agent", [], [*command, "--segment-dir=/dev/shm/everstep/n1"])
        ready = until((self.base / "run" / "agent.json").exists, "the agent is ready")
        assert ready, self.log("agent")
        ready_file: dict[str, int] = msgspec.json.decode((self.base / "run" / "agent.json").read_bytes())
        self.pids |= {ready_file["pid"], ready_file["vault_pid"], ready_file["sensor_pid"]}
        return ready_file

    def start_trainer(self) -> subprocess.Popen[bytes]:
        """Starts the example's command line, with two ranks on processors and a script of this test."""
        pod = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "examples" / "trainer-pod.yaml").read_text())
        (container,) = pod["spec"]["containers"]
        flags = [word for word in container["args"] if word.startswith("--") and "steps" not in word]
        flags = [word.replace("=gpu", "=2") for word in flags]
        command = [sys.executable, "-m", "everstep_trainer.launch", *flags, str(self.work / "train.py")]
        return self._start("trainer", CONTAINER, command)

    def log(self, kind: str) -> str:
        return (self.base / f"{kind}.log").read_text()

    def steps(self) -> list[tuple[int, int, int]]:
        """(rank, generation, step) of every finished step."""
        return [(rank, generation, step) for rank, generation, step in step_log.rows(self.work)]

    def wait_for(self, generation: int, steps: int) -> int:
        """Waits until both ranks have done ``steps`` steps in a generation; returns the generation's first step."""

        def enough() -> bool:
            found = [rank for rank, seen, _ in self.steps() if seen >= generation]
            return min(found.count(0), found.count(1)) >= steps

        end = time.perf_counter() + DEADLINE_S
        while not enough():
            assert time.perf_counter() < end, f"no generation {generation}:\n{self.log('trainer')}\n{self.log('agent')}"
            time.sleep(0.02)
        return min(step for _, seen, step in self.steps() if seen >= generation)

    def newest(self) -> tuple[int, int]:
        """The newest generation, and its last step."""
        generation = max(seen for _, seen, _ in self.steps())
        return generation, max(step for _, seen, step in self.steps() if seen == generation)

    def clean_up(self) -> None:
        for pid in self.pids:
            if is_running(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    base = Path(tempfile.mkdtemp(prefix="ev-pod-", dir="/var/tmp"))
    memory = Path(tempfile.mkdtemp(prefix="ev-pod-", dir="/dev/shm"))
    settings = tmp_path / "settings.toml"
    settings.write_text(f"{LONG_SILENCES}")
    controller = ControllerProcess(tmp_path, arguments=("--settings", str(settings))).start()
    node = Node(base, memory, controller)
    try:
        yield node
    finally:
        node.clean_up()
        controller.kill()
        shutil.rmtree(base)
        shutil.rmtree(memory)


@pytest.mark.nightly
def test_trainer_in_container_survives_kills_and_a_new_agent(node: Node) -> None:
    agent = node.start_agent()
    trainer = node.start_trainer()
    node.wait_for(1, 10)

    before, last = node.newest()
    (node.work / "kill").touch()
    assert node.wait_for(before + 1, 5) >= last, "a killed rank is replaced, and no committed step is repeated"

    before, _ = node.newest()
    (node.work / "stop").touch()  # the agent sees the process's state and kills it, across process namespaces
    node.wait_for(before + 1, 5)
    assert list((node.memory / "n1").rglob("own-*")), "the slots lie in the shared directory"

    for pid in (agent["pid"], agent["sensor_pid"], agent["vault_pid"]):  # as when the agent's pod is replaced
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.start_agent()
    before, last = node.newest()
    (node.work / "again").touch()
    assert node.wait_for(before + 1, 5) > 10, "the next agent's vault took over the checkpoints"

    step_log.set_goal(node.work, node.newest()[1] + 10)
    assert trainer.wait(DEADLINE_S) == 0, node.log("trainer")
