"""The workload without Everstep, under torchrun, for the cost of the hooks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.everstep_runs import WORLD, step_seconds


def plain_step_seconds(steps: int) -> list[float]:
    """Seconds of each step of rank 0 in a loop of plain DistributedDataParallel that saves nothing."""
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        environment = {
            **os.environ,
            "BENCH_FOLDER": name,
            "BENCH_STEPS": str(steps),
            "BENCH_SAVE_EVERY": str(steps * 2),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--standalone"]
        log = Path(name, "torchrun.log")
        with log.open("wb") as output:
            subprocess.run(
                [*command, "-m", "bench.peers.torchrun_train"],
                env=environment,
                stdout=output,
                stderr=output,
                check=True,
                timeout=300,
            )
        return step_seconds(Path(name))
