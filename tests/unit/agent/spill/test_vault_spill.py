"""Real vaults that write a version to storage together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from everstep.ids import Version
from everstep.layout.slots import slot_bytes_for
from everstep.wire.v1 import local
from everstep_agent.spill.__main__ import execute
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.vaults.sealed_slots import fill_slots
from tests.support.vaults.vault_process import JOB, RankMemory, VaultProcess, Vaults, map_segment, process_gone, vaults
from tests.unit.agent.spill.killed_spill import contents

V = Version(3, 20)
WRITERS = {"n1": (0, 1), "n2": (2,)}


class Fleet:
    """Ranks 0 and 1 on n1, rank 2 on n2, each with a sealed share of a model, and the files that one writer makes of
    it."""

    def __init__(self, running: Vaults, folder: Path) -> None:
        self.vaults = running
        self.folder = folder
        torch.manual_seed(2)
        model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
        state = TrackedState({"model": model})
        order = fill_slots(folder / "slots", state, V, world=3, layout="sharded")
        execute(msgspec.structs.replace(order, url=str(folder / "alone")))
        by_node = {node: running.start(node) for node in WRITERS}
        running.configure(generation=3)
        self.ranks = []
        for source in order.sources:
            node = next(node for node, ranks in WRITERS.items() if source.rank in ranks)
            view = map_segment(Path(source.path))
            manifest, payload = view.manifest(0), bytes(view.payload(0))
            room = slot_bytes_for(len(manifest), len(payload))
            memory = RankMemory(by_node[node].client(), source.rank, source.rank % 2, room)
            memory.fill(1, V, payload, manifest)
            self.ranks.append(memory)

    def post(self, node: str, **fields: object) -> int:
        order = {
            "job": JOB,
            "generation": 3,
            "version": V,
            "url": str(self.folder / "out"),
            "writers": WRITERS,
        } | fields
        return self.vaults.supervisors[node].post(local.Spill, **order)

    def spill(self, node: str, **fields: object) -> Any:
        return self.vaults.supervisors[node].wait(self.post(node, **fields))

    def writer_of(self, vault: VaultProcess) -> int:
        """The pid of the vault's writing process, once there is one."""
        path = Path(f"/proc/{vault.process.pid}/task")

        def child() -> int | None:
            pids = [pid for task in path.iterdir() for pid in (task / "children").read_text().split()]
            return int(pids[0]) if pids else None

        pid = until(child, "the writer of checkpoints")
        assert pid is not None
        return pid


@pytest.fixture
def fleet(program_forks: ForkPool, tmp_path: Path) -> Iterator[Fleet]:
    with vaults(program_forks) as running:
        yield Fleet(running, tmp_path)


def test_failed_spill_reports_its_error_code(fleet: Fleet) -> None:
    def code(**fields: object) -> str:
        answer = fleet.spill("n1", **fields)
        assert isinstance(answer, local.RequestFailed), answer
        return answer.code

    assert code(version=Version(3, 21)) == "not_found"
    assert code(generation=2) == "stale"
    assert code(writers={"n1": (0, 1)}) == "not_restorable"
    assert code(writers={"n1": (0, 1), "n3": (2,)}) == "not_found"
    assert code(url="elsewhere") == "configuration"
    assert code(url="/proc/nothing") == "unavailable"
    fleet.ranks[1].view.payload(1)[100] ^= 1
    assert code() == "digest_mismatch"
    assert not list((fleet.folder / "out").rglob(".metadata"))


def test_spill_succeeds_after_a_killed_writer(fleet: Fleet) -> None:
    fleet.spill("n2")
    asked = fleet.post("n1")
    os.kill(fleet.writer_of(fleet.vaults.all[0]), signal.SIGKILL)
    answer = fleet.vaults.supervisors["n1"].wait(asked)
    assert isinstance(answer, local.RequestFailed)
    assert answer.code == "unavailable"
    assert fleet.spill("n1").complete
    assert contents(fleet.folder / "out") == contents(fleet.folder / "alone")


def test_forgetting_a_job_ends_its_writer(fleet: Fleet) -> None:
    asked = fleet.post("n1")
    writer = fleet.writer_of(fleet.vaults.all[0])
    fleet.vaults.supervisors["n1"].ask(local.ForgetJob, job=JOB)
    assert isinstance(fleet.vaults.supervisors["n1"].wait(asked), local.RequestFailed)
    until(lambda: process_gone(writer), "the end of the writer")
