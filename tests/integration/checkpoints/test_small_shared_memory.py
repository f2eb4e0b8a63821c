"""A container's /dev/shm of 64 MiB: data loaders and training go on, and the log says that checkpoints do not fit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.launcher import ROOT

pytestmark = pytest.mark.slow

MOUNT = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec"

TRAIN = """
import torch, everstep
from torch import nn
from torch.utils.data import Dataset

class Data(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        return torch.full((1000, 100), float(index % 7) / 7)

def train(run):
    torch.manual_seed(0)
    layers = [nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 1000)]
    model = run.replicate(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    loader = run.loader(Data(), global_batch=16, num_workers=2, prefetch_factor=2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=12):
        sample = loader.batch(step)[..., 0]
        (model(sample) - sample).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {run.rank} is through", flush=True)

everstep.main(train)
"""


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-m", "sh", "-c", f"{MOUNT} true"], capture_output=True, check=False).returncode == 0
    )


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory that stays in sight below the mount; temporary directories of tests may be in /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="ev-", dir="/var/tmp") as name:
        yield Path(name)


def test_loader_workers_outlive_a_small_shared_memory(folder: Path) -> None:
    if not may_mount():
        pytest.skip("no mount namespace may be made here")
    (folder / "train.py").write_text(TRAIN)
    launch = f"{sys.executable} -m everstep_trainer.launch --nproc-per-node 2 --standalone --hang-threshold-s 120"
    command = f"{MOUNT} {launch} --state-dir {folder / 'state'} train.py"
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is through") == 2
    assert "Bus error" not in result.stderr
    assert "stay free for the script's data loaders: enlarge /dev/shm" in result.stderr
