"""Run a program within a time limit, and end all processes that it has started, whatever became of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.processes import marked_processes
from everstep.host.processes import send_signal

ROOT = Path(__file__).resolve().parents[2]
MARK = "EVERSTEP_GPU_STEP"
"""A variable that all processes of one run have in their environment, also those in sessions of their own."""
END_S = 10.0
"""How long processes are killed for. One that waits in the driver cannot be, and is left behind."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``status``: the program's exit status; None where the time limit ended it."""

    status: int | None
    seconds: float

    @property
    def ended_well(self) -> bool:
        return self.status == 0


def run(command: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str] | None = None) -> Outcome:
    """Run ``command`` in the repository's root, with its output in ``log``, for ``limit_s`` seconds at most."""
    token = uuid.uuid4().hex
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {}), MARK: token},
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_all(process, token)
    return Outcome(status, time.monotonic() - began)


def end_all(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill the process and all that has its mark; remove the shared memory that benches name after it."""
    end = time.monotonic() + END_S
    while ((left := marked_processes(MARK, token)) or process.poll() is None) and time.monotonic() < end:
        for each in left:
            send_signal(each, signal.SIGKILL)
        time.sleep(0.01)
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for path in folder.glob(f"everstep-bench-{process.pid}-*"):
            shutil.rmtree(path, ignore_errors=True)
