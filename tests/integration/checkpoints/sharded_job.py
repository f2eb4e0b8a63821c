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
    """A line of a rank's log: it ``restored`` the state after a step, or ``stepped`` to it."""

    generation: int
    step: int
    digest: str
    did: str


class ShardedJob:
    """A job that trains on every running node, with copies on other nodes.

    Args:
        world: A world without a controller or agents yet.
        widths: Widths of the layers, or other arguments of ``script``.
        options: Further options of the launchers.
        script: The module that trains.
    """

    def __init__(
        self,
        world: World,
        *widths: int | str,
        options: tuple[str, ...] = (),
        script: str = "tests.integration.checkpoints.sharded_training",
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
        """Kill nodes at the same moment, since the job could regroup between two kills on a busy machine."""
        nodes = [self.world.nodes[name] for name in names]
        for pid in [pid for node in nodes for pid in node.processes()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for node in nodes:
            node.kill()

    def versions(self) -> tuple[CheckpointCopy, ...]:
        """Return all stored copies of the job's versions."""
        try:
            return self.client.job_checkpoints(JOB).versions
        except NotFound:  # no launcher has joined yet
            return ()

    def generation(self) -> int:
        """Return the number of the newest generation."""
        return self.spec().number

    def spec(self) -> GenerationSpec:
        return next(iter(self.client.generations(job=JOB)))

    def digests(self, did: str, generation: int, step: int) -> set[str]:
        """Return the digests of all ranks with such a line."""
        return {
            line.digest for line in self.lines() if (line.generation, line.step, line.did) == (generation, step, did)
        }

    def restored(self, generation: int) -> int:
        """Return the step from which all ranks of a generation began."""
        (step,) = {line.step for line in self.lines() if (line.generation, line.did) == (generation, "restored")}
        return step

    def newest(self, generation: int) -> int:
        """Return the last step that any rank of a generation made, or 0 without one."""
        return max(
            (line.step for line in self.lines() if (line.generation, line.did) == (generation, "stepped")), default=0
        )

    def newest_generation(self, did: str) -> int:
        """Return the newest generation with such a line of a rank, or 0 without one."""
        return max((line.generation for line in self.lines() if line.did == did), default=0)

    def lines(self) -> Iterator[Line]:
        for path in self.world.steps.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                if line.endswith("]"):
                    yield Line(*json.loads(line))
