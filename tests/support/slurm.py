"""A real Slurm on loopback: munged, slurmctld and a slurmd for each node, all ours, gone when the test is."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from everstep_controller.remediation.slurm import BOOT_JITTER_S, parse_node

from everstep.system_clock import SYSTEM_CLOCK
from tests.support.processes import ended

NODE = "n1"
DEADLINE_S = 90.0
BOOT_ROUNDING_S = 3.0
"""More seconds between two boots than must show in their times: Slurm cuts clock and uptime to whole seconds, and the
time of a boot right after a full second came out a second too early."""
LOOK_S = 0.2
"""Seconds between looks at a state: each starts a process of Slurm's."""


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "scontrol") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm)"
    return "" if os.getuid() == 0 else "slurmd needs root"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _configuration(directory: Path, nodes: Sequence[str]) -> str:
    host = socket.gethostname()
    lines = [
        f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={_free_port()} CPUs=1 State=UNKNOWN"
        for name in nodes
    ]
    return f"""
ClusterName=everstep
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmctldPort={_free_port()}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
RebootProgram={directory}/reboot
ReturnToService=1
SlurmdTimeout=30
ResumeTimeout=60
{chr(10).join(lines)}
PartitionName=all Nodes={",".join(nodes)} Default=YES State=UP
"""


class Cluster:
    """A running cluster. ``configuration`` is what SLURM_CONF names."""

    def __init__(self, directory: Path, nodes: Sequence[str] = (NODE,)) -> None:
        self.directory = directory
        self.nodes = nodes
        self.configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration), "LC_ALL": "C"}
        self._slurmd = ExitStack()

    def client_configuration(self, wait_s: int = 10) -> Path:
        """For a client that waits so long for an answer. The daemons' own file stays as it is: they must agree."""
        made = self.directory / "client.conf"
        made.write_text(f"{self.configuration.read_text()}MessageTimeout={wait_s}\n")
        return made

    def make_idle(self) -> None:
        """In service, whatever was done to it."""
        self.scontrol("update", f"NodeName={NODE}", "State=RESUME")
        self.wait_for("IDLE ")

    def pause(self) -> None:
        """The controller answers nobody until ``resume``, and clients do not wait for long."""
        self.client_configuration(wait_s=2)
        os.kill(self._slurmctld(), signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._slurmctld(), signal.SIGCONT)

    def _slurmctld(self) -> int:
        return int((self.directory / "slurmctld.pid").read_text())

    def scontrol(self, *arguments: str) -> str:
        done = subprocess.run(
            ["scontrol", *arguments], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout + done.stderr

    def shown(self, **environment: str) -> str:
        """The node in one line."""
        command = ["scontrol", "--oneliner", "show", "node", NODE]
        return subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    def boot(self) -> None:
        """The nodes come up, as after a boot."""
        self._slurmd.close()
        for node in self.nodes:
            command = ["slurmd", "-D", "-b", "-N", node, "-f", str(self.configuration)]
            self._slurmd.enter_context(ended(command, self.environment))

    def boot_as_told(self, told_before: int) -> None:
        """Waits until the node was told to reboot once more than ``told_before`` times, and until another boot can be
        told from the last one; then it boots."""
        _until(lambda: self.reboots() > told_before, self)
        booted = parse_node(self.shown(TZ="UTC")).booted_at
        _until(lambda: SYSTEM_CLOCK.wall() > booted + BOOT_JITTER_S + BOOT_ROUNDING_S, self)
        self.boot()

    def reboots(self) -> int:
        """How often the node was told to reboot."""
        told = self.directory / "reboots"
        return len(told.read_text().splitlines()) if told.exists() else 0

    def end(self) -> None:
        self._slurmd.close()

    def wait_for(self, *states: str) -> None:
        """Until each node shows one of ``states``."""
        end = time.perf_counter() + DEADLINE_S
        for node in self.nodes:
            while not any(f"State={state}" in self.scontrol("show", "node", node) for state in states):
                if time.perf_counter() > end:
                    raise AssertionError(f"{self.scontrol('show', 'node', node)}\n{self.logs()}")
                time.sleep(LOOK_S)

    def submit(self, command: Sequence[str], folder: Path, **environment: str) -> str:
        """Calls sbatch with these arguments in ``folder``; returns the job's number."""
        return self._run(["sbatch", "--parsable", *command], folder, environment).strip()

    def cancel(self, job: str, *flags: str) -> None:
        self._run(["scancel", *flags, job], self.directory, {})

    def _run(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            command,
            env=self.environment | environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job_state(self, job: str) -> str:
        """Such as RUNNING, COMPLETED, FAILED."""
        found = re.search(r"JobState=(\w+)", self.scontrol("show", "job", job))
        return found[1] if found else ""

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.directory.glob("*.log"))


@contextmanager
def cluster(directory: Path, nodes: Sequence[str] = (NODE,)) -> Iterator[Cluster]:
    """Starts it in ``directory`` (short: a unix socket's path is in it), idle when it is handed over."""
    made = Cluster(directory, nodes)
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (directory / name).mkdir()
    (directory / "munge.key").write_bytes(secrets.token_bytes(128))
    (directory / "munge.key").chmod(0o600)
    (directory / "reboot").write_text(f"#!/bin/sh\necho rebooted >> {directory}/reboots\n")
    (directory / "reboot").chmod(0o700)
    made.configuration.write_text(_configuration(directory, nodes))
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    with ExitStack() as stack:
        stack.enter_context(
            ended(
                [
                    "munged",
                    "--foreground",
                    "--force",
                    f"--key-file={directory}/munge.key",
                    f"--socket={directory}/munge.socket",
                    f"--pid-file={directory}/munged.pid",
                    f"--log-file={directory}/munged.log",
                    f"--seed-file={directory}/munged.seed",
                ],
                made.environment,
            )
        )
        _until((directory / "munge.socket").exists, made)
        stack.enter_context(ended(["slurmctld", "-D", "-f", str(made.configuration)], made.environment))
        stack.callback(made.end)
        made.boot()
        made.wait_for("IDLE")
        yield made


def _until(happens: object, made: Cluster) -> None:
    assert callable(happens)
    end = time.perf_counter() + DEADLINE_S
    while not happens():
        if time.perf_counter() > end:
            raise AssertionError(made.logs())
        time.sleep(0.05)
