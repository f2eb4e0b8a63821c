"""Findings derived from log lines in the formats of NVIDIA's drivers."""

from __future__ import annotations

import pytest

from everstep.vocabulary import Action, Mode, Severity
from everstep_agent.drivers.gpu_samples import XidEvent
from everstep_agent.policy.xids import MAX_ANNOUNCED_UUIDS, XidParser
from tests.support.agents.sensors import BUS, TimedAssessor, gpu

UUID = "GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b"


def parse(*lines: str) -> list[XidEvent]:
    reader = XidParser()
    return [event for line in lines if (event := reader.parse_line(line)) is not None]


def xids_of(*lines: str) -> list[tuple[str, int]]:
    return [(event.pci_bus_id, event.xid) for event in parse(*lines)]


@pytest.mark.parametrize(
    ("line", "bus", "xid"),
    [
        # with a process, without one, and of drivers that name none
        ("NVRM: Xid (PCI:0000:5d:00): 31, pid=1587983, name=exe, Ch 0000000a, intr 00000000.", "0000:5d:00", 31),
        ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off", "0000:05:00", 79),
        ("NVRM: Xid (PCI:0000:34:00): 45, Ch 00000010", "0000:34:00", 45),
        ("NVRM: Xid (PCI:0000:b9:00): 94", "0000:b9:00", 94),
        # a GPU that is partitioned: the instance, and the compute instance in it
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9).", "0000:01:00", 94),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 43, pid=7194, name=python3, Ch 00000012", "0000:01:00", 43),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception", "0000:3b:00", 13),
        (f"NVRM: Xid (PCI:0000:3b:00 {UUID}): 13, pid=9, Graphics Exception", "0000:3b:00", 13),
        # addresses with a function, without a domain, without the word PCI, and with long domains
        ("NVRM: Xid (PCI:0000:b3:00.0): 79, pid=12345, GPU has fallen off the bus.", "0000:b3:00", 79),
        ("NVRM: Xid (PCI:b3:00.0): 79, GPU has fallen off the bus.", "0000:b3:00", 79),
        ("NVRM: Xid (PCI:b3:00): 48, DBE", "0000:b3:00", 48),
        ("NVRM: Xid (0000:03:00): 14, Channel 00000001", "0000:03:00", 14),
        ("NVRM: Xid (0003:00): 13, 0001 00000000", "0000:03:00", 13),
        ("NVRM: Xid (PCI:10000:01:00): 62, 023f0f30", "10000:01:00", 62),
        ("NVRM: Xid (PCI:00010000:01:00.0): 62, 023f0f30", "10000:01:00", 62),
        ("NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000)", "0019:01:00", 149),
        # as a syslog daemon, dmesg, and journalctl have it
        ("May 19 07:08:57 n1 kernel: [680111.646286] NVRM: Xid (PCI:0000:10:1c): 63, pid=1850, R", "0000:10:1c", 63),
        ("[Fri Aug 30 11:43:09 2024] NVRM: Xid (PCI:0000:CB:00): 13, pid='<unknown>'", "0000:cb:00", 13),
        ("kern  :err   : 2025-01-25T10:34:54,859532+00:00 NVRM: Xid (PCI:0000:cb:00): 8, x", "0000:cb:00", 8),
    ],
)
def test_xid_line_is_read(line: str, bus: str, xid: int) -> None:
    (event,) = parse(line)
    assert (event.pci_bus_id, event.xid, event.source, event.text) == (bus, xid, "kernel", line)


def test_xid_with_only_a_uuid_names_the_announced_gpu() -> None:
    line = f"NVRM: Xid ({UUID}): 79, GPU has fallen off the bus."
    assert xids_of(line) == []
    assert xids_of(f"NVRM: GPU at PCI:0000:91:00: {UUID}", line) == [("0000:91:00", 79)]


def test_xid_with_only_a_uuid_names_a_gpu_listed_by_nvml() -> None:
    judge = TimedAssessor()
    judge.polls(1, gpu(uuid=UUID))
    assert judge.lines(f"NVRM: Xid ({UUID} GPU-I:03): 79, GPU has fallen off the bus.") == {f"gpu.xid/{BUS}/79"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Xid (PCI:0000:1b:00): 79",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.195.03  Release Build",
        f"NVRM: GPU at PCI:0000:91:00: {UUID}",
        "NVRM: GPU Board Serial Number: 1653723052734",
        "NVRM: GPU 0000:91:00.0: GPU serial number is 1653723052734.",
        "NVRM: A GPU crash dump has been created. If possible, please run",
        "               NVRM: nvidia-bug-report.sh as root to collect this data before",
        "               NVRM: the NVIDIA kernel module is unloaded.",
        "NVRM: krcRcAndNotifyAllChannels_IMPL: RC all channels for critical error 79.",
        "NVRM: Xid (PCI:zzzz): 79",
        "NVRM: Xid (): 79",
        "NVRM: Xid (PCI:0000:1b:00): seventy-nine",
        "NVRM: fallen off the bus and is not responding to commands.",
        "usb 1-1: the device has fallen off the bus",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
    ],
)
def test_line_without_an_xid_is_ignored(line: str) -> None:
    assert parse(line) == []


@pytest.mark.parametrize(
    "lines",
    [
        # of the driver's start, in three lines, and in the two of older drivers
        (
            "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands.",
        ),
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:1e07) installed in this",
            "NVRM: system has fallen off the bus and is not responding to commands.",
        ),
        ("NVRM: The NVIDIA GPU 0000:b3:00.0 installed in this system has fallen off the bus and is not responding",),
        # with other lines of the kernel in between
        (
            "Oct 30 09:49:36 pc kernel: NVRM: The NVIDIA GPU 0000:b3:00.0",
            "Oct 30 09:49:36 pc kernel: pcieport 0000:00:02.0: AER: Multiple Uncorrected (Fatal) error received",
            "Oct 30 09:49:36 pc kernel: NVRM: (PCI ID: 10de:2330) installed in this system has",
            "Oct 30 09:49:36 pc kernel: NVRM: fallen off the bus and is not responding to commands.",
        ),
        # at run time: the number, and the words after it
        (
            f"NVRM: GPU at PCI:0000:b3:00: {UUID}",
            "NVRM: GPU Board Serial Number: 1653723052734",
            "NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
            "NVRM: GPU 0000:b3:00.0: GPU serial number is 1653723052734.",
            "NVRM: A GPU crash dump has been created. If possible, please run",
            "NVRM: nvidia-bug-report.sh as root to collect this data before",
            "NVRM: the NVIDIA kernel module is unloaded.",
        ),
        (
            "NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.",
            "NVRM: GPU at 0000:b3:00.0 has fallen off the bus.",
        ),
        # the words alone
        ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",),
        ("NVRM: GPU at PCI:0000:b3:00: GPU has fallen off the bus.",),
        ("NVRM: GPU at PCI:0000:B3:00.0 has fallen off the bus.",),
        ("NVRM: GPU 00000000:b3:00.0: GPU has fallen off the bus.",),
        (f"NVRM: GPU at PCI:0000:b3:00: {UUID} fallen off the bus.",),
    ],
)
def test_gpu_off_the_bus_is_one_xid_79(lines: tuple[str, ...]) -> None:
    assert xids_of(*lines) == [("0000:b3:00", 79)]


def test_gpu_off_the_bus_keeps_all_lines_as_evidence() -> None:
    (event,) = parse(
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert event.text.startswith("NVRM: The NVIDIA GPU 0000:b3:00.0 ... NVRM: fallen off the bus")


def test_two_gpus_off_the_bus_are_two_events() -> None:
    lines = [
        "NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:b4:00): 79, GPU has fallen off the bus.",
        "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:b4:00.0: GPU has fallen off the bus.",
    ]
    assert xids_of(*lines) == [("0000:b3:00", 79), ("0000:b4:00", 79)]


SWITCH = "0000:c1:00.0"


def switch(text: str) -> str:
    return f"[    5.1] nvidia-nvswitch3: SXid (PCI:{SWITCH}): {text}"


@pytest.mark.parametrize(
    "text",
    [
        "24007, Fatal, Link 30 sourcetrack timeout error",
        "11001, Fatal, ingress invalid command",
        "10004, Fatal, Unexpected PRI error",
    ],
)
def test_fatal_sxid_reboots_the_node(text: str) -> None:
    judge = TimedAssessor()
    judge.lines(switch(text))
    (finding,) = judge.assessor.findings
    assert (finding.subject, finding.severity, finding.action, finding.mode) == (
        SWITCH,
        Severity.CRITICAL,
        Action.REBOOT_NODE,
        Mode.ENFORCE,
    )


@pytest.mark.parametrize(
    "lines",
    [
        (
            "28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
            "28006, Severity 0 Engine instance 46 Sub-engine instance 00",
            "28006, Data {0x00140004, 0x00100000, 0x00140004, 0x00000000, 0x00000000, 0x00000000, 0x00000000}",
        ),
        (
            "22013, Non-fatal, Link 44 Minion Link DLREQ interrupt",
            "22013, Severity 0 Engine instance 44 Sub-engine instance 00",
            "22013, Data {0x0000002c, 0x0000002c, 0x00000000, 0x0000002c, 0x80005302, 0x00000000, 0x00000000}",
        ),
        ("20009, Non-fatal, Link 28 RX Short Error Rate",),
        ("10005, Thermal Slowdown Engaged | Temp higher than WARN Threshold",),
    ],
)
def test_non_fatal_sxid_is_only_observed(lines: tuple[str, ...]) -> None:
    judge = TimedAssessor()
    judge.lines(*map(switch, lines))
    (finding,) = judge.assessor.findings
    assert (finding.subject, finding.severity, finding.mode) == (SWITCH, Severity.INFO, Mode.OBSERVE)
    assert finding.action is Action.NONE


@pytest.mark.parametrize(
    "text",
    [
        "12028, Data {0x000001c0, 0x00bd5c8a, 0x00000500, 0x00000064, 0x00000000, 0x40008000, 0x5a001100}",
        "12028, Severity 1 Engine instance 32 Sub-engine instance 00",
    ],
)
def test_details_of_an_sxid_are_no_finding(text: str) -> None:
    assert TimedAssessor().lines(switch(text)) == set()


def test_fatal_sxid_outranks_others_of_its_switch() -> None:
    judge = TimedAssessor()
    judge.lines(switch("20009, Non-fatal, Link 28 RX Short"), switch("24007, Fatal, Link 30 sourcetrack timeout"))
    (finding,) = judge.assessor.findings
    assert finding.action is Action.REBOOT_NODE


def test_reader_remembers_a_bounded_number_of_gpus() -> None:
    reader = XidParser()
    for number in range(10 * MAX_ANNOUNCED_UUIDS):
        reader.parse_line(f"NVRM: GPU at PCI:{number:04x}:00:00: GPU-{number:08x}-c55b-d076-fa0e-d464e4c7e08b")
    assert len(reader.bus_id_by_uuid) == MAX_ANNOUNCED_UUIDS
