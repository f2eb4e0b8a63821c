"""Nodes with memory for two slots and not for five, lost with all that was in them: the others go on within theirs.

Real controller, agents, vaults, launchers and ranks, whose state is sharded, with one copy of each share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.ids import Version
from examples.demo.world import World, wait_for
from tests.support.sharded_job import DEADLINE_S, NODES, ShardedJob

pytestmark = pytest.mark.slow

WIDTH = 1024
SHARE = 3 * 4 * WIDTH * WIDTH // len(NODES)
"""Of the weights and both moments, bytes a node: in two slots, its own and a copy, four of them. Those of three nodes
are 4/3 of it: 5.3 in two slots, beside what two nodes hold of the version to go back to, one each. Those of two nodes
are twice as large: 8, beside two of the 4/3."""
LIMIT = int(7.7 * SHARE)


class Job(ShardedJob):
    """The job on those nodes of the world that still live."""

    def __init__(self, world: World) -> None:
        super().__init__(world, WIDTH, WIDTH)
        self.alive = list(NODES)

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
        return max((one.version for one in self.versions() if one.restorable), default=Version(0, 0))

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
    with World(tmp_path / "out", NODES) as world:
        yield Job(world)


@pytest.mark.nightly  # tests/unit/agent/vault/memory/test_vault_fewer_slots.py is the smaller one
@pytest.mark.timeout(600)
def test_two_slot_job_trains_on_as_losses_exhaust_memory(
    job: Job,
) -> None:
    job.until(lambda: job.committed() > Version(1, 5), "a version is committed")
    assert "use 2 slots per rank instead of 5" in job.said()
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
    sum_of_it = r"in 2 slots per rank: training continues.* needs (\d+) bytes; (\d+) of the memory limit (\d+) are"
    told = re.search(sum_of_it, job.said())
    assert told is not None, job.said()
    need, used, limit = map(int, told.groups())
    assert limit == LIMIT < need + used
    assert job.committed() == last, "what they could go back to stays"
