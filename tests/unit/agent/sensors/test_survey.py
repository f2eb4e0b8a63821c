"""The survey of sensors names the sensors that work, those that do not, and how to repair them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.doctor.results import CheckResult, Status
from everstep_agent.drivers.pci_gpus import PciGpu
from everstep_agent.sensors import survey
from everstep_agent.sensors.survey import CHECKS
from everstep_agent.virtual.machine_tree import MachineTree
from everstep_agent.virtual.scenario import VirtualMachine
from tests.support.agents.sensors import BUS, Control


def surveyed(tree: MachineTree, log: Path) -> list[CheckResult]:
    return list(survey.survey(tree.sys, tree.proc, Path("/dev/null"), str(log)))


@pytest.fixture
def tree(machine: VirtualMachine, tmp_path: Path) -> MachineTree:
    made = MachineTree(tmp_path / "machine")
    made.update(machine)
    (made.proc / "1").mkdir()
    return made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kern.log"
    path.write_text("kernel: a line\n")
    return path


def test_survey_of_a_healthy_machine_is_well(tree: MachineTree, log: Path) -> None:
    results = surveyed(tree, log)
    assert [result.check for result in results] == list(CHECKS)
    assert {result.status for result in results} == {Status.OK}
    sentences = {result.check: result.sentence for result in results}
    assert sentences["GPUs"].startswith("8 of 8 GPUs answer, driver ")
    assert sentences["kernel log"].startswith("1 lines of the kernel in")
    assert "mlx5_0/1 (compute)" in sentences["network ports"]
    assert sentences["hardware"].startswith(
        "watched: 4 counters of memory, 10 ends of PCIe links, 1 RAID arrays, 3 disk"
    )


def test_survey_names_the_gpu_that_fails(
    tree: MachineTree, log: Path, control: Control, machine: VirtualMachine
) -> None:
    control.write(gpus={"2": {"lost": True}})
    machine.reload_control()
    (failed,) = [result for result in surveyed(tree, log) if result.status is Status.FAIL]
    assert (failed.check, failed.sentence.partition(": ")[0]) == ("GPUs", "gpu 2")
    assert "GPU is lost" in failed.sentence


@pytest.mark.parametrize(
    ("gpu", "status", "part"),
    [
        (PciGpu(BUS, ""), Status.FAIL, "no driver is bound"),
        (PciGpu(BUS, "nvidia", is_visible=False), Status.WARN, "may not open"),
        (PciGpu(BUS, "vfio-pci"), Status.OK, "belongs to vfio-pci"),
    ],
)
def test_survey_explains_gpus_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: PciGpu, status: Status, part: str
) -> None:
    monkeypatch.setattr(survey, "pci_gpus", lambda *roots: (gpu,))
    result = next(iter(survey.check_bus(tmp_path, tmp_path, tmp_path, [])))
    assert result.status is status
    assert part in result.sentence


def test_survey_needs_sys_and_proc(tmp_path: Path) -> None:
    results = list(survey.survey(tmp_path, tmp_path, tmp_path, str(tmp_path / "absent")))
    by_check = {result.check: result for result in results}
    assert [by_check[name].status for name in CHECKS[:4]] == [Status.FAIL] * 3 + [Status.WARN]
    assert "mount sysfs" in by_check["network ports"].sentence
    assert "in a container give it the host's" in by_check["kernel log"].sentence


def test_kernel_log_without_permission_names_the_capability(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted", path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        (result,) = survey.check_kernel_log(str(log))
    assert (result.status, "CAP_SYSLOG" in result.sentence) == (Status.FAIL, True)


def test_pipe_of_the_kernel_log_keeps_its_lines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (result,) = survey.check_kernel_log(str(tmp_path / "pipe"))
    assert result.status is Status.OK


def test_network_namespace_of_a_container_is_named(tmp_path: Path) -> None:
    for process, inode in (("self", 1), ("1", 2)):
        (tmp_path / f"proc/{process}/ns").mkdir(parents=True)
        os.symlink(f"net:[{inode}]", tmp_path / f"proc/{process}/ns/net")
    (tmp_path / "class/net").mkdir(parents=True)
    (result,) = survey.check_ports(tmp_path, tmp_path / "proc", is_own_sysfs=True)
    assert (result.status, "hostNetwork" in result.sentence) == (Status.WARN, True)
    (result,) = survey.check_ports(tmp_path, tmp_path / "proc", is_own_sysfs=False)
    assert result.status is Status.OK
