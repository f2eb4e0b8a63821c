"""Bundles of logs: their content and limits, and the findings that cause them."""

from __future__ import annotations

import asyncio
import os
import tarfile
from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep.errors import Unavailable
from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep_agent.local import log_bundles
from everstep_agent.local.log_bundles import MIN_INTERVAL_S, BundleContents, LogBundles, read_log_tail, write_bundle


def contents(reason: str = "a request", kernel_log: str = "", has_bug_report: bool = False) -> BundleContents:
    parts = {"findings.json": b"[]"}
    return BundleContents(node="n1", reason=reason, parts=parts, kernel_log=kernel_log, has_bug_report=has_bug_report)


def parts_of(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {entry.name.partition("/")[2]: archive.extractfile(entry) for entry in archive}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def lost(bus_id: str) -> Finding:
    kind = FindingKind.GPU_LOST
    return Finding(kind=kind, subject=bus_id, severity=Severity.CRITICAL, message="", action=Action.REBOOT_NODE)


@pytest.fixture
def _large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bundles, "MIN_FREE_BYTES", 0)


pytestmark = pytest.mark.usefixtures("_large_disk")


def test_bundle_holds_parts_and_names_missing_ones(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("NVRM: Xid 79\n")
    path = write_bundle(tmp_path / "kept", 0.0, contents(kernel_log=str(log)))
    assert path.name == "everstep-logs-n1-19700101T000000Z.tar.gz"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert parts_of(path).keys() == {"findings.json", "kernel.log", "README.txt"}
    path = write_bundle(tmp_path / "kept", 1.0, contents(kernel_log=str(tmp_path / "absent")))
    assert "kernel.log is missing: [Errno 2]" in parts_of(path)["README.txt"]


def test_log_of_a_pipe_is_left_to_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unavailable, match="is no file"):
        read_log_tail(str(tmp_path / "pipe"))


def test_large_log_is_cut_to_its_newest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bundles, "MAX_LOG_BYTES", 4)
    (tmp_path / "log").write_bytes(b"old new\n")
    assert read_log_tail(str(tmp_path / "log")) == b"new\n"


def test_oldest_bundles_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bundles, "MAX_BUNDLES", 2)
    for at in range(3):
        os.utime(write_bundle(tmp_path / "kept", at, contents()), (at, at))
    assert [path.name[-10:] for path in sorted((tmp_path / "kept").iterdir())] == ["01Z.tar.gz", "02Z.tar.gz"]
    monkeypatch.setattr(log_bundles, "MAX_FOLDER_BYTES", 1)
    newest = write_bundle(tmp_path / "kept", 9.0, contents())
    assert list((tmp_path / "kept").iterdir()) == [newest]


def test_full_disk_gets_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_bundles, "MIN_FREE_BYTES", 1 << 62)
    bundles = LogBundles(tmp_path / "kept", ManualClock(), contents)
    with pytest.raises(Unavailable, match="MiB are free"):
        asyncio.run(bundles.make("a request"))


@pytest.fixture
def bug_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a program in the place of the driver's, to be written."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program = tmp_path / "nvidia-bug-report.sh"
    program.touch(0o755)
    return program


def test_bug_report_is_added_to_the_finished_bundle(tmp_path: Path, bug_report: Path) -> None:
    bug_report.write_text(f'#!/bin/sh\nls {tmp_path}/kept > "$3.gz"\n')
    path = write_bundle(tmp_path / "kept", 0.0, contents(has_bug_report=True))
    assert parts_of(path)["nvidia-bug-report.log.gz"] == f"{path.name}\n", "the bundle was there before"
    assert list(path.parent.iterdir()) == [path]


def test_bug_report_that_hangs_is_stopped(tmp_path: Path, bug_report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug_report.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(log_bundles, "BUG_REPORT_TIMEOUT_S", 0.05)
    path = write_bundle(tmp_path / "kept", 0.0, contents(has_bug_report=True))
    assert "took longer than 0.05 s" in parts_of(path)["README.txt"]


def due(bundles: LogBundles) -> bool:
    return bundles.is_due


def test_findings_cause_one_bundle_in_an_interval(tmp_path: Path) -> None:
    clock = ManualClock()
    bundles = LogBundles(tmp_path / "kept", clock, contents)
    bundles.note_findings([lost("0000:1b:00")])
    assert due(bundles)
    asyncio.run(bundles.make_due())
    bundles.note_findings([lost("0000:1b:00"), lost("0000:43:00")])
    assert not due(bundles)
    clock.advance(MIN_INTERVAL_S)
    asyncio.run(bundles.make_due())
    assert bundles.newest is not None
    assert parts_of(bundles.newest)["README.txt"].endswith("kept because of: gpu.lost/0000:43:00\n")
    bundles.note_findings([])
    assert not due(bundles)
