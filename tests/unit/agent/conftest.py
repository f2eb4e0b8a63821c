"""Fixtures of the agent: a stub of the controller, a machine with virtual GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.system_clock import SYSTEM_CLOCK
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall
from tests.support.agents.controller_stub import ControllerStub, serving
from tests.support.agents.node_jobs import NodeJobs
from tests.support.agents.sensors import Control
from tests.support.agents.uplinks import TOKEN, UplinkBench


@pytest.fixture
def node() -> NodeJobs:
    """A node without a connection."""
    return NodeJobs()


@pytest.fixture
def bench(tmp_path: Path) -> UplinkBench:
    """The parts that an uplink is made of."""
    return UplinkBench(tmp_path)


@pytest.fixture
def controller() -> Iterator[ControllerStub]:
    """A stub in a thread that exchanges wire messages."""
    with serving(ControllerStub(TOKEN)) as stub:
        yield stub


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """The control file of the machine, which changes the readings of its GPUs."""
    return Control(tmp_path / "control.json")


@pytest.fixture
def machine(control: Control) -> Iterator[VirtualMachine]:
    """A virtual machine behind pynvml for the duration of the test."""
    machine = VirtualMachine(load_scenario("default", "n1"), str(control.path))
    install(machine, SYSTEM_CLOCK)
    yield machine
    uninstall()
