"""Pin what ``import everstep`` offers to a training script."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import everstep

SCRIPT = """
import everstep
import torch
from torch import nn


def train(run: everstep.Run) -> None:
    model = nn.Linear(4, 1)
    replicated = run.replicate(model)
    optimizer = torch.optim.AdamW(replicated.parameters())
    sampler = run.sampler(100, global_batch=4)
    run.track(model=model, optimizer=optimizer, sampler=sampler)
    for _ in run.steps(until=10):
        optimizer.zero_grad()
        replicated(torch.ones(4, 4)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    everstep.main(train)
"""


@pytest.mark.torch
def test_public_names_are_pinned() -> None:
    assert sorted(everstep.__all__) == [
        "ElasticSampler",
        "HookSettings",
        "Regroup",
        "Run",
        "main",
        "unrepeatable_modules",
    ]
    assert all(getattr(everstep, name) is not None for name in everstep.__all__)


def test_import_of_everstep_loads_no_torch() -> None:
    code = "import sys, everstep; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize("package", ["everstep", "everstep_agent", "everstep_controller", "everstep_trainer"])
def test_package_is_marked_as_typed(package: str) -> None:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    assert Path(found.origin).with_name("py.typed").is_file()


@pytest.mark.nightly  # torch's types take 14 s of CPU
def test_script_of_a_user_passes_mypy_strict(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=230)
    assert done.returncode == 0, done.stdout
