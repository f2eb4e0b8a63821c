"""Run a program under everstep-launch or torchrun, and collect what is left of the run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from bench.calm.program import FOLDER_VARIABLE, PACE_VARIABLE, Program
from bench.processes import marked_processes
from everstep.cli.context import local_runs, state_dir
from everstep.client import Client, read_token
from everstep.errors import EverstepError
from everstep.host.processes import send_signal
from everstep.receipts.receipt_files import stored_receipts
from everstep.wire.v1.operator import Event
from everstep.wire.v1.receipts import JobReceipt

ROOT = Path(__file__).parents[2]
MARK = "CALM_RUN"
"""Variable in the environment of all processes of a run."""
SHARED_MEMORY = Path("/dev/shm")
POLL_S, END_S, LEFT_S = 0.2, 30.0, 3.0
IN_A_MOUNT_NAMESPACE = 'mount -t tmpfs -o size="$0" tmpfs /dev/shm && exec "$@"'
RANK_MODULE = "bench.calm.rank"

Note = dict[str, Any]


@dataclass
class Evidence:
    """What one job of a program left.

    Attributes:
        status: Exit status; None if it had to be killed.
        seconds: How long it ran.
        output: What the launcher and the ranks printed.
        notes: What the ranks wrote down, in order of time.
        events: Lines of the controller's event log.
        receipt: The job's receipt.
        left: Processes and shared memory that outlived the launcher.
        check: What the program's check says.
    """

    status: int | None
    seconds: float
    output: str
    notes: list[Note] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    receipt: JobReceipt | None = None
    left: list[str] = field(default_factory=list)
    check: str = ""

    def of_kind(self, kind: str) -> list[Note]:
        """Return the notes of a kind."""
        return [note for note in self.notes if note["kind"] == kind]

    def losses(self) -> dict[int, float]:
        """Return rank 0's losses by step, each as it was computed last."""
        return {note["step"]: note["loss"] for note in self.of_kind("step") if note["rank"] == 0}

    def digests(self) -> dict[int, str]:
        """Return the digest of the final parameters by rank."""
        return {note["rank"]: note["digest"] for note in self.of_kind("final")}


def can_mount() -> bool:
    """Return whether this process may make a mount namespace."""
    probe = ["unshare", "--mount", "sh", "-c", IN_A_MOUNT_NAMESPACE, "1m", "true"]
    with contextlib.suppress(OSError):
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


def run_program(program: Program, logs: Path) -> list[Evidence]:
    """Run all jobs of a program at once under everstep-launch, with its surroundings.

    Args:
        program: The program.
        logs: Folder that gets the output, the notes and the events of each job.
    """
    with tempfile.TemporaryDirectory(prefix="calm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        jobs = []
        for number in range(program.jobs):
            notes = folder / f"notes-{number}"
            notes.mkdir()
            variables = stack.enter_context(program.beside(notes)) if program.beside else {}
            jobs.append(stack.enter_context(_Job(program, notes, folder, variables)))
        found = [job.finish() for job in jobs]
        for number, (job, evidence) in enumerate(zip(jobs, found, strict=True)):
            _keep(logs / f"{program.name}-{number}" if program.jobs > 1 else logs / program.name, job, evidence)
    return found


def run_plainly(program: Program) -> Evidence:
    """Run a program under torchrun, without pauses, for its losses."""
    with tempfile.TemporaryDirectory(prefix="calm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(mock.patch.dict(os.environ, {PACE_VARIABLE: "0"}))
        variables = stack.enter_context(program.beside(folder)) if program.beside else {}
        environment = _environment(folder, folder, variables)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(program.ranks), "-m", RANK_MODULE, program.name]
        began = time.monotonic()
        log = folder / "torchrun.log"
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=program.limit_s, check=False
                )
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = None
        return Evidence(status, time.monotonic() - began, log.read_text(errors="replace"), _read_notes(folder))


def _environment(notes: Path, state: Path, variables: Mapping[str, str]) -> dict[str, str]:
    own = ("EVERSTEP_", "PET_", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {
        **inherited,
        FOLDER_VARIABLE: str(notes),
        "PYTHONPATH": str(ROOT),
        "XDG_STATE_HOME": str(state),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


class _Job:
    """One launcher with its private controller; a context manager that ends all its processes."""

    def __init__(self, program: Program, notes: Path, state: Path, variables: Mapping[str, str]) -> None:
        self._program, self.notes = program, notes
        self._mark = uuid.uuid4().hex
        self._environment = _environment(notes, state, variables) | {MARK: self._mark}
        self.job = f"calm-{self._mark[:8]}"
        self.log = notes / "launcher.log"
        self._runs: set[str] = set()
        self._events: dict[int, Event] = {}
        self._is_over = threading.Event()

    def __enter__(self) -> _Job:
        program = self._program
        command = [sys.executable, "-m", "everstep_trainer.launch", "--nproc-per-node", str(program.ranks)]
        command += ["--job", self.job, *program.options, "-m", RANK_MODULE, program.name]
        if program.shared_memory:
            command = ["unshare", "--mount", "sh", "-c", IN_A_MOUNT_NAMESPACE, program.shared_memory, *command]
        self._began = time.monotonic()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self.notes,
                start_new_session=True,
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        for process in marked_processes(MARK, self._mark):
            send_signal(process, signal.SIGKILL)
        self._process.wait()
        self._watcher.join()
        for run in self._segments():
            shutil.rmtree(run, ignore_errors=True)

    def finish(self) -> Evidence:
        """Wait for the end of the launcher, and return what it left."""
        deadline = self._began + self._program.limit_s
        if self._program.terminate_at_step:
            self._terminate(deadline)
        try:
            status: int | None = self._process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - self._began
        self._is_over.set()
        self._watcher.join()
        left = self._left() if status is not None else []
        receipts = stored_receipts(state_dir(self._environment))
        receipt = next((receipt.receipt for receipt in receipts if receipt.receipt.job == self.job), None)
        check = self._program.check(self.notes) if self._program.check and status is not None else ""
        events = [self._events[number] for number in sorted(self._events)]
        output = self.log.read_text(errors="replace")
        return Evidence(status, seconds, output, _read_notes(self.notes), events, receipt, left, check)

    def _terminate(self, deadline: float) -> None:
        while self._process.poll() is None and time.monotonic() < deadline:
            steps = [note["step"] for note in _read_notes(self.notes) if note["kind"] == "step"]
            if max(steps, default=0) >= self._program.terminate_at_step:
                self._process.terminate()
                return
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """Read the event log until the launcher ends, as its controller ends with it."""
        while not self._is_over.wait(POLL_S):
            for run in local_runs(state_dir(self._environment)):
                if run.job != self.job:
                    continue
                self._runs.add(run.directory.name)
                after = max(self._events, default=0)
                with contextlib.suppress(EverstepError, OSError), Client(run.url, read_token(run.token_file)) as client:
                    self._events.update((event.id, event) for event in client.events(after=after))

    def _segments(self) -> list[Path]:
        return [path for path in SHARED_MEMORY.glob(f"everstep-{os.getuid()}/run-*") if path.name in self._runs]

    def _left(self) -> list[str]:
        """Return what is still there some seconds after the end."""
        deadline = time.monotonic() + LEFT_S
        while (left := marked_processes(MARK, self._mark)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return [f"process {process.name}" for process in left] + [f"memory {path}" for path in self._segments()]


def _read_notes(folder: Path) -> list[Note]:
    """Return the notes of all processes, in order of time; a line that SIGKILL cut short is skipped."""
    found = []
    for path in folder.glob("notes-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return sorted(found, key=lambda note: note["at"])


def _keep(folder: Path, job: _Job, evidence: Evidence) -> None:
    """Keep the text of a run, for a person who looks for the cause of a harm."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launcher.log").write_text(evidence.output)
    (folder / "notes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in evidence.notes))
    (folder / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in evidence.events))
    for log in (job.notes.parent / "everstep" / "logs").glob(f"{job.job}*.log"):
        shutil.copy(log, folder / log.name.removeprefix(f"{job.job}."))
