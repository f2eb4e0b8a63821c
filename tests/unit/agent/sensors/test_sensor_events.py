"""Rows of bench/sensor_events through the real sensors; ``python -m bench.sensors`` runs all of them."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from bench.sensors.events import EventRow, ExpectedFinding, Outcome, load_rows, run_row
from everstep.vocabulary import Action
from everstep_agent.policy.rules import load_policy
from tests.support.agents.sensors import FELL_OFF

ROWS = load_rows()
SHARE = 48
"""A test run takes every so many rows, chosen by name, since each takes about 0.2 s."""

SAMPLE = [row for row in ROWS if zlib.crc32(row.name.encode()) % SHARE == 0]
OTHERS = [row for row in ROWS if row not in SAMPLE]


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: row.name)
def test_event_makes_its_findings_and_no_other(row: EventRow) -> None:
    assert run_row(row, load_policy()).problems == ""


@pytest.mark.nightly
@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row.name)
def test_other_event_makes_its_findings_and_no_other(row: EventRow) -> None:
    assert run_row(row, load_policy()).problems == ""


def test_harmless_event_expects_no_finding() -> None:
    assert [row.name for row in ROWS if row.fault != bool(row.expect)] == []


def run(**values: Any) -> Outcome:
    return run_row(EventRow(name="x", description="", for_s=1, **values), load_policy())


def test_row_without_its_finding_fails() -> None:
    assert run(fault=True, expect=(ExpectedFinding(rule="xid-79", subject="", action=Action.DRAIN),)).missing


def test_harmless_row_that_evicts_fails() -> None:
    outcome = run(fault=False, kernel_lines=(FELL_OFF,))
    assert outcome.evicting == ("xid-79 0000:1b:00 (critical, drain, enforce)",)
    assert not outcome.is_right
