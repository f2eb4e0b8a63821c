"""torch and the GPU driver are checked with facts of machines where they do not fit each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from everstep.doctor import accelerators
from everstep.doctor.accelerators import DriverFacts, TorchFacts, check_driver, check_other_gpus, check_torch
from everstep.doctor.results import CheckResult, Status

GPUS = DriverFacts(device_files=8, devices=8, driver="570.1")
NONE = DriverFacts(error="libnvidia-ml.so.1 cannot be loaded")
CPU_BUILD = TorchFacts(version="2.13.0+cpu", has_gloo=True)
CUDA_BUILD = TorchFacts(version="2.13.0", cuda="12.8", devices=8, has_gloo=True, has_nccl=True)


def worst(results: Iterable[CheckResult]) -> tuple[Status, str]:
    order = list(Status)
    found = max(results, key=lambda result: order.index(result.status))
    return found.status, found.sentence


@pytest.mark.parametrize(
    ("driver", "status", "text"),
    [
        (GPUS, Status.OK, "8 GPUs, driver 570.1"),
        (NONE, Status.OK, "ranks train on the CPU"),
        (DriverFacts(device_files=2, error="NVML answers with error 18"), Status.FAIL, "error 18"),
    ],
)
def test_driver_must_show_the_gpus(driver: DriverFacts, status: Status, text: str) -> None:
    found, sentence = worst(check_driver(driver))
    assert found is status
    assert text in sentence


@pytest.mark.parametrize(
    ("torch", "driver", "status", "text"),
    [
        (CPU_BUILD, NONE, Status.OK, "for CPUs"),
        (CUDA_BUILD, GPUS, Status.OK, "CUDA 12.8"),
        (CUDA_BUILD, NONE, Status.OK, "CUDA 12.8"),
        (CPU_BUILD, GPUS, Status.FAIL, "install a build with CUDA"),
        (TorchFacts(version="2.12.1", has_gloo=True), NONE, Status.FAIL, "2.13 or later"),
        (TorchFacts(error="torch is not installed"), NONE, Status.FAIL, "import torch"),
        (TorchFacts(version="2.13.0"), NONE, Status.FAIL, "without gloo"),
        (
            TorchFacts(version="2.13.0", cuda="12.8", device_error="driver too old", has_gloo=True, has_nccl=True),
            GPUS,
            Status.FAIL,
            "driver too old",
        ),
        (
            TorchFacts(version="2.13.0", cuda="12.8", devices=2, has_gloo=True, has_nccl=True),
            GPUS,
            Status.WARN,
            "2 of 8 GPUs",
        ),
        (TorchFacts(version="2.13.0", cuda="12.8", devices=8, has_gloo=True), GPUS, Status.FAIL, "without NCCL"),
        (
            TorchFacts(version="2.14.1", cuda="13.0", devices=8, has_gloo=True, has_nccl=True, uses_nccl2=True),
            GPUS,
            Status.WARN,
            "set TORCH_DIST_USE_NCCL2=0",
        ),
    ],
)
def test_torch_must_fit_the_machine(torch: TorchFacts, driver: DriverFacts, status: Status, text: str) -> None:
    found, sentence = worst(check_torch(torch, driver))
    assert found is status
    assert text in sentence


@pytest.mark.slow
def test_torch_is_read_in_a_child() -> None:
    facts = accelerators.read_torch()
    assert facts.error == ""
    assert facts.version
    assert facts.has_gloo


@pytest.mark.torch
def test_child_that_fails_becomes_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Illegal instruction' >&2; exit 132\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert accelerators.read_torch().error == "importing it ended with status 132: Illegal instruction"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    assert "not imported within 0.2 s" in accelerators.read_torch(0.2).error


def test_gpus_of_other_vendors_are_not_watched() -> None:
    assert list(check_other_gpus({"AMD": 0})) == []
    status, text = worst(check_other_gpus({"AMD": 8}))
    assert (status, "GPUs of AMD are not watched: this machine has 8" in text) == (Status.WARN, True)
