"""Audits of a generation: each step a peer, and where they differ an arbiter, do the work of one rank again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.vocabulary import AuditLink, AuditRole
from everstep.wire.v1.training import AuditsClean, AuditStatement

if TYPE_CHECKING:
    from tests.sim.collective import Collective
    from tests.sim.machine import Machine
    from tests.sim.rank_process import RankProcess

RIGHT = "a0a0"
ONCE_EVERY = 3
"""Of so many results that came out wrong, one comes out right when it is computed again."""


class Audits:
    """Of the ranks in turn. What a machine computes wrongly reaches the states of all, through their gradients."""

    def __init__(self, group: Collective) -> None:
        self._group = group

    def wrong(self) -> frozenset[str]:
        """What taints this step: the machines that compute wrongly, each with the generation."""
        machines = {member.machine for member in self._group.members.values()}
        return frozenset(f"{one.name}@{self._group.spec.number}" for one in machines if one.lying)

    def step(self, step: int) -> None:
        """Audit the work of one rank; each that has a part says what it got."""
        members, world = self._group.members, self._group.spec.world_size
        owner, peer = step % world, (step + 1) % world
        if world < 2:
            return
        used, again = self._owners(members[owner].machine, step)
        told = self._auditors(members[peer].machine)
        if used == told:
            self._tell(owner, AuditsClean, step=step - 1)
            return
        arbiter = self._arbiter(owner, peer)
        more: dict[str, Any] = {
            "link": AuditLink.PEER_REPLAY,
            "unit": f"layer {step % 7}",
            "step": step,
            "owner": owner,
            "expects_arbiter": arbiter is not None,
        }
        self._tell(owner, AuditStatement, role=AuditRole.OWNER, original=used, digest=again, **more)
        self._tell(peer, AuditStatement, role=AuditRole.PEER, digest=told, **more)
        if arbiter is not None:
            judged = self._auditors(members[arbiter].machine)
            self._tell(arbiter, AuditStatement, role=AuditRole.ARBITER, digest=judged, **more)

    def _owners(self, machine: Machine, step: int) -> tuple[str, str]:
        if not machine.lying:
            return RIGHT, RIGHT
        wrong = f"bad-{machine.name}"
        return wrong, RIGHT if step % ONCE_EVERY == 0 else wrong

    def _auditors(self, machine: Machine) -> str:
        return f"bad-{machine.name}" if machine.lying or machine.misjudging else RIGHT

    def _arbiter(self, owner: int, peer: int) -> int | None:
        """The rank after the peer on a third node; where there is none, any third one."""
        spec = self._group.spec
        others = [(peer + 1 + at) % spec.world_size for at in range(spec.world_size - 2)]
        taken = {spec.node_of(owner), spec.node_of(peer)}
        return next((rank for rank in others if spec.node_of(rank) not in taken), others[0] if others else None)

    def _tell(self, rank: int, kind: type[Any], **words: Any) -> None:
        process: RankProcess = self._group.members[rank]
        at, spec = process.machine.clock.wall(), self._group.spec
        message = kind(job=spec.job, at=at, generation=spec.number, rank=rank, **words)
        process.do(lambda: process.tell(message))
