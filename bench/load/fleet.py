"""The controller under measurement, as the process that operators run, and the crowds that make up its fleet."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.load import messages
from bench.load.statistics import Distribution
from everstep.bearer_tokens import TokenRole, mint
from everstep.client import Client
from everstep.host.processes import read_stat, status_field

AGENTS_PER_CROWD = 14_000
"""Below the limit of 20,000 files that a process has here."""
TICKS = os.sysconf("SC_CLK_TCK")
POLL_S = 0.05


class Controller:
    """``everstep-controller serve`` with an empty database; ended by ``end``.

    Args:
        settings: lines of TOML, for what has no option of its own.
        secret: the fleet's, where another controller has one already.
    """

    def __init__(self, directory: Path, database: str, settings: str, secret: str = "") -> None:
        self.directory = directory
        self.secret_file, ready, file = directory / "secret", directory / "ready.json", directory / "settings.toml"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secret or secrets.token_hex(32))
        file.write_text(settings)
        command = [sys.executable, "-m", "everstep_controller.main", "serve", "--listen", "127.0.0.1:0"]
        command += ["--settings", str(file)]
        command += ["--operators-listen", "127.0.0.1:0"]
        command += ["--database", database or f"sqlite:///{directory / 'controller.db'}"]
        command += ["--secret-file", str(self.secret_file), "--ready-file", str(ready), "--die-with-parent"]
        with (directory / "controller.log").open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log)
        while not ready.exists():
            if self.process.poll() is not None:
                raise SystemExit(self.log())
            time.sleep(0.01)
        told = json.loads(ready.read_text())
        self.address, self.operators_address = str(told["address"]), str(told["operators_address"])
        self.token = mint(self.secret_file.read_bytes().strip(), TokenRole.OPERATOR, "bench")
        self.client = Client(f"http://{self.operators_address}", self.token)

    def log(self) -> str:
        return (self.directory / "controller.log").read_text()[-4000:]

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        series = [line for line in self.client.metrics().splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in series)

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        fields = read_stat(Path(f"/proc/{self.process.pid}"))
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_bytes(self) -> int:
        if not (kib := int(status_field(self.process.pid, "VmRSS"))):
            raise SystemExit(f"the controller is gone:\n{self.log()}")
        return kib * 1024

    def pause(self, seconds: float) -> None:
        """Stops the whole process for a while, as a host that swaps or migrates does."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """SIGKILL; when, wall seconds."""
        at = time.time()
        self.process.kill()
        return at

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class CrowdProcess:
    """One process of agents."""

    def __init__(self, order: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "bench.load.crowd"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tell(order)

    def begin(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a crowd of agents died")
        return json.loads(line)

    def tell(self, order: dict[str, Any]) -> Any:
        self.begin(order)
        return self.answer()

    def end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(20)
        self._process.stdout.close()


class Fleet:
    """All crowds together: ``nodes`` agents, of which ``jobs`` jobs have 1,250 each (or all, in a smaller fleet).

    Args:
        apart: so many of the last agents are in a process of their own, so that what they do delays no other agent.
        standby: the controller that agents go to when the first one dies.
        spread: whether every agent has an address of its own; for fleets that hang up between beats.
    """

    def __init__(
        self,
        controller: Controller,
        nodes: int,
        *,
        jobs: int,
        apart: int = 0,
        spread: bool = False,
        standby: Controller | None = None,
    ) -> None:
        self.controller = controller
        self.standby = standby
        self.nodes = nodes
        self.jobs = jobs
        self.nodes_of_a_job = min(nodes, messages.NODES_OF_A_JOB)
        together = nodes - apart
        crowds = -(-together // AGENTS_PER_CROWD)
        bounds = [together * place // crowds for place in range(crowds + 1)] + ([nodes] if apart else [])
        self.crowds = [
            CrowdProcess(
                {
                    "addresses": [process.address for process in (controller, standby) if process is not None],
                    "secret_file": str(controller.secret_file),
                    "spread": spread,
                    "jobs": jobs,
                    "first": first,
                    "last": last,
                }
            )
            for first, last in itertools.pairwise(bounds)
        ]
        self._bounds = bounds

    def all(self, do: str, **order: Any) -> list[Any]:
        """Every crowd's answer to an order that all carry out at once."""
        for crowd in self.crowds:
            crowd.begin({"do": do, **order})
        return [crowd.answer() for crowd in self.crowds]

    def fail(self, kinds: list[str]) -> dict[str, float]:
        """As many nodes as ``kinds`` of faults (``bench.load.failure_mix``), spread over the fleet, report one each at
        once. Returns when each did, wall."""
        shares = [bound * len(kinds) // self.nodes for bound in self._bounds]
        for crowd, (before, through) in zip(self.crowds, itertools.pairwise(shares), strict=True):
            crowd.begin({"do": "fail", "kinds": kinds[before:through]})
        told: dict[str, float] = {}
        for crowd in self.crowds:
            told |= crowd.answer()
        return told

    def status(self) -> dict[str, Any]:
        """The crowds' counts, added up."""
        total: dict[str, Any] = {"phases": Counter(), "refusals": Counter()}
        for status in self.all("status"):
            for name, value in status.items():
                if isinstance(value, dict):
                    total[name].update(value)
                else:
                    total[name] = total.get(name, 0) + value
        return total

    def until(self, what: str, done: Callable[[dict[str, Any]], bool], deadline_s: float) -> dict[str, Any]:
        """Waits for the crowds to come so far."""
        end = time.perf_counter() + deadline_s
        while not done(status := self.status()):
            if time.perf_counter() > end or self.controller.process.poll() is not None:
                raise SystemExit(f"{what}: only {status} after {deadline_s:g} s\n{self.controller.log()}")
            time.sleep(POLL_S)
        return status

    def open(self) -> None:
        """Register all agents."""
        self.all("open", window=max(8, 1024 // len(self.crowds)))
        self.until("registering", lambda status: status["phases"]["shown"] >= self.nodes, 60 + self.nodes / 200)

    def join(self) -> None:
        """Forms the jobs and brings them to step."""
        joining = sum(self.all("join", nodes_of_a_job=self.nodes_of_a_job))
        deadline_s = 60 + joining / 100
        self.until("forming", lambda status: status["in_generation"] >= joining, deadline_s)
        self.until("resuming", lambda status: status["unreported"] == 0, deadline_s)

    def form_again(self, job: str) -> float:
        """End a job, and have its nodes' launchers offer them to it once more.

        Returns:
            Seconds from the offers until every node was told of the new generation, and every rank stepped in it.
        """
        generation = max(self.all("generation", job=job))
        self.controller.client.stop_job(job, reason="the bench forms it again")
        began = time.perf_counter()
        self.all("join", nodes_of_a_job=self.nodes_of_a_job, launcher=int(time.time() * 1000) + 1000, job=job)
        self.until_entered(job, generation + 1)
        self.until(f"{job} resuming", lambda status: status["unreported"] == 0, 60)
        return time.perf_counter() - began

    def until_entered(self, job: str, generation: int) -> float:
        """Wait until all nodes of the job were told of the generation. Returns when the last one was, wall seconds."""
        end = time.perf_counter() + 60
        heard: list[dict[str, float]] = []
        while sum(entered["count"] for entered in heard) < self.nodes_of_a_job:
            if time.perf_counter() > end:
                raise SystemExit(f"{job} never heard of generation {generation}: {heard}\n{self.controller.log()}")
            time.sleep(POLL_S)
            heard = self.all("entered", job=job, generation=generation)
        return max(entered["last"] for entered in heard)

    def sample(self) -> dict[str, Distribution]:
        """Return the crowds' measurements since the last sample."""
        return _distributions(self.all("sample"))

    def sample_apart(self) -> tuple[dict[str, Distribution], dict[str, Distribution]]:
        """Return the measurements of the last crowd and of all others separately."""
        *others, apart = self.all("sample")
        return _distributions([apart]), _distributions(others)

    def end(self) -> None:
        for crowd in self.crowds:
            crowd.end()


def _distributions(samples: list[dict[str, Any]]) -> dict[str, Distribution]:
    return {name: Distribution([sample[name] for sample in samples]) for name in ("beats", "reports", "lateness")}
