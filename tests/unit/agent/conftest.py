"""Fixtures of the agent: a stub of the controller, a machine with virtual GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep_agent.virtual.scenario import VirtualMachine, load_scenario
from everstep_agent.virtual.virtual_nvml import install, uninstall

from everstep.system_clock import SYSTEM_CLOCK
from tests.support.controller_stub import ControllerStub, serving
from tests.support.local_node import Node
from tests.support.sensing import Control
from tests.support.uplinks import TOKEN, Bench


@pytest.fixture
def node() -> Node:
    """A node that nobody is connected to yet."""
    return Node()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """What uplinks are made of."""
    return Bench(tmp_path)


@pytest.fixture
def controller() -> Iterator[ControllerStub]:
    """A stub in a thread that speaks the wire messages."""
    with serving(ControllerStub(TOKEN)) as stub:
        yield stub


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """The machine's control file, which changes what its GPUs show."""
    return Control(tmp_path / "control.json")


@pytest.fixture
def machine(control: Control) -> Iterator[VirtualMachine]:
    """The machine, behind pynvml for as long as the test runs."""
    machine = VirtualMachine(load_scenario("default", "n1"), str(control.path))
    install(machine, SYSTEM_CLOCK)
    yield machine
    uninstall()
