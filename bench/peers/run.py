"""Run the workload under other systems, in an environment of its own under ``out/peers``."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.recovery_rows.recoveries import Recovered, read, recoveries

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "out" / "peers"
PYTHON = ENVIRONMENT / "bin" / "python"
PACKAGES = ("torchft==0.2.0", "numpy")
WORLD, FAULT_STEP, STEPS, PATIENCE_S, PLAIN_PATIENCE_S = 4, 45, 80, 180.0, 300.0
NO_FAULT = "-1::between:KILL"


def install() -> None:
    """Make the peers' environment once. Raises CalledProcessError if a package cannot be installed."""
    if (ENVIRONMENT / ".installed").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, *PACKAGES], check=True)
    (ENVIRONMENT / ".installed").touch()


def _environment(folder: Path, fault: str, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "BENCH_STEPS": str(STEPS),
        "BENCH_FOLDER": str(folder),
        "BENCH_WORLD": str(WORLD),
        "BENCH_FAULT": fault,
        **more,
    }


def free_port() -> int:
    """Return a free port of the loopback interface, of those that Linux gives to no connection by itself."""
    for port in random.SystemRandom().sample(range(15000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of a hundred ports between 15000 and 32000 is free")


@contextmanager
def _ended(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Kill the sessions of all processes afterwards. Each process leads a session of its own."""
    try:
        yield
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def _start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def torchft(victim: int, where: str) -> list[Recovered]:
    """Measure one kill under torchft with a tuned lighthouse (heartbeat timeout 200 ms, tick 10 ms)."""
    install()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder, port = Path(name), free_port()
        lighthouse = [str(ENVIRONMENT / "bin" / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
        lighthouse += ["--min_replicas", "2", "--join_timeout_ms", "60000"]
        lighthouse += ["--heartbeat_timeout_ms", "200", "--quorum_tick_ms", "10"]
        environment = _environment(
            folder,
            f"{victim}:{FAULT_STEP}:{where}:KILL",
            BENCH_LIGHTHOUSE=f"http://127.0.0.1:{port}",
        )
        processes = [_start(lighthouse, {**environment, "RUST_LOG": "error"}, folder / "lighthouse.log")]
        with _ended(processes):
            for rank in range(WORLD):
                command = [str(PYTHON), "-m", "bench.peers.torchft_train"]
                own = {**environment, "BENCH_RANK": str(rank)}
                processes.append(_start(command, own, folder / f"{rank}.log"))
            _wait(processes[1:])
        return recoveries(folder, WORLD - 1)


def torchrun(victim: int, where: str) -> list[Recovered]:
    """Measure one kill under torchrun: all ranks restart from a checkpoint on disk, stored every ten steps."""
    install()
    command = [str(PYTHON), "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--max-restarts", "3"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    # Without the variable restarted ranks meet the dead incarnation's store.
    return _kill_in_script(command, victim, where, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def everstep_launch(victim: int, where: str, *flags: str) -> list[Recovered]:
    """Measure one kill of the same script under ``everstep-launch``, in this environment with the same torch."""
    with tempfile.TemporaryDirectory(prefix="ev-") as state:
        command = [sys.executable, "-m", "everstep_trainer.launch", "--nproc-per-node", str(WORLD)]
        command += ["--max-restarts", "3", "--state-dir", state, *flags]
        return _kill_in_script(command, victim, where)


def _kill_in_script(launcher: list[str], victim: int, where: str, **more: str) -> list[Recovered]:
    with tempfile.TemporaryDirectory(prefix="ev-") as name:
        folder, command = Path(name), [*launcher, "-m", "bench.peers.torchrun_train"]
        environment = _environment(folder, f"{victim}:{FAULT_STEP}:{where}:KILL", **more)
        processes = [_start(command, environment, folder / "launcher.log")]
        with _ended(processes):
            _wait(processes)
        return [_restarted(folder)]


def train_plainly(folder: Path, steps: int) -> None:
    """Run plain DistributedDataParallel that saves nothing, in this environment; its logs lie in ``folder``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--standalone"]
    environment = _environment(folder, NO_FAULT, BENCH_STEPS=str(steps), BENCH_SAVE_EVERY=str(2 * steps))
    process = _start([*command, "-m", "bench.peers.torchrun_train"], environment, folder / "torchrun.log")
    with _ended([process]):
        status = process.wait(PLAIN_PATIENCE_S)
    if status:
        raise subprocess.CalledProcessError(status, command)


def _restarted(folder: Path) -> Recovered:
    """Return the recovery, which ends when all four new processes have finished a step, since all ranks restart."""
    logs = read(folder)
    fault = next(row for rows in logs.values() for row in rows if row["event"] == "fault")
    old = [rows for rows in logs.values() if rows and rows[0]["at"] < fault["at"]]
    new = [rows for rows in logs.values() if rows and rows[0]["at"] > fault["at"]]
    if len(new) < WORLD:
        return Recovered(fault["step"], None, 0)
    finished = min(max(row["step"] for row in rows if row["event"] == "step") for rows in old)
    first = [next(row for row in rows if row["event"] == "step") for rows in new]
    lost = max(0, finished - min(row["step"] for row in first) + 1)
    return Recovered(fault["step"], max(row["at"] for row in first) - fault["at"], lost)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended, for at most ``PATIENCE_S``."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)
