"""Remediation through Slurm: a real cluster on loopback, and the errors of `scontrol`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError, Conflict, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import CORDON_OWNER
from everstep_controller.remediation.slurm import SlurmRemediator, _cordon_status, parse_node
from tests.support.fleet.remediations import apply_and_wait, remediation
from tests.support.services import slurm


@pytest.mark.promise("remediation-once")
def test_slurm_drains_with_reason_and_reboots_once(real_slurm: slurm.Cluster) -> None:
    real_slurm.make_idle()
    remediator = SlurmRemediator(configuration=str(real_slurm.configuration))
    apply_and_wait(remediator, remediation(1))
    shown = remediator.cordon_status(["n1"])["n1"]
    assert (shown.cordoned_by, shown.reason) == (CORDON_OWNER, "everstep n1-a1: GPU x:1 was not found")
    ahead = SYSTEM_CLOCK.wall() + 1e6  # Slurm must not depend on the controller's clock
    reboots_before = real_slurm.reboots()
    reboot = Remediation(id="n1-a2", node="n1", kind=RemediationKind.REBOOT, sentence="it hangs", at=ahead)
    remediator.apply(reboot)
    remediator.apply(reboot)
    assert not remediator.is_done(reboot)
    real_slurm.boot_when_requested(reboots_before)
    _wait(lambda: remediator.is_done(reboot))
    remediator.apply(reboot)
    apply_and_wait(remediator, remediation(3, RemediationKind.UNCORDON))
    assert real_slurm.reboots() == reboots_before + 1


def _wait(happens: Callable[[], object], deadline_s: float = 30.0) -> None:
    end = time.perf_counter() + deadline_s
    while not happens():
        assert time.perf_counter() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("reason", "is_foreign"),
    [
        ("bad board, ticket 77", True),
        ("Not responding", False),
        ("Node unexpectedly rebooted", False),
        ("Low RealMemory (reported:1 < 100.00% of configured:2)", False),
        (f"{CORDON_OWNER} n1-a7 after boot of 2031-01-01T00:00:00: it hangs", False),
    ],
)
def test_slurm_down_reason_decides_foreign_ownership(reason: str, is_foreign: bool) -> None:
    assert (
        parse_node(f"NodeName=n1 State=DOWN Reason={reason} [root@2026-11-20T10:00:00]").is_unschedulable is is_foreign
    )


@pytest.mark.parametrize(
    ("states", "is_out"),
    [
        ("MIXED+RESERVED", False),  # the job runs in the reservation
        ("IDLE+RESERVED", False),
        ("ALLOCATED+MAINTENANCE+RESERVED", True),
        ("IDLE+DRAIN", True),
    ],
)
def test_slurm_reservation_keeps_no_node_out(states: str, is_out: bool) -> None:
    assert parse_node(f"NodeName=n1 State={states}").is_unschedulable is is_out


def test_slurm_node_that_our_reboot_left_down_is_our_cordon() -> None:
    node = parse_node(
        f"NodeName=n1 State=DOWN Reason={CORDON_OWNER} 7 after boot of x: XID 79 [root@2026-11-20T10:00:00]"
    )
    assert _cordon_status(node).cordoned_by == CORDON_OWNER


def test_slurm_keeps_node_down_for_another_person(real_slurm: slurm.Cluster) -> None:
    real_slurm.make_idle()
    real_slurm.scontrol("update", "NodeName=n1", "State=DOWN", "Reason=bad board")
    remediator = SlurmRemediator(configuration=str(real_slurm.configuration))
    try:
        shown = remediator.cordon_status(["n1"])["n1"]
        assert (shown.cordoned_by, shown.reason) == ("slurm", "bad board")
        assert remediator.is_done(remediation(21))  # n1 is out of service, as requested
        for kind in (RemediationKind.UNCORDON, RemediationKind.REBOOT):
            with pytest.raises(Conflict, match="cordoned outside Everstep"):
                remediator.apply(remediation(22, kind))
        assert "bad board" in real_slurm.shown()
    finally:
        real_slurm.make_idle()


def test_slurm_output_in_other_encoding_is_parsed(tmp_path: Path) -> None:
    program = tmp_path / "scontrol"
    line = rb"NodeName=n1 State=IDLE+DRAIN Reason=L\374fter defekt [root@2026-01-01T00:00:00]\n"
    program.write_bytes(b"#!/bin/sh\nprintf '" + line + b"'\n")
    program.chmod(0o700)
    slurm = SlurmRemediator(str(program))
    assert slurm.is_done(remediation(1))
    assert slurm.cordon_status(["n1"])["n1"].cordoned_by == "slurm"


def test_slurm_missing_and_unreachable_raise_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not installed on this machine"):
        SlurmRemediator("no-such-scontrol")
    if reason := slurm.missing():
        pytest.skip(reason)
    away = tmp_path / "slurm.conf"
    away.write_text(
        "ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/munge\nMessageTimeout=2\nTCPTimeout=1\n"
    )
    with pytest.raises(Unavailable):  # munge is missing as well, or the port refuses connections
        SlurmRemediator(configuration=str(away)).is_done(remediation(1))


class Scripted:
    """A scripted `scontrol` that prints given answers and records its arguments."""

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
        """The recorded commands that changed a node."""
        return [line for line in self._asked.read_text().splitlines() if "show node" not in line]


@pytest.mark.parametrize(
    "text",
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
def test_slurm_connection_errors_are_retried(tmp_path: Path, text: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(text)
    with pytest.raises(Unavailable):
        scripted.slurm.apply(remediation(1))


@pytest.mark.parametrize(
    "text",
    [
        "Node n1 not found",
        "slurm_update error: Invalid node name specified",
        "slurm_update error: Invalid user id",
        "scontrol_reboot_nodes error: Permission denied",
        "scontrol: error: RebootProgram isn't defined\nscontrol_reboot_nodes error: Unspecified error",
    ],
)
def test_slurm_refusals_are_final(tmp_path: Path, text: str) -> None:
    scripted = Scripted(tmp_path)
    scripted.fails(text)
    with pytest.raises(Conflict, match="refused"):
        scripted.slurm.apply(remediation(1))


def test_slurm_reboot_is_confirmed_by_slurm_boot_time(tmp_path: Path) -> None:
    scripted, reboot = Scripted(tmp_path), remediation(7, RemediationKind.REBOOT)
    scripted.shows("IDLE", "2031-01-01T00:00:00")  # later than the remediation: the node's clock is ahead
    assert not scripted.slurm.is_done(reboot)
    scripted.slurm.apply(reboot)
    (order,) = scripted.orders()
    assert order.startswith("reboot ASAP nextstate=DOWN reason=everstep n1-a7 after boot of 2031-01-01T00:00:00: ")
    reason = order.partition("reason=")[2].removesuffix(" n1")
    for state, booted, done in (
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T00:00:00", False),
        ("DOWN+DRAIN+REBOOT_ISSUED", "2031-01-01T01:00:00", False),
        ("DOWN", "2031-01-01T00:00:02", False),  # the same boot with another time
        ("DOWN", "2031-01-01T00:01:00", True),
    ):
        scripted.shows(state, booted, f"{reason} : reboot issued")
        assert scripted.slurm.is_done(reboot) is done, (state, booted)
    scripted.shows("DOWN", "2031-01-01T00:01:00", reason.replace("n1-a7", "n1-a6"))
    assert not scripted.slurm.is_done(reboot)


def test_slurm_reboot_respects_cancelled_and_foreign_reboots(
    tmp_path: Path,
) -> None:
    scripted, reboot = Scripted(tmp_path), remediation(7, RemediationKind.REBOOT)
    booted = "2026-01-01T00:00:00"
    scripted.shows("IDLE", booted, f"everstep n1-a7 after boot of {booted}: it hangs")
    scripted.slurm.apply(reboot)
    scripted.shows("IDLE+REBOOT_REQUESTED", booted, "a new kernel")
    with pytest.raises(Unavailable, match="a new kernel"):
        scripted.slurm.apply(reboot)
    assert scripted.orders() == []
