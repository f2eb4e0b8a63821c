"""What a leading controller does towards the outside: the real desk and the real observer, over a simulated world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import SchedulerStateChanged
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.remediation.remediator import CordonStatus
from everstep_controller.remediation.service import CordonObserver
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.store.rows import RemediationRow

from everstep.clock import Backoff
from everstep.errors import EverstepError, Unavailable
from tests.sim import facts, outside
from tests.sim.event_loop import VirtualLoop

if TYPE_CHECKING:
    from tests.sim.controller_process import ControllerProcess

OBSERVE_S = 2.0
TIMEOUT_S = 1.5
"""Until a call is given up that nobody answers."""
UNHEARD_SHARE = 0.1
"""Of orders that are taken, and whose answers are lost."""
LEFT_SHARE = 0.5
"""Of calls that are on their way although the process that made them dies before they arrive."""
BACKOFF = Backoff(floor_s=0.2, ceiling_s=2.0)
PATIENCE_S = {
    RemediationKind.CORDON: 10.0,
    RemediationKind.UNCORDON: 10.0,
    RemediationKind.RESET_GPU: 15.0,
    RemediationKind.REBOOT: 30.0,
    RemediationKind.REPAIR: 10.0,
}
"""As the desk's own, with minutes turned into seconds."""


class Caller:
    """Satisfies ``Remediator``: one controller's connection to the outside, for one time of leading."""

    name = "simulated"
    dry_run = False
    kinds = frozenset(RemediationKind)

    def __init__(self, controller: ControllerProcess) -> None:
        self._world = controller.world
        self._outside = controller.world.outside
        self._name, self._epoch = controller.name, controller.epoch

    def apply(self, remedy: Remediation) -> None:
        self._reach()
        self._world.see(facts.RemedyAsked(self._name, self._epoch, remedy.id, remedy.node, remedy.kind))
        self._outside.apply(remedy)
        if self._outside.rng.random() < UNHEARD_SHARE:
            raise Unavailable("the connection broke while it was asked")

    def is_done(self, remedy: Remediation) -> bool:
        self._reach()
        done = self._outside.is_done(remedy)
        self._world.see(facts.RemedyLookedAt(self._name, self._epoch, remedy.id, done))
        return done

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        self._reach()
        return self._outside.cordon_status(nodes)

    def close(self) -> None: ...

    def _reach(self) -> None:
        if self._outside.away or not self._world.wires.connected(self._name, outside.NAME):
            raise Unavailable("the scheduler does not answer")


class TowardsOutside:
    """Made for one time of leading, and for the life of its process. ``rows``: remedies that an earlier life left."""

    def __init__(self, controller: ControllerProcess, rows: Iterable[RemediationRow]) -> None:
        self._controller = controller
        self._world, self._life = controller.world, controller.life
        self._loop = VirtualLoop(
            self._world.timeline, do=self._do, real_s=controller.clock.real_s, carry=self._carry_call
        )
        caller = Caller(controller)
        self.desk = RemediationExecutor(
            caller,
            submit=self._submit,
            now=controller.now,
            uniform=self._world.outside.rng.random,
            check_leading=controller.check_leading,
            rows=rows,
            backoff=BACKOFF,
            patience_s=PATIENCE_S,
        )
        self._observer = CordonObserver(caller, controller.state, self._tell, is_idle=self.desk.is_idle)

    def start(self) -> None:
        """Call once the controller leads."""
        self._loop.enter(self.desk.start)
        self._loop.begin(self._observer.run(OBSERVE_S))

    def end(self) -> None:
        """The process was killed."""
        self._loop.end()

    def requested(self, rows: list[RemediationRow]) -> None:
        """Remedies that have just become durable, in order."""
        if rows:
            self._loop.enter(lambda: self.desk.enqueue(rows))

    def _do(self, call: Callable[[], None]) -> None:
        self._controller.do(self._life, call)

    async def _submit(self, stimulus: Callable[[Transaction, float], None]) -> None:
        self._controller.check_leading()
        done = self._loop.create_future()

        def outcome(promise: Any) -> None:
            error = promise.exception()
            if error is not None:
                self._loop.enter(lambda: done.set_exception(error))
            else:
                self._loop.enter(lambda: done.set_result(None))

        self._controller.enqueue(stimulus).add_done_callback(outcome)
        await done

    async def _tell(self, event: SchedulerStateChanged) -> None:
        trace = self._world.trace_id("observer")
        seen = msgspec.structs.replace(event, trace=trace)
        await self._submit(lambda tx, now: (tx.handle(seen, now), None)[1])

    def _carry_call(self, call: Callable[[], Any], answer: Callable[[Any, EverstepError | None], None]) -> None:
        """A thread's call: it takes its time there and back, and is answered by nobody where the way is cut."""
        rng, timeline = self._world.outside.rng, self._world.timeline
        there_s, back_s = (0.005 + 0.02 * rng.random() + self._world.outside.slow_s for _ in range(2))
        has_left = rng.random() < LEFT_SHARE

        def arrive() -> None:
            if not (has_left or self._controller.lives(self._life)):
                return
            try:
                result = call()
            except Unavailable as error:
                timeline.after(TIMEOUT_S, lambda e=error: answer(None, e))  # type: ignore[misc]
            except EverstepError as error:
                timeline.after(back_s, lambda e=error: answer(None, e))  # type: ignore[misc]
            else:
                timeline.after(back_s, lambda: answer(result, None))

        timeline.after(there_s, arrive)
