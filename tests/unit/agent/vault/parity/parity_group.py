"""The vaults of a parity group: four ranks with a shard each on four nodes, and P and Q on two others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, slot_bytes_for
from everstep.wire.v1 import local
from everstep.wire.v1.vault_reports import ParityGroup
from everstep_agent.vault.parity.shards import STRIPE_BYTES
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import JOB, RankMemory, Vaults, expect, noise, vaults

V = Version(1, 5)
K = 4
SIZES = (CHUNK_BYTES + 70_000, CHUNK_BYTES + STRIPE_BYTES + 3, 5000, CHUNK_BYTES)
NODES = ("n1", "n2", "n3", "n4", "p", "q")
GROUP = ParityGroup(group=7, members=tuple((10 + at, f"n{at + 1}") for at in range(K)), parity=("p", "q"))


class Group:
    """Ranks 10 to 13 on n1 to n4 with a sealed version each. Nodes p and q hold the parity."""

    def __init__(self, fleet: Vaults, sizes: Sequence[int] = SIZES) -> None:
        self.fleet = fleet
        fleet.configure()
        self.payloads = [noise(size, seed=at) for at, size in enumerate(sizes)]
        self.ranks = [
            RankMemory(vault.client(), rank, slot_bytes=slot_bytes_for(64, len(payload)))
            for vault, (rank, _), payload in zip(fleet.all, GROUP.members, self.payloads, strict=False)
        ]
        self.fill(V)

    def fill(self, version: Version, slot: int = 0) -> None:
        for rank, payload in zip(self.ranks, self.payloads, strict=True):
            rank.fill(slot, version, payload, manifest=f"manifest of rank {rank.rank}".encode())

    def protect(self, node: str, version: Version = V, **fields: object) -> local.FromVault:
        request = {"job": JOB, "generation": 1, "version": version, "group": GROUP} | fields
        return self.fleet.supervisors[node].ask(local.Protect, **request)

    def protect_all(self) -> None:
        answers = [expect(self.protect(node), local.Protected) for node in ("p", "q")]
        assert [answer.parity for answer in answers] == ["P", "Q"]
        assert answers[0].members_digest == answers[1].members_digest

    def fetch(
        self, member: int, by: str, ranges: tuple[tuple[int, int], ...], version: Version = V, group: object = GROUP
    ) -> local.FromVault:
        at = NODES.index(by)
        return (
            self.fleet.all[at]
            .client()
            .ask(
                local.Fetch,
                job=JOB,
                node=f"n{member + 1}",
                rank=10 + member,
                version=version,
                ranges=ranges,
                target_path=str(self.fleet.all[at].segment_dir / "scratch"),
                parity_group=group,
            )
        )

    def rebuild(self, member: int, by: str, ranges: tuple[tuple[int, int], ...]) -> bytes:
        answer = self.fetch(member, by, ranges)
        assert isinstance(answer, local.Fetched), answer
        data = (self.fleet.all[NODES.index(by)].segment_dir / "scratch").read_bytes()
        return data[: answer.bytes]

    def check_rebuilt(self, member: int, by: str) -> None:
        payload = self.payloads[member]
        assert self.rebuild(member, by, ()) == f"manifest of rank {10 + member}".encode()
        assert self.rebuild(member, by, ((0, len(payload)),)) == payload

    def forget_nodes(self, gone: Sequence[str], generation: int) -> None:
        """Configure the other vaults for a generation without these nodes, so that no vault reads from them."""
        left = [vault for vault in self.fleet.all if vault.node not in gone]
        holders = tuple(holder for holder in self.fleet.holders() if holder.node not in gone)
        self.fleet.configure(*left, generation=generation, holders=holders)


@contextmanager
def started(forks: ForkPool, options: Mapping[str, Sequence[str]] = {}) -> Iterator[Vaults]:
    """Yield the six vaults. ``options``: command line options by node."""
    with vaults(forks) as running:
        for node in NODES:
            running.start(node, *options.get(node, ()))
        yield running
