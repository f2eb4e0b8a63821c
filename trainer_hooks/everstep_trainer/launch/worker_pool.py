"""Assign processes to local ranks and decide what follows from a death: plain data in, actions out.

This module uses no processes, sockets or clocks; the launcher carries out the actions and reports the results.
Children have serial numbers, since a pid is known only once a child exists and may be reused after its death.
"""

from __future__ import annotations

import os
from collections import deque
from signal import Signals

import msgspec

from everstep.wire.v1.local import RankExited

DEATH_WINDOW_S = 60.0
EARLY_EXIT_REASON = "exit status 0 before the job was over"
MAX_EARLY_STANDBY_DEATHS = 3
"""Standbys in a row that may end before ``everstep.main`` until no more are made."""


class StartWorker(msgspec.Struct, frozen=True):
    """Action: fork a worker; with ``local_rank`` None, a standby."""

    serial: int
    local_rank: int | None


class ScheduleStandby(msgspec.Struct, frozen=True):
    """Action: call ``handle_standby_due`` after ``delay_s``."""

    delay_s: float


class PromoteWorker(msgspec.Struct, frozen=True):
    """Action: give a standby its local rank."""

    serial: int
    local_rank: int


class AwaitJobEnd(msgspec.Struct, frozen=True):
    """The process of a local rank ended with status 0, which is right only if the job is over.

    Call ``handle_early_exit`` if nothing ends the job.
    """

    local_rank: int
    pid: int


class GiveUp(msgspec.Struct, frozen=True):
    """This node cannot keep the local rank alive."""

    sentence: str


class RestartScript(msgspec.Struct, frozen=True):
    """A process of a script that has not called ``everstep.main`` failed: end all others, which then start again."""

    serials: tuple[int, ...]
    number: int
    sentence: str


class ScriptEnded(msgspec.Struct, frozen=True):
    """The script ended on a local rank, or on all with status 0, before any process reached ``everstep.main``."""

    exit_status: int
    sentence: str


PoolAction = (
    StartWorker | ScheduleStandby | PromoteWorker | RankExited | AwaitJobEnd | GiveUp | RestartScript | ScriptEnded
)


class PooledWorker(msgspec.Struct):
    """One process. ``assigned_in_generation``: the generation that was running when it got its local rank."""

    serial: int
    local_rank: int | None
    assigned_in_generation: int
    pid: int = 0
    has_reached_main: bool = False
    is_ordered_dead: bool = False  # Everstep kills it: the script is not to blame
    is_leaving: bool = False  # it was asked to end, so its end with status 0 does not say that training is over


class WorkerPool:
    """The workers and standbys of one launcher.

    Args:
        nproc: Number of local ranks.
        standbys: Warm processes waiting to take over a local rank.
        max_deaths: Deaths of one local rank within DEATH_WINDOW_S that are replaced; after one more the node gives up.
            Those that Everstep ordered do not count.
        standby_delay_s: From the start of a recovery to the next standby's fork, which would compete for the processor.
        max_script_restarts: How often all local ranks start again after one failed before ``everstep.main``, as those
            of a script for torchrun do. None: never, because the user did not ask for it.
    """

    def __init__(
        self,
        nproc: int,
        *,
        standbys: int = 1,
        max_deaths: int = 3,
        standby_delay_s: float = 1.0,
        max_script_restarts: int | None = None,
    ) -> None:
        self._nproc = nproc
        self._max_script_restarts = max_script_restarts
        self._standbys = standbys
        self._max_deaths = max_deaths
        self._standby_delay_s = standby_delay_s
        self._workers: dict[int, PooledWorker] = {}
        self._finished: dict[int, int] = {}  # local rank -> pid
        self._abandoned_ranks: set[int] = set()
        self._deaths: dict[int, deque[float]] = {rank: deque() for rank in range(nproc)}
        self._serial = 0
        self._standbys_due = 0
        self._early_standby_deaths = 0
        self._has_reached_main = False
        self._is_script_ending = False
        self.script_restarts = 0
        self.generation = 0

    # --- events -------------------------------------------------------------------------------------------------------

    def start(self) -> list[PoolAction]:
        """Start one worker per local rank. Standbys follow once the script has shown that it can use them."""
        return [self._new_worker(local_rank) for local_rank in range(self._nproc)]

    def handle_forked(self, serial: int, pid: int) -> None:
        """Record the pid of a forked process."""
        if serial in self._workers:
            self._workers[serial].pid = pid

    def handle_reached_main(self, serial: int) -> list[PoolAction]:
        """Record that a worker's script reached ``everstep.main``."""
        worker = self._workers.get(serial)
        if worker is None:
            return []
        worker.has_reached_main = True
        if worker.local_rank is None:
            self._early_standby_deaths = 0
        self._has_reached_main = True
        return self._refill_standbys()

    @property
    def is_ready(self) -> bool:
        """True if every local rank has a process whose script reached ``everstep.main``."""
        return {worker.local_rank for worker in self._workers.values() if worker.has_reached_main} >= set(self._deaths)

    def handle_standby_due(self) -> list[PoolAction]:
        """Make the standby of a ``ScheduleStandby``."""
        self._standbys_due -= 1
        return [self._new_worker(None)]

    def handle_exit(self, serial: int, pid: int, code: int | None, signal: int | None, now: float) -> list[PoolAction]:
        """Handle a worker's death by exit ``code`` or ``signal``; ``now`` is monotonic seconds."""
        worker = self._workers.pop(serial, None)
        if worker is None:
            return []
        if worker.local_rank is None:
            self._early_standby_deaths += not worker.has_reached_main
            return self._refill_standbys()
        if self._is_script_ending:
            return self._start_script_again()
        if code == 0 and not worker.is_leaving:
            return self._finish(worker.local_rank, pid)
        if not self._has_reached_main:
            return self._handle_script_failure(worker.local_rank, pid, code, signal)
        is_ours = worker.is_ordered_dead or code == os.EX_TEMPFAIL  # it could not leave an ended generation
        return self._handle_death(worker.local_rank, pid, code, signal, now, counts=not is_ours)

    def handle_never_forked(self, serial: int) -> list[PoolAction]:
        """Start a worker again whose fork server ended before it forked the worker: nothing of the script has run."""
        worker = self._workers.pop(serial)
        return [self._new_worker(worker.local_rank)]

    def handle_kill_order(self, local_rank: int, generation: int, *, has_grace: bool = False) -> int | None:
        """Return the worker that was ``local_rank`` in ``generation``; None if it was replaced since, or is dead.

        Its death does not count towards ``max_deaths``. ``has_grace``: it may end by itself.
        """
        found = (worker for worker in self._workers.values() if worker.local_rank == local_rank)
        ordered = next((worker for worker in found if worker.assigned_in_generation < generation), None)
        if ordered is None:
            return None
        ordered.is_ordered_dead, ordered.is_leaving = True, has_grace
        return ordered.serial

    def handle_generation(self, generation: int, local_ranks: frozenset[int], now: float) -> list[PoolAction]:
        """Handle a generation with ``local_ranks`` of this node in its roster: fill those without a process.

        A process that ended with status 0 before a newer generation that includes it has not finished; it counts as
        dead. If an agent that restarted repeats a generation, local ranks that have finished in it stay finished.
        """
        actions: list[PoolAction] = []
        if generation > self.generation:
            self.generation = generation
            for local_rank, pid in list(self._finished.items()):
                if local_rank in local_ranks:
                    actions += self.handle_early_exit(local_rank, pid, now)
        held = {worker.local_rank for worker in self._workers.values()}
        missing = sorted(local_ranks - held - self._abandoned_ranks - self._finished.keys())
        for local_rank in missing:
            actions += self._fill_rank(local_rank)
        return actions

    def handle_early_exit(self, local_rank: int, pid: int, now: float) -> list[PoolAction]:
        """Treat an exit with status 0 as a death, since the job is not over."""
        if self._finished.get(local_rank) != pid:
            return []
        del self._finished[local_rank]
        return self._handle_death(local_rank, pid, 0, None, now)

    def remove_worker(self, serial: int) -> int | None:
        """Remove a worker that is not to be replaced; return the local rank it had."""
        worker = self._workers.pop(serial, None)
        return worker.local_rank if worker is not None else None

    # --- queries ------------------------------------------------------------------------------------------------------

    def active_workers(self) -> dict[int, int]:
        """Return the serial numbers of living active workers, with their local ranks."""
        return {w.serial: w.local_rank for w in self._workers.values() if w.local_rank is not None}

    def workers_to_end_before(self, script_restart: int) -> list[int]:
        """Return the workers that have to end before this restart of the script; none if it has begun."""
        return list(self.active_workers()) if self._is_script_ending and self.script_restarts == script_restart else []

    @property
    def is_finished(self) -> bool:
        """True if the last process of every local rank ended with status 0."""
        return len(self._finished) == self._nproc

    def living_workers(self) -> dict[int, int]:
        """Return the serial numbers of all living workers, standbys first, with their pids (0: not forked yet)."""
        workers = sorted(self._workers.values(), key=lambda worker: worker.local_rank is not None)
        return {worker.serial: worker.pid for worker in workers}

    # --- internals ----------------------------------------------------------------------------------------------------

    def _new_worker(self, local_rank: int | None) -> StartWorker:
        self._serial += 1
        self._workers[self._serial] = PooledWorker(self._serial, local_rank, self.generation)
        return StartWorker(self._serial, local_rank)

    def _handle_death(
        self, local_rank: int, pid: int, code: int | None, signal: int | None, now: float, *, counts: bool = True
    ) -> list[PoolAction]:
        deaths = self._deaths[local_rank]
        while deaths and now - deaths[0] > DEATH_WINDOW_S:
            deaths.popleft()
        if counts:
            deaths.append(now)
        is_replaced = not counts or len(deaths) <= self._max_deaths
        report = RankExited(
            local_rank=local_rank,
            pid=pid,
            exit_code=code,
            signal=signal,
            has_replacement=is_replaced,
            generation=self.generation,
        )
        if is_replaced:
            return [report, *self._fill_rank(local_rank)]
        self._abandoned_ranks.add(local_rank)
        last = f", the last time with {EARLY_EXIT_REASON}" if code == 0 else ""
        sentence = (
            f"local rank {local_rank} died {len(deaths)} times within {DEATH_WINDOW_S:g} s{last}: giving up on it "
            f"(--max-restarts {self._max_deaths})"
        )
        return [report, GiveUp(sentence)]

    def _fill_rank(self, local_rank: int) -> list[PoolAction]:
        """Put a process on ``local_rank``: a standby if one is alive, preferably one that reached ``everstep.main``."""
        standbys = [worker for worker in self._workers.values() if worker.local_rank is None]
        if not standbys:
            return [self._new_worker(local_rank)]
        chosen = min(standbys, key=lambda worker: (not worker.has_reached_main, worker.serial))
        chosen.local_rank = local_rank
        chosen.assigned_in_generation = self.generation
        return [PromoteWorker(chosen.serial, local_rank), *self._refill_standbys()]

    def _refill_standbys(self) -> list[PoolAction]:
        living = sum(1 for worker in self._workers.values() if worker.local_rank is None)
        missing = self._standbys - living - self._standbys_due
        if missing <= 0 or self._early_standby_deaths >= MAX_EARLY_STANDBY_DEATHS:
            return []
        self._standbys_due += missing
        return [ScheduleStandby(self._standby_delay_s)] * missing

    def _handle_script_failure(
        self, local_rank: int, pid: int, code: int | None, signal: int | None
    ) -> list[PoolAction]:
        """Restart all ranks of a script that has not called ``everstep.main``, if a restart is left."""
        sentence = (
            f"local rank {local_rank} (pid {pid}) ended with {describe_exit(code, signal)} before the script called "
            "everstep.main"
        )
        limit = self._max_script_restarts or 0
        if self.script_restarts >= limit:
            spent = f"; it was started again {limit} times (--max-restarts {limit})" if limit else ""
            if self._max_script_restarts is None:
                spent = "; --max-restarts N starts all ranks of such a script again, as torchrun does"
            return [ScriptEnded(128 + signal if signal is not None else code or 1, sentence + spent)]
        self.script_restarts += 1
        self._is_script_ending = True
        sentence += f"; all ranks of this node start again (restart {self.script_restarts} of {limit})"
        restart = RestartScript(tuple(self.active_workers()), self.script_restarts, sentence)
        return [restart, *self._start_script_again()]

    def _start_script_again(self) -> list[PoolAction]:
        """Start one worker per local rank, once the last of those before has ended."""
        if self.active_workers():
            return []
        self._is_script_ending = False
        self._finished.clear()
        return self.start()

    def _finish(self, local_rank: int, pid: int) -> list[PoolAction]:
        self._finished[local_rank] = pid
        if self._has_reached_main:
            return [AwaitJobEnd(local_rank, pid)]
        return [ScriptEnded(0, "the script ended without calling everstep.main")] if self.is_finished else []


def describe_exit(code: int | None, number: int | None) -> str:
    """Return how a process ended, in words."""
    if number is None:
        return EARLY_EXIT_REASON if code == 0 else f"exit status {code}"
    try:
        return Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
