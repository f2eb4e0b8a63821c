"""Nodes with memory for two slots and not for five, lost with all that was in them: the others go on within theirs.

Real controller, agents, vaults, launchers and ranks, whose state is sharded, with one copy of each share.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.cli.client import Client
from everstep.errors import NotFound
from everstep.ids import Version
from everstep.wire.v1 import operator as op
from everstep.wire.v1.kept import JobCheckpoints
from examples.demo.world import World, wait_for

pytestmark = pytest.mark.slow

NODES = ["n1", "n2", "n3", "n4"]
DEADLINE_S = 120.0
WIDTH = 1024
SHARE = 3 * 4 * WIDTH * WIDTH // len(NODES)
"""Of the weights and both moments, bytes a node: in two slots, its own and a copy, four of them. Those of three nodes
are 4/3 of it: 5.3 in two slots, beside what two nodes hold of the version to go back to, one each. Those of two nodes
are twice as large: 8, beside two of the 4/3."""
LIMIT = int(7.7 * SHARE)

TRAIN = """
import hashlib, json, os, pathlib, time, torch
from torch.distributed.fsdp import fully_shard
import trainer_hooks as everstep

FOLDER = pathlib.Path(os.environ["DEMO_STEPS"])

def digest(model):
    whole = b"".join(p.full_tensor().detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(whole).hexdigest()

def train(run):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False))
    fully_shard(model, mesh=run.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    began = digest(model)
    log = (FOLDER / f"{os.environ['DEMO_NODE']}-{os.getpid()}.jsonl").open("a")
    for step in run.steps(until=100000):
        if began:
            print(json.dumps([run.generation, step - 1, began, "restored"]), file=log, flush=True)
            began = ""
        optimizer.zero_grad()
        model(torch.ones(4, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        print(json.dumps([run.generation, step, digest(model), "stepped"]), file=log, flush=True)
        time.sleep(0.02)

everstep.main(train)
""".replace("WIDTH", str(WIDTH))


class Job:
    """The job on those nodes of the world that still live."""

    def __init__(self, world: World, script: Path) -> None:
        self.world = world
        self.alive = list(NODES)
        world.start_controller()
        self.client = Client(world.url, world.operator_token)
        for node in world.nodes.values():
            node.boot()
        for node in world.nodes.values():
            wait_for(lambda node=node: node.booted, f"{node.name} is up", DEADLINE_S)
            command = ["-m", "trainer_hooks.launch", "--job", "j", "--nnodes", f"2:{len(NODES)}", "--replicas", "2"]
            command += ["--agent-socket", str(node.agent_socket), "--join-wait-s", "60", str(script)]
            node.join(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

    def lose(self, name: str) -> None:
        self.world.nodes[name].kill()
        self.alive.remove(name)

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Waits, and sees that no vault that lives is ever over its limit meanwhile."""

        def holds() -> bool:
            for name in self.alive:
                used = _used_bytes(self.world.shared_memory / name)
                assert used <= LIMIT, f"{name} has {used} bytes, with a limit of {LIMIT}"
            return bool(condition())

        try:
            wait_for(holds, what, DEADLINE_S)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.said()}") from error

    def committed(self) -> Version:
        """The newest that the job could go back to."""
        try:
            versions = self.client.get("/v1/jobs/j/checkpoints", JobCheckpoints).versions
        except NotFound:  # its launchers are not there yet
            versions = ()
        return max((one.version for one in versions if one.restorable), default=Version(0, 0))

    def generation(self) -> int:
        return self.client.get("/v1/generations", op.GenerationList, job="j").generations[-1].number

    def newest(self, generation: int) -> int:
        """The last step of a generation that any rank made; 0 before it has one."""
        return max((step for g, step, _, what in self.lines() if (g, what) == (generation, "stepped")), default=0)

    def digests(self, what: str, generation: int, step: int) -> set[str]:
        return {digest for g, at, digest, did in self.lines() if (g, at, did) == (generation, step, what)}

    def restored(self, generation: int) -> int:
        """The step that all ranks of a generation began from."""
        (step,) = {at for g, at, _, did in self.lines() if (g, did) == (generation, "restored")}
        return step

    def lines(self) -> Iterator[tuple[int, int, str, str]]:
        for path in self.world.steps.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("]"):
                    yield tuple(json.loads(line))

    def said(self) -> str:
        """What the launchers' processes wrote, each line with whose it is."""
        logs = sorted(self.world.logs.glob("*-train.log"))
        return "\n".join(f"{log.name} {line}" for log in logs for line in log.read_text().splitlines())


def _used_bytes(folder: Path) -> int:
    """Of one moment: files are made, renamed and replaced while they are counted, so two counts must say the same."""
    while True:
        count = _files(folder)
        if count == _files(folder):
            return sum(count.values())


def _files(folder: Path) -> dict[int, int]:
    found = {}
    for path in folder.rglob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file() and path.name != ".vault.lock":
            found[stat.st_ino] = stat.st_blocks * 512
    return found


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("EVERSTEP_AGENT_VAULT_MEMORY_LIMIT_BYTES", str(LIMIT))
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with World(tmp_path / "out", NODES) as world:
        yield Job(world, script)


@pytest.mark.timeout(600)
def test_a_job_that_has_memory_for_two_slots_bears_a_loss_within_it_and_goes_on_where_a_second_leaves_too_little(
    job: Job,
) -> None:
    job.until(lambda: job.committed() > Version(1, 5), "a version is committed")
    assert "are in 2 slots a rank instead of 5: only what is to be committed is stored" in job.said()
    before = job.committed()

    job.lose("n1")
    job.until(lambda: job.generation() > 1 and job.newest(job.generation()) > before.step, "they go on")
    first = job.generation()
    assert job.restored(first) >= before.step
    assert job.digests("restored", first, job.restored(first)) == job.digests("stepped", 1, job.restored(first))
    job.until(lambda: job.committed().generation == first, "and have copies of what they made, at the first attempt")
    assert "has no memory" not in job.said()

    job.lose("n2")
    job.until(lambda: job.generation() > first, "they regroup")
    second, last = job.generation(), job.committed()
    job.until(lambda: job.newest(second) > last.step + 100, "two of them go on as well")
    assert job.restored(second) >= last.step
    assert job.digests("restored", second, job.restored(second)) == job.digests("stepped", first, job.restored(second))
    job.until(lambda: "nothing is committed until there is memory" in job.said(), "they say what they lack")
    sum_of_it = r"in 2 slots a rank: training goes on.* needs (\d+) bytes; (\d+) of --memory-limit (\d+) are"
    told = re.search(sum_of_it, job.said())
    assert told is not None, job.said()
    need, used, limit = map(int, told.groups())
    assert limit == LIMIT < need + used
    assert job.committed() == last, "what they could go back to stays"
