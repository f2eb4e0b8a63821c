"""dcp.save and dcp.load over real vaults, on real ranks: into other layouts, on fewer ranks, without a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from everstep.ids import Version
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule
from everstep_trainer.memory_tier.dcp import MemoryTier, VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ChildFailed, ForkPool
from tests.support.ranks.layouts import Layout
from tests.support.ranks.lone_rank import lone_rank
from tests.support.vaults.vault_process import VaultProcess, Vaults, map_segment, vaults
from tests.unit.trainer_hooks.memory_tier.dcp.dcp_ranks import NOTES, Order, run_orders

DEADLINE_S = 60.0
FSDP, TP, HYBRID = Layout(shard=4), Layout(tp=4), Layout(replicate=2, shard=2)


class Fleet:
    """Nodes with a vault and a rank each, and a rendezvous store."""

    def __init__(self, forks: ForkPool, running: Vaults) -> None:
        self.forks = forks
        self.vaults = running
        self.nodes = {node: running.start(node) for node in ("n1", "n2", "n3", "n4")}
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(self, first: int, nodes: Sequence[str], *generations: Sequence[Order]) -> list[Any]:
        """Run generations from number ``first`` on in the same processes, each on as many of the nodes as its layouts
        have ranks. Return the results gathered after each order."""
        alive = [vault for vault in self.nodes.values() if vault.process.poll() is None]
        self.vaults.configure(*alive, generation=first)
        parts = [
            (self.spec(number, nodes[: orders[0][2].world]), orders) for number, orders in enumerate(generations, first)
        ]
        processes = [
            self.forks.start(run_orders, parts, rank, str(self.nodes[node].run_dir / "vault.sock"))
            for rank, node in enumerate(nodes)
        ]
        results: list[list[Any]] = [process.result(DEADLINE_S) for process in processes]
        return results[0]

    def spec(self, number: int, nodes: Sequence[str]) -> GenerationSpec:
        plain = generation(
            number,
            ranks=[(node, 0) for node in nodes],
            store=f"127.0.0.1:{self.store.port}",
            restore=RestoreRule(),
            spec=JobSpec(job=JOB, max_nodes=4, replicas=2, nproc_per_node=1),
        )
        kept = {f: getattr(plain, f) for f in plain.__struct_fields__ if f not in ("holders", "replica_nodes")}
        ring: dict[str, tuple[str, ...]] = {node: (nodes[(i + 1) % len(nodes)],) for i, node in enumerate(nodes)}
        return GenerationSpec(**kept, holders=self.vaults.holders(), replica_nodes=ring)

    @property
    def first(self) -> VaultProcess:
        return self.nodes["n1"]


@pytest.fixture
def fleet(forks: ForkPool) -> Iterator[Fleet]:
    with vaults(forks) as running:
        yield Fleet(forks, running)


FOUR = ("n1", "n2", "n3", "n4")


def equal(first: Any, second: Any) -> bool:
    arrays, notes = first
    return notes == second[1] and [n for n in arrays if not np.array_equal(arrays[n], second[0][n])] in (
        [],
        ["schedule"],
    )


@pytest.mark.promise("memory-tier")
@pytest.mark.slow
def test_checkpoint_loads_into_other_layouts_and_fewer_ranks(fleet: Fleet) -> None:
    first: list[Order] = [("save", 3, FSDP), *(("load", None, layout) for layout in (FSDP, HYBRID)), ("load", 3, TP)]
    fewer: list[Order] = [("load", None, Layout(shard=3)), ("save", 4, Layout(replicate=3))]
    saved, *loaded, again, newer, newest, older = fleet.run(
        1, FOUR, first, fewer, [("load", None, FSDP), ("load", 3, FSDP)]
    )
    assert saved[1] == NOTES
    assert all(equal(state, saved) for state in (*loaded, again, older))
    assert equal(newest, newer)


@pytest.mark.promise("memory-tier")
@pytest.mark.slow
def test_checkpoint_survives_a_lost_node_and_a_corrupt_slot(fleet: Fleet) -> None:
    (saved,) = fleet.run(1, FOUR, [("save", 2, FSDP)])
    view = map_segment(fleet.vaults.segments / "n1" / JOB / "own-32")
    ((slot, header),) = view.sealed_slots()
    assert header.version == Version(1, 2)
    view.payload(slot)[0] ^= 1
    fleet.nodes["n3"].kill()
    (loaded,) = fleet.run(2, ("n1", "n2", "n4"), [("load", None, Layout(shard=3))])
    assert equal(loaded, saved)


@pytest.mark.slow
def test_two_checkpoints_are_kept_and_older_ones_are_missing(fleet: Fleet) -> None:
    saves: list[Order] = [("save", step, Layout(replicate=2)) for step in (1, 2, 3, 4)]
    with pytest.raises(ChildFailed, match="hold no such complete checkpoint"):
        fleet.run(1, FOUR[:2], [*saves, ("load", 3, Layout(tp=2))], [("load", 1, Layout(tp=2))])


@pytest.mark.promise("memory-tier-newest")
@pytest.mark.slow
def test_newest_whole_checkpoint_survives_torn_ones(fleet: Fleet) -> None:
    split, torn = Layout(shard=2), [("torn", step, Layout(shard=2)) for step in (2, 3, 4)]
    load: Order = ("load", None, split)
    results = fleet.run(1, FOUR[:2], [("save", 1, split), *torn, load], [load, *torn], [load])
    saved, *loaded = filter(None, results)
    assert len(loaded) == 3
    assert all(equal(state, saved) for state in loaded)


@pytest.mark.promise("memory-tier")
@pytest.mark.slow
def test_pickles_require_explicit_permission(fleet: Fleet) -> None:
    saved, loaded = fleet.run(1, FOUR[:2], [("pickle", 1, Layout(tp=2)), ("unpickle", 1, Layout(tp=2))])
    assert equal(loaded, saved)
    with pytest.raises(ChildFailed, match="was stored as a pickle"):
        fleet.run(2, FOUR[:2], [("load", 1, Layout(tp=2))])


@pytest.fixture
def tier(program_forks: ForkPool, alone: None) -> Iterator[MemoryTier]:
    with lone_rank(program_forks) as made:
        spec = generation(1)
        yield MemoryTier(made.client, spec, spec.roster[0], HashStore())


def test_checkpoint_outgrowing_the_slots_is_found_as_newest(tier: MemoryTier) -> None:
    for step, elements in ((1, 10), (2, 1_000_000)):
        saved = {"weight": torch.arange(float(elements)), "note": step}
        state_dict_saver.save(saved, storage_writer=VaultWriter(tier, step), planner=VaultSavePlanner())
        assert VaultReader(tier).newest_step() == step
        loaded = {"weight": torch.zeros(elements), "note": 0}
        state_dict_loader.load(loaded, storage_reader=VaultReader(tier), planner=VaultLoadPlanner())
        assert torch.equal(loaded["weight"], saved["weight"])  # type: ignore[arg-type]
        assert loaded["note"] == step
