"""A job whose versions go to storage: real launcher, agent, vault and controller, and what is killed in between."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from everstep.client import Client
from everstep.errors import NotFound
from everstep.wire.v1.operator_history import CheckpointCopy
from examples.demo.world import wait_for
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.launcher import LauncherProcess, launched
from tests.support.processes.warm_programs import WarmWorld

pytestmark = pytest.mark.slow

TRAIN = """
import os, pathlib, time, torch
import everstep

HERE = pathlib.Path(__file__).parent

def train(run):
    torch.manual_seed(1)
    model = run.replicate(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100000):
        with (HERE / f"steps-{os.environ['RANK']}").open("a") as file:
            print(step, os.getpid(), file=file)
        optimizer.zero_grad()
        model(torch.ones(2, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.03)

everstep.main(train)
"""


def load(folder: str, width: int) -> None:
    """Read a checkpoint in a separate process, without Everstep."""
    ours = ("everstep", "everstep_agent", "everstep_controller", "everstep_trainer")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        sys.modules[name] = None  # type: ignore[assignment] # an import of it fails
    sys.modules.update(dict.fromkeys(ours))  # type: ignore[arg-type]
    state = {"model": {"weight": torch.zeros(width, width), "bias": torch.zeros(width)}}
    state_dict_loader.load(state, checkpoint_id=folder)
    assert state["model"]["weight"].abs().sum() > 0


class Stored:
    """The checkpoints on storage."""

    def __init__(self, base: Path, job: str) -> None:
        self.folder = base / job

    def whole(self) -> list[str]:
        return sorted(path.parent.name for path in self.folder.glob("*/.metadata"))

    def begun(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step-*"))


def _script(short_path: Path, width: int) -> str:
    path = short_path / "train.py"
    path.write_text(TRAIN.replace("WIDTH", str(width)))
    return str(path)


def _named(launcher: LauncherProcess, words: str) -> int:
    """The pid of the first process below the launcher with these words in its command line; 0 for none."""
    for pid in launcher.descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if words in command:
            return pid
    return 0


@pytest.mark.promise("storage-checkpoints")
def test_spill_write_continues_after_its_requester_dies(short_path: Path, forks: ForkPool) -> None:
    stored = Stored(short_path / "stored", "spilled")
    argv = ["--nproc-per-node", "2", "--job", "spilled", "--state-dir", str(short_path / "state"), "--spill-keep", "0"]
    argv += ["--spill-to", str(short_path / "stored"), "--spill-every", "10"]
    with launched(short_path, *argv, _script(short_path, 1024)) as launcher:

        def written_now() -> set[str]:
            """Return the version that a writer is at work on; empty if there is none."""
            return set(stored.begun()) - set(stored.whole()) if _named(launcher, "everstep_agent.spill") else set()

        being_written: set[str] = set()

        def note_version() -> bool:
            being_written.update(written_now())
            return bool(being_written)

        def is_whole(name: str) -> bool:
            return name in stored.whole()

        for victim in ("everstep_controller.main", "everstep_agent.vault.process", "everstep_agent.main"):
            launcher.eventually(note_version, "a version to write")
            name = being_written.pop()
            os.kill(_named(launcher, victim), signal.SIGKILL)
            launcher.eventually(partial(is_whole, name), f"{name} whole after the death of {victim}")
            forks.start(load, str(stored.folder / name), 1024).result()
            launcher.eventually(partial(_named, launcher, victim), f"another {victim}")


@pytest.mark.promise("storage-checkpoints")
def test_stopped_job_resumes_from_storage_automatically(short_path: Path, forks: ForkPool) -> None:
    """Old checkpoints are removed meanwhile, and the last ones stay."""
    script, on_storage = _script(short_path, 64), Stored(short_path / "stored", "spilled")
    with WarmWorld(short_path / "out", ["n1"]) as world:
        world.start_controller()
        world.boot_nodes()
        node = world.nodes["n1"]
        client = Client(world.url, world.operator_token)

        def launch() -> None:
            command = ["-m", "everstep_trainer.launch", "--job", "spilled", "--agent-socket", str(node.agent_socket)]
            command += ["--spill-to", str(short_path / "stored"), "--spill-every", "10", "--spill-keep", "2", script]
            node.join(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

        def stored() -> list[CheckpointCopy]:
            try:
                checkpoints = client.job_checkpoints("spilled")
            except NotFound:  # its launcher is not there yet
                return []
            return [copy for copy in checkpoints.versions if copy.storage_tier == "storage" and copy.restorable]

        launch()
        wait_for(lambda: len(on_storage.whole()) == 2, "two checkpoints")
        first = on_storage.whole()[0]
        wait_for(lambda: first not in on_storage.begun(), "the first goes when the third is there")
        client.stop_job("spilled", reason="to go on later")
        assert node.launcher is not None
        node.launcher.wait(60)
        steps, newest = short_path / "steps-0", int(on_storage.whole()[-1].split("-")[1])
        assert newest >= stored()[0].version.step  # the last one is written while the job ends
        forks.start(load, str(on_storage.folder / on_storage.whole()[-1]), 64).result()
        steps.unlink()
        launch()
        wait_for(lambda: steps.exists() and bool(steps.read_text()), "the first step of the second run")
        assert int(steps.read_text().split()[0]) == newest + 1
