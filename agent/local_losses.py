"""What the end of a rank's process means for its job.

Three rules settle the races between a death, its replacement and the next generation:

* A rank is lost *in the generation it was last offered*. One that the controller had killed is lost in the generation
  it was killed for: the next one was made for its replacement and must not begin with a loss.
* Without a replacement the loss is one of the newest generation, whatever the dead process had seen, because that
  generation waits for a rank that nobody will play. Should a yet newer one still count on it, it is told again.
* A process that takes the place of a rank lost in the newest generation is not offered that generation
  (``LocalJob.lost_in``): it could only join what is broken. It hears of the next.

An agent that begins anew knows of no generation, and of no rank that ended while there was no agent. The launcher's
word on such an end waits for the first generation, and counts as a loss of it unless that was made since.

A rank may also end after a new agent has started and before its launcher has joined that agent. The loss is then
reported without a replacement, so that the other nodes do not wait. The place counts as empty only until the launcher
joins: its offer of the node makes the controller open a generation with this place in it, and a second report of the
vacancy would take the node out of the job for good.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from agent.local_seats import LocalJob, Loss, RankSeat, Timer
from everstep.clock import Clock
from everstep.wire.v1.local import RankExited
from everstep.wire.v1.training import AnyReport, RankLost

log = logging.getLogger(__name__)


class LossOutside(Protocol):
    """Where losses are reported, and what they need."""

    def report(self, report: AnyReport) -> None: ...
    def new_trace(self) -> str: ...
    def later(self, delay_s: float, call: Callable[[], None]) -> Timer: ...


class Losses:
    """Tells each loss of one node's ranks once.

    Args:
        exit_grace_s: how long a loss waits for the launcher's word on how the process ended.
    """

    def __init__(
        self, node: str, clock: Clock, outside: LossOutside, counts: Counter[str], exit_grace_s: float
    ) -> None:
        self._node = node
        self._clock = clock
        self._outside = outside
        self._counts = counts
        self._exit_grace_s = exit_grace_s

    def rank_gone(self, seat: RankSeat, detail: str) -> None:
        """A rank's connection ended."""
        job = seat.job
        if job.ranks.get(seat.local_rank) is seat:
            del job.ranks[seat.local_rank]
        early = job.exits.pop(seat.pid, None)
        if seat.is_done or job.stopped is not None:
            job.remember_end(seat.pid, None)
            return
        if seat.generation is not None:
            job.lost_in[seat.local_rank] = seat.generation
        loss = Loss(seat, at=self._clock.wall(), trace=self._outside.new_trace(), detail=seat.condemned or detail)
        job.remember_end(seat.pid, loss)
        self._log(loss)
        if early is not None:
            self._tell(loss, early)
        else:
            loss.timer = self._outside.later(self._exit_grace_s, lambda: self._tell(loss, None))

    def exited(self, job: LocalJob, exited: RankExited) -> None:
        """The launcher's word on a process that ended: before, with or after the end of its connection."""
        present = job.ranks.get(exited.local_rank)
        if present is not None and present.pid == exited.pid:
            job.exits[exited.pid] = exited  # the end of its connection is on the way
            return
        known = exited.pid in job.ends
        loss = job.ends.get(exited.pid)
        if loss is not None and not loss.told:
            self._tell(loss, exited)
        elif known and loss is None:
            return  # it ended in order
        elif not exited.replacement:
            job.vacate(exited.local_rank, by_launcher=True)
            self.tell_vacancies(job, how(exited))
        elif not known:
            job.remember_end(exited.pid, None)
            self._died_unheard(job, exited)

    def tell_unplaced(self, job: LocalJob) -> None:
        """Reports what ended before a generation was known, now that one is."""
        unplaced, job.unplaced = job.unplaced, {}
        for exited in unplaced.values():
            self._died_unheard(job, exited)

    def tell_vacancies(self, job: LocalJob, detail: str) -> None:
        """Reports the places that the newest generation has here and nobody will take, each once."""
        if job.spec is None or job.stopped is not None:
            return
        for member in job.spec.on(self._node):
            if job.is_vacant(member.local_rank):
                self._vacancy(job, job.spec.number, member.rank, member.local_rank, detail)

    def _vacancy(self, job: LocalJob, generation: int, rank: int, local_rank: int, detail: str) -> None:
        if job.vacancy_told.get(local_rank) == generation:
            return
        job.vacancy_told[local_rank] = job.lost_in[local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=generation,
                rank=rank,
                local_rank=local_rank,
                detail=detail,
                replacement=False,
            )
        )

    def _tell(self, loss: Loss, exited: RankExited | None) -> None:
        """Reports a loss, with the launcher's word on it where that came in time."""
        if loss.told:
            return
        if exited is None and loss.seat.generation is None and loss.seat.job.spec is None:
            return  # the launcher's word, when it comes, says what it was lost in
        loss.told = True
        if loss.timer is not None:
            loss.timer.cancel()
        seat, job = loss.seat, loss.seat.job
        replacement = exited.replacement if exited is not None else job.launcher is not None
        generation, rank = seat.generation, seat.rank
        if not replacement:
            job.vacate(seat.local_rank, by_launcher=exited is not None)
            generation, rank = job.newest_place(self._node, seat)
        if generation is None and job.spec is None and exited is not None:
            self._died_unheard(job, exited)
        if generation is None or rank is None or job.stopped is not None:
            return  # a spare is in nobody's way
        if not replacement:
            job.vacancy_told[seat.local_rank] = generation
        self._report(
            RankLost(
                job=job.name,
                at=loss.at,
                trace=loss.trace,
                generation=generation,
                rank=rank,
                local_rank=seat.local_rank,
                detail=loss.detail if exited is None else f"{loss.detail}; {how(exited)}",
                exit_code=exited.exit_code if exited is not None else None,
                signal=exited.signal if exited is not None else None,
                replacement=replacement,
            )
        )

    def _died_unheard(self, job: LocalJob, exited: RankExited) -> None:
        """A rank ended before it ever said Hello, or before it said it to this agent; another takes its place."""
        if job.stopped is not None:
            return
        if job.spec is None:
            job.unplaced[exited.local_rank] = exited
            return
        member = job.spec.member(self._node, exited.local_rank)
        if member is None or (exited.generation is not None and exited.generation < job.oldest):
            return  # the other one may play: it was not in there
        job.lost_in[exited.local_rank] = job.spec.number
        if exited.local_rank in job.ranks:
            job.ranks[exited.local_rank].came_in = job.spec.number + 1
        self._report(
            RankLost(
                job=job.name,
                at=self._clock.wall(),
                trace=self._outside.new_trace(),
                generation=job.spec.number,
                rank=member.rank,
                local_rank=exited.local_rank,
                detail=f"{how(exited)} before this agent heard of it",
                exit_code=exited.exit_code,
                signal=exited.signal,
            )
        )

    def _report(self, lost: RankLost) -> None:
        self._counts["ranks_lost"] += 1
        self._outside.report(lost)

    def _log(self, loss: Loss) -> None:
        log.warning(
            "local rank %d (pid %d) is gone: %s",
            loss.seat.local_rank,
            loss.seat.pid,
            loss.detail,
            extra={
                "node": self._node,
                "job": loss.seat.job.name,
                "generation": loss.seat.generation,
                "trace": loss.trace,
            },
        )


def how(exited: RankExited) -> str:
    """How a process ended, in words."""
    if exited.signal is not None:
        return f"ended by signal {exited.signal}"
    return f"ended with status {exited.exit_code}"
