from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_agent.drivers.kmsg import MAX_LINE_BYTES, READ_BYTES, KernelLog, LogPosition
from everstep_agent.policy.xids import XidParser


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kern.log"


@pytest.fixture
def logs() -> Iterator[list[KernelLog]]:
    opened: list[KernelLog] = []
    yield opened
    for log in opened:
        log.close()


def opened(logs: list[KernelLog], path: Path, position: LogPosition | None = None) -> KernelLog:
    log = KernelLog(str(path), position)
    logs.append(log)
    log.open()
    return log


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_log_created_later_is_read_from_its_beginning(path: Path, logs: list[KernelLog]) -> None:
    log = opened(logs, path)
    assert log.error
    assert not log.has_new_data()
    append(path, "first\n")
    assert log.has_new_data()
    assert log.read() == ["first"]
    assert not log.error


def test_rotation_loses_no_line(path: Path, logs: list[KernelLog]) -> None:
    append(path, "")
    log = opened(logs, path)
    append(path, "before\n")
    path.rename(path.with_suffix(".1"))
    append(path.with_suffix(".1"), "late\n")
    append(path, "after\n")
    lines: list[str] = []
    for _ in range(4):
        lines += log.read()
    assert lines == ["before", "late", "after"]


def test_truncated_file_is_read_from_its_beginning(path: Path, logs: list[KernelLog]) -> None:
    append(path, "")
    log = opened(logs, path)
    append(path, "a long first line\n")
    log.read()
    path.write_text("x\n")
    assert [line for _ in range(3) for line in log.read()] == ["x"]


def test_endless_line_is_cut_and_costs_bounded_memory(path: Path, logs: list[KernelLog]) -> None:
    append(path, "")
    log = opened(logs, path)
    append(path, "x" * (3 * READ_BYTES) + "\nnext\n")
    lines = [line for _ in range(6) for line in log.read()]
    assert [len(line) for line in lines] == [MAX_LINE_BYTES, 4]
    assert lines[-1] == "next"


def test_restarted_log_resumes_at_saved_position(path: Path, logs: list[KernelLog]) -> None:
    append(path, "")
    log = opened(logs, path)
    append(path, "seen\nhalf")
    log.read()
    append(path, " and half\nmissed\n")
    assert opened(logs, path, log.position).read() == ["half and half", "missed"]


def test_pipe_wakes_its_reader_and_survives_its_writers(tmp_path: Path, logs: list[KernelLog]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    log = opened(logs, pipe)
    assert log.wait_descriptor is not None
    for word in ("one", "two"):
        with pipe.open("w") as writer:
            writer.write(f"{word}\n")
        assert log.read() == [word]
    assert log.read() == []


def test_kernel_records_are_read_once_by_their_numbers(logs: list[KernelLog], tmp_path: Path) -> None:
    log = opened(logs, tmp_path / "none", LogPosition(sequence=7))
    assert log._parse_record(b"4,7,100,-;old\n") == []
    assert log._parse_record(b"4,8,101,-;NVRM: new\n SUBSYSTEM=pci\n") == ["NVRM: new"]
    assert log.position.sequence == 8


def test_fresh_install_ignores_old_kernel_records() -> None:
    log = KernelLog("/nowhere", not_before_s=1000.0)
    assert log._parse_record(b"4,1,999000000,-;NVRM: last month\n") == []
    assert log._parse_record(b"4,2,1000000001,-;NVRM: just now\n") == ["NVRM: just now"]


@pytest.mark.parametrize(
    ("line", "bus", "xid"),
    [
        ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1234, GPU has fallen off the bus.", "0000:1b:00", 79),
        ("[ 12.5] NVRM: Xid (PCI:0000:9D:00): 48, pid='<unknown>', An uncorrectable double bit", "0000:9d:00", 48),
        ("NVRM: Xid (PCI:0000:c3:00.0): 13, Graphics Exception", "0000:c3:00", 13),
        ("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.", "0000:1b:00", 79),
        ("NVRM: The NVIDIA GPU 0000:41:00.0 has fallen off the bus and is not responding", "0000:41:00", 79),
        ("NVRM: GPU at PCI:0000:1b:00: GPU has fallen off the bus", "0000:1b:00", 79),
    ],
)
def test_xid_lines_of_all_kinds_are_understood(line: str, bus: str, xid: int) -> None:
    event = XidParser().parse_line(line)
    assert event is not None
    assert (event.pci_bus_id, event.xid, event.source) == (bus, xid, "kernel")


def test_recovery_action_is_taken_from_the_line() -> None:
    event = XidParser().parse_line(
        "NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
    )
    assert event is not None
    assert event.recovery_action == 4


def test_record_of_another_facility_is_not_the_kernels() -> None:
    log = KernelLog("/dev/kmsg")
    assert log._parse_record(b"12,44,2000003,-;NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off\n") == []
    assert log._parse_record(b"4,45,2000004,-;NVRM: Xid (PCI:0000:1b:00): 13, x\n") != []
    assert log.position.sequence == 45


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/tmp", "/"])
def test_path_that_is_no_log_is_refused_in_a_sentence(path: str, logs: list[KernelLog]) -> None:
    log = opened(logs, Path(path))
    assert log.error == f"{path} is no kernel log: expected /dev/kmsg, a file or a named pipe"
    assert log.wait_descriptor is None
    assert log.read() == []


def test_file_replaced_by_a_directory_keeps_the_reader(path: Path, logs: list[KernelLog]) -> None:
    append(path, "")
    log = opened(logs, path)
    append(path, "before\n")
    path.rename(path.with_suffix(".1"))
    path.mkdir()
    assert [line for _ in range(3) for line in log.read()] == ["before"]
    assert "is no kernel log" in log.error
    path.rmdir()
    append(path, "after\n")
    assert [line for _ in range(3) for line in log.read()] == ["after"]
