"""Four nodes, and two that copy each other gone at once with their memory: the others restore what parity keeps, to
the bit. Real controller, agents, vaults, launchers and ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.cli.client import Client
from everstep.errors import NotFound
from everstep.wire.v1 import operator as op
from everstep.wire.v1.kept import JobCheckpoints, KeptVersion
from examples.demo.world import World, wait_for

pytestmark = pytest.mark.slow

NODES = ["n1", "n2", "n3", "n4"]
DEADLINE_S = 120.0

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
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64))
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
        model(torch.ones(4, 64)).pow(2).mean().backward()
        optimizer.step()
        print(json.dumps([run.generation, step, digest(model), "stepped"]), file=log, flush=True)
        time.sleep(0.02)

everstep.main(train)
"""


def _lines(world: World) -> Iterator[tuple[int, int, str, str]]:
    for path in world.steps.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):
                yield tuple(json.loads(line))


def _start(world: World, script: Path, *options: str) -> None:
    world.start_controller()
    for node in world.nodes.values():
        node.boot()
    for node in world.nodes.values():
        wait_for(lambda node=node: node.booted, f"{node.name} is up", DEADLINE_S)
    for node in world.nodes.values():
        command = ["-m", "trainer_hooks.launch", "--job", "parity", "--nnodes", f"2:{len(world.nodes)}"]
        command += ["--agent-socket", str(node.agent_socket), "--join-wait-s", "60", *options, str(script)]
        node.join(command, {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})


def _kept(client: Client) -> list[KeptVersion]:
    try:
        told = client.get("/v1/jobs/parity/checkpoints", JobCheckpoints)
    except NotFound:  # its launchers are not there yet
        return []
    return [one for one in told.versions if one.place == "parity" and one.state == "whole"]


@pytest.mark.timeout(400)
def test_a_node_and_its_copy_at_once_and_parity_has_what_they_held(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with World(tmp_path / "out", NODES) as world:
        _start(world, script, "--replicas", "2", "--parity", "2")
        client = Client(world.url, world.operator_token)
        wait_for(lambda: bool(_kept(client)), "a version that parity keeps", DEADLINE_S)
        first = _kept(client)[0].version
        wait_for(lambda: _kept(client)[0].version > first, "a second one", DEADLINE_S)
        (spec,) = client.get("/v1/generations", op.GenerationList, job="parity").generations
        for name in ("n1", *spec.replica_nodes["n1"]):
            world.nodes[name].kill()
        wait_for(lambda: any(g > 1 and what == "stepped" for g, _, _, what in _lines(world)), "they go on", DEADLINE_S)
        lines = list(_lines(world))
    after = {(step, digest) for g, step, digest, what in lines if g > 1 and what == "restored"}
    assert len(after) == 1, "all ranks restored the same"
    ((step, digest),) = after
    assert step >= first.step
    before = {found for g, at, found, what in lines if g == 1 and at == step and what == "stepped"}
    assert before == {digest}, "and it is what they had then, to the bit"
