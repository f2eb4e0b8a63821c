from __future__ import annotations

import sys

import pytest

from everstep_agent.drivers.commands import run_bounded
from everstep_agent.drivers.samples import UnitSample
from everstep_agent.drivers.systemd import parse_units

SLEEP = "import time; print('begun', flush=True); time.sleep(600)"
SHOWN = """LoadState=loaded
ActiveState=failed
Result=exit-code
NRestarts=5

LoadState=not-found
ActiveState=inactive
Result=success
NRestarts=[not set]"""


def python(program: str, timeout_s: float = 60.0, max_bytes: int = 100) -> str | None:
    return run_bounded((sys.executable, "-Sc", program), timeout_s, max_bytes)


@pytest.mark.parametrize(
    ("program", "output"),
    [("print('x')", "x\n"), ("print('x' * 1000)", "x" * 100), ("print('x'); raise SystemExit(1)", None)],
)
def test_output_is_bounded_and_failure_is_none(program: str, output: str | None) -> None:
    assert python(program) == output


def test_command_is_killed_at_its_deadline() -> None:
    assert python(SLEEP, timeout_s=0.05) is None


def test_absent_command_is_none() -> None:
    assert run_bounded(("/nowhere/systemctl",), 1.0, 100) is None


def test_units_are_read_in_their_order() -> None:
    failed, missing = parse_units(("a.service", "b.service"), SHOWN)
    assert (failed.name, failed.has_failed, failed.restarts, failed.detail) == ("a.service", 1, 5, "exit-code")
    assert (missing.is_unknown, missing.has_failed, missing.restarts) == (1, 0, None)


def test_text_without_the_units_gives_none() -> None:
    assert parse_units(("a.service",), "") == (UnitSample(name="a.service"),)
    assert parse_units(("a.service", "b.service"), "System has not been booted with systemd") == ()
