"""A real job of four nodes whose program makes an audit differ on all of them: nobody is accused, and it finishes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from everstep.client import Client
from examples.demo.world import Node, wait_for
from tests.support.honest_training import RANKS
from tests.support.warm_launcher import WarmWorld

pytestmark = pytest.mark.slow


def launch(node: Node, folder: Path) -> list[str]:
    command = ["-m", "everstep_trainer.launch", "--nnodes", str(RANKS), "--job", "sound", "--standby-delay-s", "0.1"]
    command += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket), "--hang-threshold-s", "60"]
    return [*command, "--sdc", "standard", "--die-with-parent", "-m", "tests.support.honest_training", str(folder)]


@pytest.mark.timeout(240)
def test_program_that_makes_audits_differ_accuses_no_node() -> None:
    names = [f"n{number}" for number in range(1, RANKS + 1)]
    with tempfile.TemporaryDirectory(prefix="everstep-") as name, WarmWorld(Path(name) / "out", names) as world:
        world.start_controller()
        world.boot_nodes()
        client = Client(world.url, world.operator_token)
        for node in world.nodes.values():
            node.join(launch(node, Path(name)))
        launchers = [node.launcher for node in world.nodes.values()]
        wait_for(lambda: all(one is not None and one.poll() is not None for one in launchers), "the job's end")
        told, detail = client.events().collect(500).events, client.job("sound")
        sums = {path.read_text() for path in Path(name).glob("sum-*")}
        receipt = client.receipt("sound")
    story = "\n".join(f"{event.kind}: {event.sentence}" for event in told)
    assert [one.poll() for one in launchers if one is not None] == [0] * RANKS, story
    assert len([event for event in told if event.kind == "generation"]) == 1, story
    assert not [event for event in told if event.kind.startswith("verdict")], story
    (switched,) = [event.sentence for event in told if event.kind == "audit.switched_off"]
    assert "audit matmul" in switched
    assert "quantisation" in switched
    assert detail.audits.off == {"matmul": switched}
    assert switched in receipt.audit_notes
    assert len(sums) == 1
