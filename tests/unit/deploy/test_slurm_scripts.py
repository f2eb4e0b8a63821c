"""Slurm's prolog, epilog and health check read the agent's health file, and drain unfit nodes only."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path("deploy/slurm").absolute()


class SlurmNode:
    """A node with a health file, and an ``scontrol`` that writes down how it is called."""

    def __init__(self, folder: Path) -> None:
        self.health = folder / "health"
        self.calls = folder / "calls"
        self.calls.touch()
        self.state = folder / "state"
        self.state.write_text("State=IDLE ")
        program = folder / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self.calls}\ncase $1 in show) cat {self.state} ;; esac\n')
        program.chmod(0o755)
        self._environment = {"PATH": f"{folder}:/usr/bin:/bin", "EVERSTEP_HEALTH_FILE": str(self.health)}

    def write(self, health: str, age_s: int = 0) -> None:
        at = int(subprocess.check_output(["date", "+%s"])) - age_s
        self.health.write_text(f"at={at}\nhealth={health}\nreason=gpu.lost/0000:1b:00: GPU = lost\n")

    def run(self, script: str) -> tuple[int, str]:
        environment = {**self._environment, "SLURMD_NODENAME": "n1"}
        ended = subprocess.run(
            ["sh", str(SCRIPTS / script)], env=environment, capture_output=True, text=True, check=False
        )
        return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def slurm_node(tmp_path: Path) -> SlurmNode:
    return SlurmNode(tmp_path)


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
def test_prolog_and_epilog_fail_for_unfit_nodes_only(slurm_node: SlurmNode, script: str) -> None:
    assert slurm_node.run(script)[0] == 0  # no agent
    for health, status in (("healthy", 0), ("degraded", 0), ("unknown", 0), ("unfit", 1)):
        slurm_node.write(health)
        assert slurm_node.run(script)[0] == status
    assert "gpu.lost/0000:1b:00: GPU = lost" in slurm_node.run(script)[1]
    slurm_node.write("unfit", age_s=61)
    assert slurm_node.run(script)[0] == 0


def test_health_check_drains_an_unfit_node_once(slurm_node: SlurmNode) -> None:
    for health in ("healthy", "degraded", "unknown"):
        slurm_node.write(health)
        assert slurm_node.run("health-check.sh")[0] == 0
    assert slurm_node.calls.read_text() == ""
    slurm_node.write("unfit")
    slurm_node.run("health-check.sh")
    drain = "update NodeName=n1 State=DRAIN Reason=everstep: gpu.lost/0000:1b:00: GPU = lost\n"
    assert slurm_node.calls.read_text().endswith(drain)
    slurm_node.state.write_text("State=IDLE+DRAIN Reason=disk")
    slurm_node.run("health-check.sh")
    assert slurm_node.calls.read_text().count("update") == 1
