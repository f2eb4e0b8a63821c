"""The kind of a rank: the hardware and software that determine its bits."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from everstep_trainer.sdc import compute_kind as module
from everstep_trainer.sdc.compute_kind import compute_kind


def test_kind_names_processor_capability_and_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU 9000\n")
    monkeypatch.setattr(module, "CPU_INFO", info)
    compute_kind.cache_clear()
    kind = compute_kind(torch.device("cpu"))
    compute_kind.cache_clear()
    assert kind.startswith(f"Some CPU 9000, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")


def test_kind_differs_between_vector_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_kind.cache_clear()
    first = compute_kind(torch.device("cpu"))
    compute_kind.cache_clear()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    second = compute_kind(torch.device("cpu"))
    compute_kind.cache_clear()
    assert first != second


def test_kind_of_unknown_processor_is_its_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "missing")
    compute_kind.cache_clear()
    kind = compute_kind(torch.device("cpu"))
    compute_kind.cache_clear()
    assert kind.split(", ")[0] == platform.machine()
