"""A real Slurm cluster on loopback for one test: munged, slurmctld, and a slurmd for each node."""

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

from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.remediation.slurm import BOOT_JITTER_S, parse_node
from tests.support.processes.process_table import terminated_after

NODE = "n1"
DEADLINE_S = 90.0
BOOT_ROUNDING_S = 3.0
"""Seconds added between two boots so that their times differ.

Slurm cuts clock and uptime to whole seconds, so the time of a boot may be a second too early.
"""
POLL_S = 0.2
"""Seconds between two queries of a state, each of which starts a Slurm process."""


def missing() -> str:
    """Return the reason why Slurm cannot run here, or an empty string."""
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
    """A running cluster. ``configuration`` is the path in SLURM_CONF."""

    def __init__(self, directory: Path, nodes: Sequence[str] = (NODE,)) -> None:
        self.directory = directory
        self.nodes = nodes
        self.configuration = directory / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration), "LC_ALL": "C"}
        self._slurmd = ExitStack()

    def client_configuration(self, wait_s: int = 10) -> Path:
        """Return a configuration for clients that wait ``wait_s`` for an answer. The daemons' file does not change."""
        made = self.directory / "client.conf"
        made.write_text(f"{self.configuration.read_text()}MessageTimeout={wait_s}\n")
        return made

    def make_idle(self) -> None:
        """Return the node to service from any state."""
        self.scontrol("update", f"NodeName={NODE}", "State=RESUME")
        self.wait_for("IDLE ")

    def pause(self) -> None:
        """Stop slurmctld until ``resume``, and shorten the clients' timeout."""
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
        """Return the node's description in one line."""
        command = ["scontrol", "--oneliner", "show", "node", NODE]
        return subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=120, check=True
        ).stdout

    def boot(self) -> None:
        """Start slurmd on all nodes, as after a boot."""
        self._slurmd.close()
        for node in self.nodes:
            command = ["slurmd", "-D", "-b", "-N", node, "-f", str(self.configuration)]
            self._slurmd.enter_context(terminated_after(command, self.environment))

    def boot_when_requested(self, requests_before: int) -> None:
        """Boot the node after Slurm has requested one more reboot than ``requests_before``.

        The boot waits until its time can be distinguished from that of the last boot.
        """
        _until(lambda: self.reboots() > requests_before, self)
        booted = parse_node(self.shown(TZ="UTC")).booted_at
        _until(lambda: SYSTEM_CLOCK.wall() > booted + BOOT_JITTER_S + BOOT_ROUNDING_S, self)
        self.boot()

    def reboots(self) -> int:
        """Return how often Slurm has requested a reboot."""
        log = self.directory / "reboots"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def end(self) -> None:
        self._slurmd.close()

    def wait_for(self, *states: str) -> None:
        """Wait until each node shows one of ``states``."""
        end = time.perf_counter() + DEADLINE_S
        for node in self.nodes:
            while not any(f"State={state}" in self.scontrol("show", "node", node) for state in states):
                if time.perf_counter() > end:
                    raise AssertionError(f"{self.scontrol('show', 'node', node)}\n{self.logs()}")
                time.sleep(POLL_S)

    def submit(self, command: Sequence[str], folder: Path, **environment: str) -> str:
        """Call sbatch with these arguments in ``folder``, and return the job's number."""
        return self._run(["sbatch", "--parsable", *command], folder, environment).strip()

    def cancel(self, job: str, *flags: str) -> None:
        self._run(["scancel", *flags, job], self.directory, {})

    def _run(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job_state(self, job: str) -> str:
        """Return the job's state, such as RUNNING, COMPLETED or FAILED."""
        found = re.search(r"JobState=(\w+)", self.scontrol("show", "job", job))
        return found[1] if found else ""

    def logs(self) -> str:
        return "\n".join(path.read_text()[-3000:] for path in self.directory.glob("*.log"))


@contextmanager
def cluster(directory: Path, nodes: Sequence[str] = (NODE,)) -> Iterator[Cluster]:
    """Start a cluster in ``directory``, and yield it when its nodes are idle. Unix sockets need a short path."""
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
            terminated_after(
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
        stack.enter_context(terminated_after(["slurmctld", "-D", "-f", str(made.configuration)], made.environment))
        stack.callback(made.end)
        made.boot()
        made.wait_for("IDLE")
        yield made


def _until(condition: object, cluster: Cluster) -> None:
    assert callable(condition)
    end = time.perf_counter() + DEADLINE_S
    while not condition():
        if time.perf_counter() > end:
            raise AssertionError(cluster.logs())
        time.sleep(0.05)
