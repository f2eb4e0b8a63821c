"""A job whose versions go to storage: real launcher, agent, vault and controller, and what is killed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from everstep.client import Client
from everstep.errors import NotFound
from everstep.wire.v1.operator_history import CheckpointCopy
from examples.demo.world import wait_for
from tests.support.forked import ForkPool
from tests.support.launched import Launched, launched
from tests.support.warm_launcher import WarmWorld

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
    """In a process of its own: read a checkpoint as a program does that has never heard of Everstep."""
    ours = ("everstep", "everstep_agent", "everstep_controller", "everstep_trainer")
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        sys.modules[name] = None  # type: ignore[assignment] # an import of it fails
    sys.modules.update(dict.fromkeys(ours))  # type: ignore[arg-type]
    state = {"model": {"weight": torch.zeros(width, width), "bias": torch.zeros(width)}}
    dcp.load(state, checkpoint_id=folder)
    assert state["model"]["weight"].abs().sum() > 0


class Stored:
    """What is on storage."""

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


def _named(launcher: Launched, words: str) -> int:
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

        for victim in ("everstep_controller.main", "everstep_agent.vault.process", "everstep_agent.main"):
            being_written: set[str] = set()
            launcher.eventually(lambda found=being_written: found.update(written_now()) or found, "a version to write")
            (name,) = being_written
            os.kill(_named(launcher, victim), signal.SIGKILL)
            launcher.eventually(lambda name=name: name in stored.whole(), f"{name} whole after the death of {victim}")
            forks.start(load, str(stored.folder / name), 1024).result()
            launcher.eventually(lambda victim=victim: _named(launcher, victim), f"another {victim}")


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
                told = client.job_checkpoints("spilled")
            except NotFound:  # its launcher is not there yet
                return []
            return [one for one in told.versions if one.storage_tier == "storage" and one.restorable]

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


SHARDED = """
import os, time, torch
from torch.distributed.fsdp import fully_shard
import everstep

def train(run):
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=100000):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.02)

everstep.main(train)
"""


@pytest.mark.nightly
def test_several_nodes_spill_one_shared_checkpoint(short_path: Path, forks: ForkPool) -> None:
    script = short_path / "sharded.py"
    script.write_text(SHARDED)
    stored = Stored(short_path / "stored", "sharded")
    with WarmWorld(short_path / "out", ["n1", "n2"]) as world:
        world.start_controller()
        world.boot_nodes()
        for node in world.nodes.values():
            command = ["-m", "everstep_trainer.launch", "--job", "sharded", "--nnodes", "2"]
            command += ["--agent-socket", str(node.agent_socket), "--spill-to", str(short_path / "stored")]
            command += ["--spill-every", "20", "--spill-keep", "0", str(script)]
            node.join(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        wait_for(lambda: bool(stored.whole()), "a checkpoint of both nodes")
        token = short_path / "token"
        world.write_secret(token, world.operator_token)
        asked = [sys.executable, "-m", "everstep.cli.main", "--controller", world.url, "--token-file", str(token)]
        said = subprocess.run(
            [*asked, "checkpoints", "sharded"], capture_output=True, text=True, timeout=120, check=False
        )
        assert said.returncode == 0, said.stderr
        assert "storage" in said.stdout
    newest = stored.folder / stored.whole()[-1]
    assert sorted(path.name for path in newest.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    forks.start(load, str(newest), 64).result()
