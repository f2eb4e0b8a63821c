"""Fixtures of sensors: a machine with virtual GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.virtual.load import load_scenario
from agent.virtual.machine import Machine
from agent.virtual.nvml import install, uninstall
from everstep.system_clock import SYSTEM_CLOCK
from tests.support.sensing import Control


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """The machine's control file, which changes what its GPUs show."""
    return Control(tmp_path / "control.json")


@pytest.fixture
def machine(control: Control) -> Iterator[Machine]:
    """The machine, behind pynvml for as long as the test runs."""
    machine = Machine(load_scenario("default", "n1"), str(control.path))
    install(machine, SYSTEM_CLOCK)
    yield machine
    uninstall()
