"""Four real ranks, real vaults, gloo: snapshots are restored to the bit, on as many ranks and on fewer."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from torch._C._distributed_c10d import TCPStore

from everstep.ids import Version
from everstep.vocabulary import FindingKind
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkedChild, ForkPool
from tests.support.vaults.vault_process import Vaults, map_segment, vaults
from tests.unit.trainer_hooks.restore.restore_training import GenerationPart, run_parts

NODES = ("n1", "n2", "n3", "n4")
ONE_NODE = ("n1",) * 4

pytestmark = pytest.mark.slow


Seat = tuple[str, int]
"""A node, and a number among its processes."""


class Generation(NamedTuple):
    """One generation of ranks on ``nodes``. The rank ``dying`` dies as ``how`` says; then the others leave at once."""

    number: int
    until: int
    nodes: Sequence[str] = NODES
    rule: RestoreRule = RestoreRule()
    save: bool = True
    dying: int = -1
    how: str = ""

    @property
    def seats(self) -> list[Seat]:
        """Return the node and local rank of each rank."""
        return [(node, self.nodes[:rank].count(node)) for rank, node in enumerate(self.nodes)]


def undisturbed(number: int, until: int, nodes: Sequence[str] = NODES) -> Generation:
    """Return a generation without a restore, in which no rank dies."""
    return Generation(number, until, nodes, RestoreRule(from_scratch=True), save=False)


class Fleet:
    """Four nodes with a vault each, and a rendezvous store."""

    def __init__(self, forks: ForkPool, fleet: Vaults) -> None:
        self.forks = forks
        self.vaults = fleet
        self.by_node = {node: fleet.start(node) for node in NODES}
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def spec(self, number: int, nodes: Sequence[str], rule: RestoreRule, replicas: int) -> GenerationSpec:
        plain = generation(
            number,
            ranks=[(node, nodes[:rank].count(node)) for rank, node in enumerate(nodes)],
            store=f"127.0.0.1:{self.store.port}",
            restore=rule,
            spec=JobSpec(job=JOB, max_nodes=4, replicas=replicas, nproc_per_node=len(nodes) // len(set(nodes))),
        )
        ring = {node: tuple(nodes[(i + k) % len(nodes)] for k in range(1, replicas)) for i, node in enumerate(nodes)}
        ring = {node: tuple(other for other in others if other != node) for node, others in ring.items()}
        return GenerationSpec(
            **{f: getattr(plain, f) for f in plain.__struct_fields__ if f not in ("holders", "replica_nodes")},
            holders=self.vaults.holders(),
            replica_nodes=ring,
        )

    def run(
        self, *generations: Generation, model: str = "uneven", layout: str = "ddp", replicas: int = 2
    ) -> list[list[dict[str, Any]]]:
        """Run generation after generation in the same processes; return the results of each rank in each."""
        started = self.start(*generations, model=model, layout=layout, replicas=replicas)
        results = {seat: iter(process.result()) for seat, process in started.items()}
        return [[next(results[seat]) for seat in generation.seats] for generation in generations]

    def start(
        self, *generations: Generation, model: str = "uneven", layout: str = "ddp", replicas: int = 2
    ) -> dict[Seat, ForkedChild]:
        """Start the processes of all seats."""
        alive = [vault for vault in self.by_node.values() if vault.process.poll() is None]
        self.vaults.configure(*alive, generation=generations[0].number)
        parts: dict[Seat, list[GenerationPart]] = {}
        for made in generations:
            spec = self.spec(made.number, made.nodes, made.rule, replicas)
            for rank, seat in enumerate(made.seats):
                dies = made.how if rank == made.dying else "survives" if made.how else ""
                parts.setdefault(seat, []).append(GenerationPart(spec, rank, made.until, made.save, dies))
        return {
            seat: self.forks.start(run_parts, mine, str(self.by_node[seat[0]].run_dir / "vault.sock"), model, layout)
            for seat, mine in parts.items()
        }


@pytest.fixture
def fleet(forks: ForkPool) -> Iterator[Fleet]:
    with vaults(forks) as running:
        yield Fleet(forks, running)


@pytest.mark.promise("exact-recovery")
@pytest.mark.parametrize(
    ("layout", "model"), [pytest.param("ddp", "counting", marks=pytest.mark.nightly), ("fsdp2", "uneven")]
)
def test_restored_run_is_bit_identical_on_as_many_ranks(fleet: Fleet, layout: str, model: str) -> None:
    generations = undisturbed(1, 8), Generation(2, 5), Generation(3, 8)
    for whole, before, after in zip(*fleet.run(*generations, layout=layout, model=model), strict=True):
        assert after["restored"].version == Version(2, 5)
        if (layout, model) != ("ddp", "counting"):  # there rank 0's running statistics are the truth
            assert after["restored_as"] == before["fingerprint"]
        assert before["losses"] + after["losses"] == whole["losses"]
        assert after["fingerprint"] == whole["fingerprint"]


@pytest.mark.promise("same-state-other-world-size", "node-loss")
@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.nightly), "fsdp2"])
def test_state_survives_four_ranks_becoming_three_and_four(fleet: Fleet, layout: str) -> None:
    four, three, again = fleet.run(Generation(1, 3), Generation(2, 5, NODES[:3]), Generation(3, 6), layout=layout)
    digests = [[dict(version.digests) for version in rank["sealed"]] for rank in four]
    if layout == "ddp":
        assert all(of_rank == digests[0] for of_rank in digests), "replicas agree"
        assert set(digests[0][0]) == {"replicated"}
        assert digests[0][0] != digests[0][1]
    else:
        assert not any(digest for of_rank in digests for digest in of_rank), "shards have none"
    assert {r["restored_as"] for r in three} == {r["fingerprint"] for r in four}
    assert {r["restored_as"] for r in again} == {r["fingerprint"] for r in three}
    assert again[0]["restored"].version == Version(2, 5)
    for rank in (*three, *again):
        read = sum(rank["restored"].bytes_by_source.values())
        assert read == rank["held"], "each reads what it holds: of shards never the whole"
    assert all(rank["sealed"][-1].durable for rank in again)
    fleet.by_node["n2"].kill()
    (left,) = fleet.run(Generation(4, 7, ("n1", "n3", "n4")), layout=layout)
    assert {r["restored_as"] for r in left} == {r["fingerprint"] for r in again}, "a node lost with its memory"


@pytest.mark.promise("rank-reassignment")
@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.nightly), "hsdp"])
def test_process_with_another_rank_continues_bit_identically(fleet: Fleet, layout: str) -> None:
    turned = (*NODES[1:], NODES[0])
    generations = undisturbed(1, 8), Generation(2, 3), Generation(3, 6, turned), Generation(4, 8)
    (uninterrupted, *_), firsts, seconds, thirds = fleet.run(*generations, layout=layout)
    for first, second, third in zip(firsts, (seconds[-1], *seconds[:-1]), thirds, strict=True):
        assert second["restored_as"] == first["fingerprint"]
        assert third["restored_as"] == second["fingerprint"]
        assert first["losses"] + second["losses"] + third["losses"] == uninterrupted["losses"]
        assert third["fingerprint"] == uninterrupted["fingerprint"]


@pytest.mark.promise("finished-step-survives")
@pytest.mark.parametrize(
    ("layout", "how", "nodes", "model"),
    [
        pytest.param("ddp", "copying", NODES, "wide", id="ddp-copying-four-nodes", marks=pytest.mark.nightly),
        pytest.param("ddp", "finished", ONE_NODE, "wide", id="ddp-finished-one-node"),
        pytest.param("ddp", "copying", ONE_NODE, "broad", id="ddp-copying-25M-one-node", marks=pytest.mark.nightly),
        pytest.param("hsdp", "copying", ONE_NODE, "wide", id="hsdp-copying-one-node", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "finished", NODES, "wide", id="fsdp2-finished-four-nodes", marks=pytest.mark.nightly),
    ],
)
def test_finished_step_survives_the_death_of_a_process(
    fleet: Fleet, layout: str, how: str, nodes: Sequence[str], model: str
) -> None:
    ranks = fleet.start(Generation(1, 4, nodes, dying=2, how=how), layout=layout, model=model)
    assert [rank.wait().signal for rank in ranks.values()] == [None, None, signal.SIGKILL, None]
    after, whole = fleet.run(Generation(2, 5, nodes), undisturbed(3, 5, nodes), layout=layout, model=model)
    assert [r["restored"].version for r in after] == [Version(1, 4)] * 4
    assert [r["fingerprint"] for r in after] == [r["fingerprint"] for r in whole]


@pytest.mark.promise("per-rank-state")
@pytest.mark.parametrize(
    ("how", "newest", "nodes"),
    [
        pytest.param("copying", 3, NODES, id="copying-four-nodes"),
        pytest.param("finished", 4, ONE_NODE, id="finished-one-node", marks=pytest.mark.nightly),
    ],
)
def test_version_lacking_per_rank_state_is_not_restored(
    fleet: Fleet, how: str, newest: int, nodes: Sequence[str]
) -> None:
    generations = Generation(1, 3, nodes), Generation(2, 4, nodes, dying=2, how=how)
    for rank in fleet.start(*generations, model="reading").values():
        rank.wait()
    (after,) = fleet.run(Generation(3, 5, nodes), model="reading")
    assert {r["restored"].step for r in after} == {newest}
    assert [r["read"] for r in after] == [5 * (rank + 1) for rank in range(4)]


@pytest.mark.promise("per-rank-state")
def test_per_rank_state_survives_its_node(fleet: Fleet) -> None:
    fleet.run(Generation(1, 3), model="reading")
    fleet.by_node["n2"].kill()
    (after,) = fleet.run(Generation(2, 3, ("n1", "n1", "n3", "n3")), model="reading")
    assert [r["read"] for r in after] == [3 * (rank + 1) for rank in range(4)]


def test_damaged_slot_costs_no_version_with_another_holder(fleet: Fleet) -> None:
    (four,) = fleet.run(Generation(1, 3))
    view = map_segment(fleet.vaults.segments / "n2" / JOB / "own-0")
    slot = next(slot for slot, header in view.sealed_slots() if header.version == Version(1, 3))
    view.payload(slot)[-100] ^= 1
    (again,) = fleet.run(Generation(2, 3))
    assert {r["restored"].version for r in again} == {Version(1, 3)}
    assert {r["restored_as"] for r in again} == {r["fingerprint"] for r in four}
    assert [f.finding.kind for r in again for f in r["findings"]] == [FindingKind.SLOT_CORRUPT]


def test_hybrid_shards_vote_in_pairs_and_survive_a_lost_node(fleet: Fleet) -> None:
    (four,) = fleet.run(Generation(1, 3), layout="hsdp")
    digests = [r["sealed"][-1].digests for r in four]
    assert [set(d) for d in digests] == [{"replicated-0"}, {"replicated-1"}] * 2
    assert digests[:2] == digests[2:]
    assert all(r["sealed"][-1].full_copies == () and r["sealed"][-1].durable for r in four)
    fleet.by_node["n2"].kill()
    (three,) = fleet.run(Generation(2, 4, ("n1", "n3", "n4")))
    assert {r["restored_as"] for r in three} == {r["fingerprint"] for r in four}
