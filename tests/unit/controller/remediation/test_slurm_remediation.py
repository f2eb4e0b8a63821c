"""Slurm: a real one on loopback, and what ``scontrol`` says where something is amiss."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import CORDON_OWNER
from everstep_controller.remediation.slurm import SlurmRemediator, parse_node

from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from tests.support import slurm
from tests.support.remedies import carry_out, remedy


@pytest.mark.promise("remediation-once")
def test_slurm_drains_with_reason_and_reboots_once(real_slurm: slurm.Cluster) -> None:
    real_slurm.make_idle()
    remediator = SlurmRemediator(configuration=str(real_slurm.configuration))
    carry_out(remediator, remedy(1))
    shown = remediator.cordon_status(["n1"])["n1"]
    assert (shown.cordoned_by, shown.reason) == (CORDON_OWNER, "everstep n1-a1: GPU x:1 was not found")
    ahead = SYSTEM_CLOCK.wall() + 1e6  # the controller's clock means nothing to Slurm
    told = real_slurm.reboots()
    reboot = Remediation(id="n1-a2", node="n1", kind=RemediationKind.REBOOT, sentence="it hangs", at=ahead)
    remediator.apply(reboot)
    remediator.apply(reboot)
    assert not remediator.is_done(reboot)
    real_slurm.boot_as_told(told)
    _wait(lambda: remediator.is_done(reboot))
    remediator.apply(reboot)
    carry_out(remediator, remedy(3, RemediationKind.UNCORDON))
    assert real_slurm.reboots() == told + 1


def _wait(happens: Callable[[], object], deadline_s: float = 30.0) -> None:
    end = time.perf_counter() + deadline_s
    while not happens():
        assert time.perf_counter() < end
        time.sleep(0.05)


def test_slurm_node_line_is_parsed() -> None:
    line = "NodeName=n1 State=IDLE+DRAIN+REBOOT_REQUESTED BootTime=None Reason=a person: why not? [root@2026-11-20]"
    node = parse_node(line)
    assert (node.is_unschedulable, node.is_ours, node.reason, node.booted_at) == (
        True,
        False,
        "a person: why not?",
        0.0,
    )
    assert not parse_node("NodeName=n1 State=IDLE*").is_unschedulable
    assert parse_node("NodeName=n1 State=MIXED+MAINT").is_unschedulable


@pytest.mark.parametrize(
    ("reason", "somebodys"),
    [
        ("bad board, ticket 77", True),
        ("Not responding", False),
        ("Node unexpectedly rebooted", False),
        ("Low RealMemory (reported:1 < 100.00% of configured:2)", False),
        (f"{CORDON_OWNER} n1-a7 after boot of 2031-01-01T00:00:00: it hangs", False),
    ],
)
def test_slurm_down_reason_decides_foreign_ownership(reason: str, somebodys: bool) -> None:
    assert (
        parse_node(f"NodeName=n1 State=DOWN Reason={reason} [root@2026-11-20T10:00:00]").is_unschedulable is somebodys
    )


def test_slurm_keeps_node_down_for_another_person(real_slurm: slurm.Cluster) -> None:
    real_slurm.make_idle()
    real_slurm.scontrol("update", "NodeName=n1", "State=DOWN", "Reason=bad board")
    remediator = SlurmRemediator(configuration=str(real_slurm.configuration))
    try:
        shown = remediator.cordon_status(["n1"])["n1"]
        assert (shown.cordoned_by, shown.reason) == ("slurm", "bad board")
        assert remediator.is_done(remedy(21))  # it is out, as was wanted
        for kind in (RemediationKind.UNCORDON, RemediationKind.REBOOT):
            with pytest.raises(Conflict, match="cordoned outside Everstep"):
                remediator.apply(remedy(22, kind))
        assert "bad board" in real_slurm.shown()
    finally:
        real_slurm.make_idle()


def test_slurm_output_in_other_encoding_is_parsed(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    line = rb"NodeName=n1 State=IDLE+DRAIN Reason=L\374fter defekt [root@2026-01-01T00:00:00]\n"
    program.write_bytes(b"#!/bin/sh\nprintf '" + line + b"'\n")
    program.chmod(0o700)
    slurm = SlurmRemediator(str(program))
    assert slurm.is_done(remedy(1))
    assert slurm.cordon_status(["n1"])["n1"].cordoned_by == "slurm"


def test_slurm_missing_and_unreachable_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not installed on this machine"):
        SlurmRemediator("no-such-scontrol")
    if why := slurm.missing():
        pytest.skip(why)
    away = tmp_path / "slurm.conf"
    away.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/munge\nMessageTimeout=2\nTCPTimeout=1\n"
    )
    with pytest.raises(Unavailable):  # no munge either, or nobody at that port
        SlurmRemediator(configuration=str(away)).is_done(remedy(1))


class Scripted:
    """A ``scontrol`` that says what it is told to, and keeps what it was asked."""

    def __init__(self, directory: Path) -> None:
        self._says, self._asked = directory / "says", directory / "asked"
        program = directory / "scontrol"
        program.write_text(f'#!/bin/sh\necho "$*" >> {self._asked}\n. {self._says}\n')
        program.chmod(0o700)
        self.slurm = SlurmRemediator(str(program))

    def fails(self, words: str) -> None:
        self._says.write_text(f"echo {shlex.quote(words)} >&2; exit 1\n")

    def shows(self, state: str, booted: str, reason: str = "") -> None:
        line = f"NodeName=n1 State={state} BootTime={booted} Reason={reason} [root@{booted}]"
        self._says.write_text(f"echo {shlex.quote(line)}\n")

    def orders(self) -> list[str]:
        """What changed something."""
        return [line for line in self._asked.read_text().splitlines() if "show node" not in line]


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_node error: Unable to contact slurm controller (connect failure)",
        "slurm_load_node error: Zero Bytes were transmitted or received",
        "slurm_update error: Slurm backup controller in standby mode",
        'error: Munge encode failed: Failed to access "/run/munge/munge.socket.2"\nslurm_load_node error: Protocol '
        "authentication error",
        "slurm_load_node error: Socket timed out on send/recv operation",
        "words of a release to come",
    ],
)
def test_slurm_connection_errors_are_retried(tmp_path: Path, words: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(words)
    with pytest.raises(Unavailable):
        scripted.slurm.apply(remedy(1))


@pytest.mark.parametrize(
    "words",
    [
        "Node n1 not found",
        "slurm_update error: Invalid node name specified",
        "slurm_update error: Invalid user id",
        "scontrol_reboot_nodes error: Permission denied",
        "scontrol: error: RebootProgram isn't defined\nscontrol_reboot_nodes error: Unspecified error",
    ],
)
def test_slurm_refusals_are_final(tmp_path: Path, words: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(words)
    with pytest.raises(Conflict, match="refused"):
        scripted.slurm.apply(remedy(1))


def test_slurm_reboot_is_confirmed_by_slurm_boot_time(tmp_path: Path) -> None:
    scripted, reboot = Scripted(tmp_path), remedy(7, RemediationKind.REBOOT)
    scripted.shows("IDLE", "2031-01-01T00:00:00")  # later than the remedy: that node's clock is ahead
    assert not scripted.slurm.is_done(reboot)
    scripted.slurm.apply(reboot)
    (order,) = scripted.orders()
    assert order.startswith("reboot ASAP nextstate=DOWN reason=everstep n1-a7 after boot of 2031-01-01T00:00:00: ")
    reason = order.partition("reason=")[2].removesuffix(" n1")
    for state, booted, done in (
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T00:00:00", False),
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T01:00:00", False),
        ("DOWN", "2031-01-01T00:00:02", False),  # the same boot, dated anew
        ("DOWN", "2031-01-01T00:01:00", True),
    ):
        scripted.shows(state, booted, f"{reason} : reboot issued")
        assert scripted.slurm.is_done(reboot) is done, (state, booted)
    scripted.shows("DOWN", "2031-01-01T00:01:00", reason.replace("n1-a7", "n1-a6"))
    assert not scripted.slurm.is_done(reboot)


def test_slurm_reboot_respects_cancelled_and_foreign_reboots(
    tmp_path: Path,
) -> None:
    scripted, reboot = Scripted(tmp_path), remedy(7, RemediationKind.REBOOT)
    booted = "2026-01-01T00:00:00"
    scripted.shows("IDLE", booted, f"everstep n1-a7 after boot of {booted}: it hangs")
    scripted.slurm.apply(reboot)
    scripted.shows("IDLE+REBOOT_REQUESTED", booted, "a new kernel")
    with pytest.raises(Unavailable, match="a new kernel"):
        scripted.slurm.apply(reboot)
    assert scripted.orders() == []
