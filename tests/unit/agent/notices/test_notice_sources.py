"""Answers of each provider, and of the site's file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.vocabulary import Action, Severity
from everstep_agent.notices.aws import parse_instance_action, parse_maintenance, parse_rebalance
from everstep_agent.notices.azure import parse_events
from everstep_agent.notices.gcp import parse_maintenance_event, parse_preempted, parse_upcoming
from everstep_agent.notices.notice import Notice, NoticeError, parse_time, to_finding
from everstep_agent.notices.notice_file import read_notice_file
from everstep_agent.notices.watch import detect_provider

MAINTENANCE = b"""[{"NotBefore": "21 Jan 2019 09:00:43 GMT", "Code": "system-reboot",
"Description": "scheduled reboot", "EventId": "instance-event-1", "NotAfter": "21 Jan 2019 09:17:23 GMT",
"State": "%s"}]"""
AZURE = b"""{"DocumentIncarnation": 2, "Events": [{"EventId": "C7061BAC", "EventStatus": "Scheduled",
"EventType": "%s", "ResourceType": "VirtualMachine", "Resources": ["WestNO_0", "vm-7"],
"NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT", "Description": "Virtual machine is going down", "EventSource": "Platform",
"DurationInSeconds": -1}]}"""


def test_aws_spot_reclaim_is_a_drain() -> None:
    [notice] = parse_instance_action(b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
    finding = to_finding(notice, 1.0, 2.0, 600.0)
    assert (finding.action, finding.severity, finding.value) == (Action.DRAIN, Severity.WARNING, 1505722920.0)
    assert finding.message == "AWS will terminate this spot instance at 2017-09-18T08:22:00Z"


def test_aws_rebalance_recommendation_is_information() -> None:
    [notice] = parse_rebalance(b'{"noticeTime": "2020-10-27T08:22:00Z"}')
    assert to_finding(notice, 1.0, 1.0, 600.0).action is Action.NONE


@pytest.mark.parametrize(("state", "count"), [(b"active", 1), (b"completed", 0), (b"canceled", 0)])
def test_aws_maintenance_counts_while_active(state: bytes, count: int) -> None:
    assert len(parse_maintenance(MAINTENANCE % state)) == count


def test_scheduled_event_drains_only_shortly_before() -> None:
    [notice] = parse_maintenance(MAINTENANCE % b"active")
    at = 1548061243.0
    early, due = (to_finding(notice, 1.0, at - before, 600.0) for before in (86400.0, 599.0))
    assert (early.severity, early.action) == (Severity.INFO, Action.NONE)
    assert (due.severity, due.action, due.key) == (Severity.WARNING, Action.DRAIN, early.key)


def test_gcp_preemption_ends_within_30_s() -> None:
    [notice] = parse_preempted(b"TRUE")
    assert to_finding(notice, 1000.0, 1010.0, 600.0).value == 1030.0
    assert parse_preempted(b"FALSE") == []


@pytest.mark.parametrize(
    ("answer", "drains"),
    [(b"NONE", []), (b"MIGRATE_ON_HOST_MAINTENANCE", [False]), (b"TERMINATE_ON_HOST_MAINTENANCE", [True])],
)
def test_gcp_maintenance_drains_unless_migrated(answer: bytes, drains: list[bool]) -> None:
    assert [notice.drains for notice in parse_maintenance_event(answer)] == drains


def test_gcp_upcoming_maintenance_has_a_window() -> None:
    answer = b'{"can_reschedule": "TRUE", "latest_window_start_time": "2026-05-05T10:00:00+00:00", '
    answer += b'"maintenance_status": "%s", "type": "SCHEDULED", "window_start_time": "2026-05-04T06:00:00+00:00"}'
    [notice] = parse_upcoming(answer % b"PENDING")
    assert notice.deadline == parse_time("2026-05-04T06:00:00Z")
    assert parse_upcoming(answer % b"UNKNOWN") == []


@pytest.mark.parametrize(
    ("kind", "machine", "drains"),
    [
        (b"Preempt", "VM-7", [True]),
        (b"Terminate", "vm-7", [True]),
        (b"Redeploy", "WestNO_0", [True]),
        (b"Reboot", "vm-7", [True]),
        (b"Freeze", "vm-7", [False]),
        (b"Preempt", "vm-70", []),
        (b"Applause", "vm-7", []),
    ],
)
def test_azure_event_concerns_only_named_machines(kind: bytes, machine: str, drains: list[bool]) -> None:
    assert [notice.drains for notice in parse_events(AZURE % kind, machine)] == drains


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[1]", b'{"Events": [3]}', b'{"action": "stop"}', b"[" * 5000, b"\xff"]
)
def test_garbage_is_an_error_and_no_notice(body: bytes) -> None:
    for parse in (parse_instance_action, parse_maintenance, parse_preempted, parse_maintenance_event):
        with pytest.raises(NoticeError):
            parse(body)
    with pytest.raises(NoticeError):
        parse_events(body, "vm-7")


def test_file_notice_holds_until_it_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "notice.json"
    assert read_notice_file(file, 0.0) == []
    file.write_text('{"reason": "firmware\\u0007 update"}')
    [notice] = read_notice_file(file, 0.0)
    assert notice.message == "the site announces: firmware  update"
    assert to_finding(notice, 1.0, 1.0, 600.0).action is Action.DRAIN


def test_forgotten_or_broken_file_drains_nothing(tmp_path: Path) -> None:
    file = tmp_path / "notice.json"
    file.write_text('{"reason": "reboot", "deadline": "2026-05-04T06:00:00Z"}')
    assert read_notice_file(file, parse_time("2026-05-04T07:00:00Z")) == []
    for content in ("", "reboot", '{"reason": 3}', '{"reason": "a", "deadline": "soon"}', "{" + " " * 9000):
        file.write_text(content)
        with pytest.raises(NoticeError):
            read_notice_file(file, 0.0)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(NoticeError):
        read_notice_file(file, 0.0)


@pytest.mark.parametrize(
    ("tables", "provider"),
    [
        ({"sys_vendor": "Amazon EC2"}, "aws"),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
        ({"sys_vendor": "Google"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation"}, ""),
        ({}, ""),
    ],
)
def test_provider_is_told_by_dmi_tables(tables: dict[str, str], provider: str, tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/dmi/id"
    folder.mkdir(parents=True)
    for name, content in tables.items():
        (folder / name).write_text(content + "\n")
    assert detect_provider(tmp_path) == provider


def test_notice_without_time_names_none() -> None:
    finding = to_finding(Notice(subject="file/x", message="leave"), 5.0, 5.0, 600.0)
    assert (finding.message, finding.value, finding.since) == ("leave", None, 5.0)
