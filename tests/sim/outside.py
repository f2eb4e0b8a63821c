"""What the controllers' remedies come to: resets, reboots and repairs, carried out slowly, and sometimes not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.core.effects import RemedyKind
from controller.core.events import ActionReported, OperatorAction, OperatorCommand
from everstep.errors import EverstepError
from tests.sim import facts

if TYPE_CHECKING:
    from tests.sim.world import World

TOLD_AGAIN_S = 1.0
REFUSED_SHARE = 0.1
CURED_SHARE = 0.8


class Outside:
    """Scheduler, machine room and workshop. Reads what is written, tells whoever leads how it ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._begun: set[str] = set()

    def written(self, fact: facts.Durable) -> None:
        for row in fact.batch.remedies.values():
            if row.id not in self._begun and row.ended_at is None:
                self._begun.add(row.id)
                delay_s = 0.5 + 3.0 * self.world.rng.random()
                self.world.timeline.after(delay_s, lambda r=row: self._carry_out(r.id, r.node, r.kind))  # type: ignore[misc]

    def _carry_out(self, remedy: str, node: str, kind: str) -> None:
        rng = self.world.rng
        ok = rng.random() >= REFUSED_SHARE
        self.world.trace("outside", f"{remedy}: {kind} of {node} {'is done' if ok else 'is refused'}")
        if ok:
            self._do(node, RemedyKind(kind), cured=rng.random() < CURED_SHARE)
        self._tell(remedy, node, ok=ok)

    def _do(self, node: str, kind: RemedyKind, *, cured: bool) -> None:
        machine = self.world.machines[node]
        if kind is RemedyKind.RESET_GPU and cured:
            machine.clear_findings()
        elif kind is RemedyKind.REBOOT:
            if cured:
                machine.clear_findings()
            machine.reboot()
        elif kind is RemedyKind.REPAIR:
            self.world.timeline.after(4.0 + 6.0 * self.world.rng.random(), lambda: self._repaired(node))

    def _repaired(self, node: str) -> None:
        """Back from the workshop with other GPUs; whoever mended it gives it back."""
        machine = self.world.machines[node]
        machine.replace_gpus()
        machine.reboot()
        back = OperatorCommand(kind=OperatorAction.READMIT, actor="workshop", reason="GPUs replaced", node=node)
        self.world.timeline.after(8.0, lambda: self._give_back(back))

    def _give_back(self, command: OperatorCommand) -> None:
        leader = self.world.leader()
        if leader is None:
            self.world.timeline.after(TOLD_AGAIN_S, lambda: self._give_back(command))
            return

        def answered(error: EverstepError | None) -> None:
            if error is None:
                self.world.see(facts.Ordered(str(command.kind), command.node or "", ""))

        leader.order(command, answered)

    def _tell(self, remedy: str, node: str, *, ok: bool) -> None:
        leader = self.world.leader()
        if leader is None:
            self.world.timeline.after(TOLD_AGAIN_S, lambda: self._tell(remedy, node, ok=ok))
            return
        trace = self.world.trace_id("outside")
        event = ActionReported(id=remedy, node=node, ok=ok, detail="" if ok else "not now", trace=trace)
        leader.enqueue(lambda tx, now: tx.handle(event, now))
