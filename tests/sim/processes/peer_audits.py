"""Simulate audits of a generation.

In each step a peer repeats the work of one rank. An arbiter repeats it too if their results differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.training import AuditsClean, AuditStatement

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine
    from tests.sim.processes.process_group import ProcessGroup
    from tests.sim.processes.rank import RankProcess

CORRECT = "a0a0"
"""The digest of every correct result."""
CORRECT_EVERY = 3
"""One of this many wrong results is correct when its owner computes it again."""


class PeerAudits:
    """Audit the ranks in turn. A machine's wrong results reach the states of all ranks through their gradients."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def wrong_nodes(self) -> frozenset[str]:
        """Return the nodes whose wrong results enter this step, each with the generation."""
        machines = {member.machine for member in self._group.members.values()}
        return frozenset(f"{m.name}@{self._group.spec.number}" for m in machines if m.computes_wrongly)

    def audit(self, step: int) -> None:
        """Audit the work of one rank in a step. Owner, peer and arbiter report their results."""
        members, world = self._group.members, self._group.spec.world_size
        owner, peer = step % world, (step + 1) % world
        if world < 2:
            return
        original, repeated = self._owner_digests(members[owner].machine, step)
        peer_digest = self._auditor_digest(members[peer].machine)
        if original == peer_digest:
            self._report(owner, AuditsClean, step=step - 1)
            return
        arbiter = self._arbiter(owner, peer)
        fields: dict[str, Any] = {
            "audit": AuditKind.PEER_REPLAY,
            "unit": f"layer {step % 7}",
            "step": step,
            "owner": owner,
            "expects_arbiter": arbiter is not None,
        }
        self._report(owner, AuditStatement, role=AuditRole.OWNER, original=original, digest=repeated, **fields)
        self._report(peer, AuditStatement, role=AuditRole.PEER, digest=peer_digest, **fields)
        if arbiter is not None:
            arbiter_digest = self._auditor_digest(members[arbiter].machine)
            self._report(arbiter, AuditStatement, role=AuditRole.ARBITER, digest=arbiter_digest, **fields)

    def _owner_digests(self, machine: Machine, step: int) -> tuple[str, str]:
        """Return the digests of the owner's result and of its repetition."""
        if not machine.computes_wrongly:
            return CORRECT, CORRECT
        wrong = f"bad-{machine.name}"
        return wrong, CORRECT if step % CORRECT_EVERY == 0 else wrong

    def _auditor_digest(self, machine: Machine) -> str:
        return f"bad-{machine.name}" if machine.computes_wrongly or machine.audits_wrongly else CORRECT

    def _arbiter(self, owner: int, peer: int) -> int | None:
        """Return the next rank after the peer on a third node, or any third rank if there is none."""
        spec = self._group.spec
        others = [(peer + 1 + offset) % spec.world_size for offset in range(spec.world_size - 2)]
        audited_nodes = {spec.node_of(owner), spec.node_of(peer)}
        first = others[0] if others else None
        return next((rank for rank in others if spec.node_of(rank) not in audited_nodes), first)

    def _report(self, rank: int, kind: type[Any], **fields: Any) -> None:
        process: RankProcess = self._group.members[rank]
        at, spec = process.machine.clock.wall(), self._group.spec
        message = kind(job=spec.job, at=at, generation=spec.number, rank=rank, **fields)
        process.call_when_running(lambda: process.send_to_agent(message))
