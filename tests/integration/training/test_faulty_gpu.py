"""A real job of three nodes and a spare, in which the GPU of one node gives NaN: found, named, evicted and undone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from everstep.client import Client
from examples.demo.world import Node, wait_for
from tests.integration.training.faulty_gpu_training import RANKS, STEPS, loss_of, new_model
from tests.support.processes.warm_programs import WarmWorld

pytestmark = pytest.mark.slow


def launch(node: Node, folder: Path) -> list[str]:
    command = ["-m", "everstep_trainer.launch", "--nnodes", str(RANKS), "--job", "nan", "--standby-delay-s", "0.1"]
    command += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket), "--hang-threshold-s", "60"]
    return [
        *command,
        "--sdc",
        "standard",
        "--die-with-parent",
        "-m",
        "tests.integration.training.faulty_gpu_training",
        str(folder),
    ]


def undisturbed_sum() -> float:
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        for rank in range(RANKS):
            (loss_of(model, rank, step) / RANKS).backward()
        optimizer.step()
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


@pytest.mark.timeout(240)
def test_node_whose_gpu_gives_nan_is_evicted() -> None:
    names = [f"n{number}" for number in range(1, RANKS + 2)]
    with tempfile.TemporaryDirectory(prefix="everstep-") as name, WarmWorld(Path(name) / "out", names) as world:
        world.start_controller()
        world.boot_nodes()
        client = Client(world.url, world.operator_token)
        *members, spare = world.nodes.values()
        for node in members:
            node.join(launch(node, Path(name)), {"FAULTY": "1"} if node.name == "n2" else {})
        wait_for(lambda: any(event.kind == "generation" for event in client.events().collect(500).events), "a roster")
        spare.join(launch(spare, Path(name)))
        launchers = [node.launcher for node in world.nodes.values()]
        wait_for(
            lambda: sum(launcher is not None and launcher.poll() == 0 for launcher in launchers) >= RANKS,
            "the job's end",
        )
        events = client.events().collect(500).events
        sums = [float(path.read_text()) for path in Path(name).glob("sum-*")]
    story = "\n".join(event.sentence for event in events)
    assert [event.node for event in events if event.kind == "verdict.evict"] == ["n2"], story
    searched, suspected = [event.sentence for event in events if event.kind == "audit.suspicion"]
    assert "a rank, still unknown, may stand out in gradients" in searched
    assert "stands out from the other ranks in gradients" in suspected
    assert sums == pytest.approx([undisturbed_sum()] * RANKS, rel=1e-5)
