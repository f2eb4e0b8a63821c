"""A sharded job on all nodes of a world, with real controller, agents, vaults, launchers and ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

from everstep.client import Client
from everstep.errors import NotFound
from everstep.wire.v1.operator_history import CheckpointCopy
from everstep.wire.v1.training import GenerationSpec
from examples.demo.world import World

NODES = ["n1", "n2", "n3", "n4"]
DEADLINE_S = 120.0
JOB = "sharded"


class Line(NamedTuple):
    """What a rank wrote: that it ``restored`` the state after a step, or ``stepped`` to it."""

    generation: int
    step: int
    digest: str
    did: str


class ShardedJob:
    """Trains on every node that lives, with copies on other nodes. ``options``: the launchers', beside those.
    ``widths``: of the layers, or other arguments of ``script``, the module that trains."""

    def __init__(
        self,
        world: World,
        *widths: int | str,
        options: tuple[str, ...] = (),
        script: str = "tests.support.sharded_training",
    ) -> None:
        self.world = world
        world.start_controller()
        self.client = Client(world.url, world.operator_token)
        world.boot_nodes(deadline_s=DEADLINE_S)
        for node in world.nodes.values():
            command = ["-m", "everstep_trainer.launch", "--job", JOB, "--nnodes", f"2:{len(world.nodes)}"]
            command += ["--agent-socket", str(node.agent_socket), "--join-wait-s", "60", "--replicas", "2", *options]
            node.join([*command, "-m", script, *map(str, widths)])

    def kill(self, *names: str) -> None:
        """Kill nodes at the same moment. One after the other, the job could regroup between them on a busy machine."""
        nodes = [self.world.nodes[name] for name in names]
        for pid in [pid for node in nodes for pid in node.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.kill()

    def versions(self) -> tuple[CheckpointCopy, ...]:
        """What is kept of it, wherever."""
        try:
            return self.client.job_checkpoints(JOB).versions
        except NotFound:  # its launchers are not there yet
            return ()

    def generation(self) -> int:
        """The number of the newest."""
        return self.spec().number

    def spec(self) -> GenerationSpec:
        return next(iter(self.client.generations(job=JOB)))

    def digests(self, did: str, generation: int, step: int) -> set[str]:
        """Of all ranks that did so."""
        return {
            line.digest for line in self.lines() if (line.generation, line.step, line.did) == (generation, step, did)
        }

    def restored(self, generation: int) -> int:
        """The step that all ranks of a generation began from."""
        (step,) = {line.step for line in self.lines() if (line.generation, line.did) == (generation, "restored")}
        return step

    def newest(self, generation: int) -> int:
        """The last step of a generation that any rank made; 0 before it has one."""
        return max(
            (line.step for line in self.lines() if (line.generation, line.did) == (generation, "stepped")), default=0
        )

    def newest_generation(self, did: str) -> int:
        """The newest generation in which a rank did so; 0 before there is one."""
        return max((line.generation for line in self.lines() if line.did == did), default=0)

    def lines(self) -> Iterator[Line]:
        for path in self.world.steps.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("]"):
                    yield Line(*json.loads(line))
