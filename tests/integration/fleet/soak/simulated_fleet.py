"""The fleet of a soak: its processes, scheduled repairs, and the detection of processes that end by themselves."""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.client import Call, Client, calls
from everstep.errors import EverstepError
from everstep.ids import Version
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.operator import ChangeResult
from examples.demo.story import Run
from examples.demo.watch import Watch
from examples.demo.world import Node, World, descendants, wait_for

JOB = "soak"
NAMES = ["n1", "n2", "n3", "n4", "n5"]
RANKS, FEWEST = 4, 3
POLL_S = 0.02
BEGUN_WITHIN_S = 180.0
SETTLING_S = 60.0
"""Seconds within which the daemons and their children must end."""
_PR_SET_CHILD_SUBREAPER = 36


class Losses(msgspec.Struct, frozen=True):
    """The job's state when a node's memory was lost."""

    victim: str
    generation: int
    committed: Version | None
    seated: bool


class Fleet:
    """The world with a calendar of repairs. Call ``tick`` often.

    ``down``: nodes with a fault that is not repaired yet. ``problems``: processes that ended without a fault.
    """

    def __init__(self, world: World, layout: str, pace_s: float) -> None:
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # orphans become children, so that they are found and ended
        self.world = world
        self.goal = world.folder / "goal"
        self.down: set[str] = set()
        self.problems: list[str] = []
        self.evictable: set[str] = set()
        self._environment = {
            "SOAK_LAYOUT": layout,
            "SOAK_GOAL": str(self.goal),
            "SOAK_PACE_S": str(pace_s),
            "OMP_NUM_THREADS": "1",
        }
        self.watch = Watch(self.client, JOB, lambda event: None)
        self._calendar: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._lost: Losses | None = None

    def client(self) -> Client:
        return Client(self.world.url, self.world.operator_token)

    def assemble(self) -> None:
        """Boot all nodes, form the job on four of them, and let the fifth wait as a spare."""
        self.world.start_controller()
        self.watch.start()
        nodes = list(self.world.nodes.values())
        for node in nodes:
            node.boot(vault_outlives=True)
        for node in nodes:
            wait_for(lambda node=node: node.booted, f"the agent of {node.name} is up")  # type: ignore[misc]
        for node in nodes[:RANKS]:
            self.launch(node)
        self.watch.wait(lambda: len(self.watch.roster) == RANKS and self.step() > 5, "the job steps", BEGUN_WITHIN_S)
        self.launch(nodes[RANKS])
        self.watch.wait(lambda: len(self.ready()) == len(nodes), "the spare waits", BEGUN_WITHIN_S)

    def launch(self, node: Node) -> None:
        """Start the node's launcher, as a scheduler would."""
        command = ["-m", "everstep_trainer.launch", "--nnodes", f"{FEWEST}:{RANKS}", "--nproc-per-node", "1"]
        command += ["--job", JOB, "--standbys", "1", "--standby-delay-s", "0.5", "--max-restarts", "1000"]
        command += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket), "--join-wait-s", "30"]
        command += ["--hang-threshold-s", "1.5", "--digest-interval", "1", "--die-with-parent"]
        node.join([*command, "-m", "tests.integration.fleet.soak.train"], self._environment)

    @property
    def _may_end(self) -> bool:
        return self.goal.exists() or self.is_over

    def finish(self, margin_steps: int, deadline_s: float) -> int:
        """Wait until all nodes are back, announce the last step, wait for the job's end, and return that step.

        Raises TimeoutError that names the missed condition.
        """
        if self.is_over:
            raise TimeoutError(self.standing())
        self.wait(lambda: not self._calendar, "all repairs are made", deadline_s)
        self.wait(lambda: len(self.ready()) == len(NAMES), "every node is back in the job", deadline_s, self.standing)
        self.wait(lambda: len(self.watch.roster) == RANKS, "the job has its full size", deadline_s, self.standing)
        last = self.step() + margin_steps
        draft = self.goal.with_suffix(".new")
        draft.write_text(str(last))
        draft.rename(self.goal)
        for node in self.world.nodes.values():
            assert node.launcher is not None
            wait_for(lambda node=node: node.launcher.poll() is not None, f"the launcher on {node.name} ends")  # type: ignore[misc]
            if node.launcher.returncode:
                self.problems.append(f"the launcher on {node.name} ended with {node.launcher.returncode}")
        return last

    def leave(self) -> list[str]:
        """End agents and controller in order, and return the processes and files that should be gone."""
        self.watch.close()
        assert self.world.controller is not None
        daemons = [node.agent for node in self.world.nodes.values() if node.agent is not None]
        for daemon in (*daemons, self.world.controller):
            daemon.terminate()
        for daemon in (*daemons, self.world.controller):
            try:
                if status := daemon.wait(SETTLING_S):
                    self.problems.append(f"{daemon.args!r} ended with {status}")
            except subprocess.TimeoutExpired:
                self.problems.append(f"{daemon.args!r} does not end")
        return self._left()

    def _left(self) -> list[str]:
        end = time.perf_counter() + SETTLING_S
        while (left := self._processes_left()) and time.perf_counter() < end:
            time.sleep(0.2)
        memory = [path for path in self.world.shared_memory.rglob("*") if not path.is_dir()]
        sockets = [path for path in self.world.folder.rglob("*") if path.is_socket()]
        return [*left, *map(str, memory), *map(str, sockets)]

    def _processes_left(self) -> list[str]:
        """Return the living descendants of this process, which adopts all orphans."""
        self._reap()
        return [f"process {pid}: {name(pid)}" for pid in descendants(os.getpid())[1:] if state(pid) not in ("", "Z")]

    def _reap(self) -> None:
        """Reap orphans that have ended, but no children that a ``Popen`` object waits for."""
        known = {process.pid for process in self.world.processes}
        for pid in descendants(os.getpid())[1:]:
            if pid not in known and state(pid) == "Z" and _parent(pid) == os.getpid():
                os.waitpid(pid, os.WNOHANG)

    def later(self, delay_s: float, repair: Callable[[], object]) -> None:
        """Schedule a call of ``repair`` in ``delay_s`` seconds."""
        heapq.heappush(self._calendar, (time.perf_counter() + delay_s, next(self._number), repair))

    def tick(self) -> None:
        """Make the repairs that are due, and look for processes that ended without a fault."""
        while self._calendar and self._calendar[0][0] <= time.perf_counter():
            heapq.heappop(self._calendar)[2]()
        self._look()

    def pause(self, seconds: float) -> None:
        """Let time pass, and make repairs meanwhile."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.tick()
            time.sleep(min(POLL_S, left))

    def wait(
        self, condition: Callable[[], bool], expected: str, deadline_s: float, detail: Callable[[], str] = str
    ) -> None:
        """Wait until ``condition`` holds. Raises TimeoutError with ``expected`` and ``detail``."""
        end = time.perf_counter() + deadline_s
        while not condition():
            if time.perf_counter() > end:
                raise TimeoutError(f"{expected}: not within {deadline_s:.0f} s. {detail()}")
            self.pause(POLL_S)

    @property
    def is_over(self) -> bool:
        """Whether the job has failed."""
        return self.watch.job is not None and self.watch.job.summary.state is JobState.FAILED

    def _look(self) -> None:
        """Note daemons that ended by themselves as problems, and start them again, as systemd would."""
        for node in self.world.nodes.values():
            if node.name in self.down:
                continue
            if node.agent is not None and node.agent.poll() is not None:
                self.problems.append(f"the agent of {node.name} ended by itself with {node.agent.returncode}")
                node.start_agent(vault_outlives=True)
            if node.launcher is not None and node.launcher.poll() is not None and not self._may_end:
                self.problems.append(f"the launcher on {node.name} ended by itself with {node.launcher.returncode}")
                self.launch(node)

    def ready(self) -> set[str]:
        """Return the nodes without a fault that have a seat in the job or could take one."""
        job = self.watch.job
        return {*self.watch.roster, *(job.spares if job else ())} - self.down

    def seated(self) -> list[Node]:
        """Return the roster's nodes without a fault, in the order of their names."""
        return [self.world.nodes[name] for name in sorted(self.watch.roster - self.down)]

    def untouched(self) -> list[Node]:
        return [self.world.nodes[name] for name in NAMES if name not in self.down]

    def standing(self) -> str:
        """Describe the state of nodes and job in a line."""
        nodes = ", ".join(f"{n.node} {n.state.value} ({n.reason})" for n in self.watch.nodes)
        job = self.watch.job
        return (
            f"down {sorted(self.down)}; {nodes}; job {job.summary if job else None}, unable "
            f"{job.ineligible_nodes if job else ''}"
        )

    def step(self) -> int:
        """Return the newest step that all ranks of a generation finished."""
        return max((step.step for step in Run.read(self.world.steps).finished), default=0)

    def may_lose_memory(self) -> bool:
        """Return whether a version has been stored on two nodes again since the last loss of memory."""
        job = self.watch.job
        if job is None or job.summary.committed is None or job.summary.committed.generation != job.summary.generation:
            return False
        if self._lost is None:
            return True
        answered = job.summary.generation > self._lost.generation or not self._lost.seated
        return answered and job.summary.committed != self._lost.committed

    def memory_lost(self, node: Node, *, leaves: bool = True) -> None:
        """Note that the memory of ``node`` is lost. ``leaves``: the node loses its seat too."""
        assert self.watch.job is not None
        summary = self.watch.job.summary
        seated = leaves and node.name in self.watch.roster
        self._lost = Losses(node.name, summary.generation, summary.committed, seated)

    def agent_back(self, node: Node) -> None:
        node.start_agent(vault_outlives=True)
        self.down.discard(node.name)

    def launcher_back(self, node: Node) -> None:
        self.launch(node)
        self.down.discard(node.name)

    def power_off(self, node: Node) -> None:
        """Kill the machine and delete its memory."""
        self.down.add(node.name)
        node.kill()
        shutil.rmtree(self.world.shared_memory / node.name, ignore_errors=True)

    def power_on(self, node: Node) -> None:
        """Boot the machine. Its launcher starts when the agent serves."""
        node.boot(vault_outlives=True)
        self._launch_when_booted(node)

    def _launch_when_booted(self, node: Node) -> None:
        if node.booted:
            self.launcher_back(node)
        else:
            self.later(0.1, lambda: self._launch_when_booted(node))

    def controller_back(self) -> None:
        self.world.spawn_controller()

    def ask(self, node: Node, order: Callable[..., Call[ChangeResult]]) -> str:
        """Give an operator's order, and return the answer."""
        try:
            return self.client().send(order(node.name, reason="the soak says so")).sentence
        except EverstepError as error:
            return f"refused: {error}"

    def readmit(self, node: Node) -> None:
        """Repeat the order to readmit until the controller takes it."""
        if self.watch.state(node.name) is NodeState.HEALTHY or "refused" not in self.ask(node, calls.readmit):
            self.down.discard(node.name)
        else:
            self.later(0.3, lambda: self.readmit(node))


def name(pid: int) -> str:
    """Return a process's name (``ps -o comm``), or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def state(pid: int) -> str:
    """Return the kernel's state letter of a process, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def named(node: Node, prefix: str) -> list[int]:
    """Return the node's living processes with names that begin with ``prefix``."""
    return [pid for pid in node.processes() if name(pid).startswith(prefix) and state(pid) != "Z"]


def end(pid: int, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal, and return False if the process is gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def undisturbed(world: World, layout: str, last: int) -> Run:
    """Run the same steps under torchrun without faults. Raises CalledProcessError if they fail."""
    folder = world.out / "undisturbed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    goal = folder / "goal"
    goal.write_text(str(last))
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(RANKS),
        "--standalone",
        "-m",
        "tests.integration.fleet.soak.train",
    ]
    environment = {"SOAK_LAYOUT": layout, "SOAK_GOAL": str(goal), "SOAK_PACE_S": "0", "OMP_NUM_THREADS": "1"}
    environment |= {"DEMO_STEPS": str(folder), "DEMO_NODE": "undisturbed", "GLOO_SOCKET_IFNAME": "lo"}
    process = world.start("undisturbed", command, environment)
    if status := process.wait():
        raise subprocess.CalledProcessError(status, command)
    return Run.read(folder)
