"""Who holds which local rank, and what follows from a death: plain data in, actions out.

No processes, sockets or clocks in here; the launcher carries the actions out and brings back what became of them.
Children are known by the launcher's serial numbers, since a pid is only known once a child exists, and may be used
again once it does not.
"""

from __future__ import annotations

from collections import deque
from signal import Signals

import msgspec


class WorkerPoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a launcher staffs its local ranks.

    ``nproc``: local ranks. ``standbys``: warm processes waiting to take one over. ``max_deaths`` within ``window_s``
    of one local rank are replaced; one more, and the node gives up on it: something is wrong here that a fresh
    process does not cure. ``standby_delay_s``: how long after a recovery began the next standby is forked, so that
    it does not take the processor from it.
    """

    nproc: int
    standbys: int = 1
    max_deaths: int = 3
    window_s: float = 60.0
    standby_delay_s: float = 1.0


class StartWorker(msgspec.Struct, frozen=True):
    """Fork a worker; ``local_rank`` None makes it a standby."""

    serial: int
    local_rank: int | None


class ScheduleStandby(msgspec.Struct, frozen=True):
    """Call ``handle_standby_due`` after ``delay_s``."""

    delay_s: float


class PromoteWorker(msgspec.Struct, frozen=True):
    """Tell the standby which local rank it is now."""

    serial: int
    local_rank: int


class ReportExit(msgspec.Struct, frozen=True):
    """Tell the agent that the process of a local rank died, and whether another takes its place."""

    local_rank: int
    pid: int
    code: int | None
    signal: int | None
    replacement: bool


class AwaitJobEnd(msgspec.Struct, frozen=True):
    """The process of a local rank ended with status 0, which is in order once the job is over. Call
    ``handle_early_exit`` where nobody says that it is."""

    local_rank: int
    pid: int


class GiveUp(msgspec.Struct, frozen=True):
    """This node cannot keep the local rank alive."""

    sentence: str


class ScriptFailed(msgspec.Struct, frozen=True):
    """A worker ended before the script came to ``everstep.main``; ``code`` is what a shell would show."""

    code: int
    sentence: str


class ScriptEnded(msgspec.Struct, frozen=True):
    """Every local rank's process ended with status 0, and none ever came to ``everstep.main``."""


PoolAction = (
    StartWorker | ScheduleStandby | PromoteWorker | ReportExit | AwaitJobEnd | GiveUp | ScriptFailed | ScriptEnded
)


class PooledWorker(msgspec.Struct):
    """One process. ``assigned_in_generation``: the generation that was running when it got its local rank."""

    serial: int
    local_rank: int | None
    assigned_in_generation: int
    pid: int | None = None
    has_reached_main: bool = False


EARLY_EXIT_REASON = "exit status 0 before the job was over"
MAX_EARLY_STANDBY_DEATHS = 3
"""Standbys in a row that end before they arrive until no more are made."""


class WorkerPool:
    """The workers and standbys of one launcher."""

    def __init__(self, settings: WorkerPoolSettings) -> None:
        self._settings = settings
        self._workers: dict[int, PooledWorker] = {}
        self._finished: dict[int, int] = {}  # local rank -> pid
        self._abandoned_ranks: set[int] = set()
        self._deaths: dict[int, deque[float]] = {rank: deque() for rank in range(settings.nproc)}
        self._serial = 0
        self._standbys_due = 0
        self._early_standby_deaths = 0
        self._has_reached_main = False
        self.generation = 0

    # --- what happens ---------------------------------------------------------------------------------------------

    def start(self) -> list[PoolAction]:
        """The first workers, one per local rank. Standbys follow once the script has shown that it can use them."""
        return [self._new_worker(local_rank) for local_rank in range(self._settings.nproc)]

    def handle_forked(self, serial: int, pid: int) -> None:
        """The fork server made the process."""
        if serial in self._workers:
            self._workers[serial].pid = pid

    def handle_reached_main(self, serial: int) -> list[PoolAction]:
        """A worker's script came to ``everstep.main``."""
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
        """Whether every local rank has a process whose script came to ``everstep.main``."""
        arrived = {worker.local_rank for worker in self._workers.values() if worker.has_reached_main}
        return all(local_rank in arrived for local_rank in range(self._settings.nproc))

    def handle_standby_due(self) -> list[PoolAction]:
        """The delay of a ``ScheduleStandby`` is over."""
        self._standbys_due -= 1
        return [self._new_worker(None)]

    def handle_exit(self, serial: int, pid: int, code: int | None, signal: int | None, now: float) -> list[PoolAction]:
        """A worker's process is dead: ``code`` or ``signal`` says how, ``now`` is monotonic seconds."""
        worker = self._workers.pop(serial, None)
        if worker is None:
            return []
        if worker.local_rank is None:
            return self._standby_died(worker)
        if code == 0:
            return self._finish(worker.local_rank, pid)
        if not self._has_reached_main:
            return [_script_failed(worker.local_rank, code, signal)]
        return self._handle_death(worker.local_rank, pid, code, signal, now)

    def handle_generation(self, generation: int, local_ranks: frozenset[int], now: float) -> list[PoolAction]:
        """A generation with ``local_ranks`` of this node in its roster: those without a process get one.

        Who ended with status 0 before a newer generation that counts on it had not finished, and died. Heard again (an
        agent that restarted repeats it), a generation asks nothing of a local rank that has finished in it.
        """
        actions: list[PoolAction] = []
        if generation > self.generation:
            self.generation = generation
            early = [(local_rank, pid) for local_rank, pid in self._finished.items() if local_rank in local_ranks]
            actions = [action for local_rank, pid in early for action in self.handle_early_exit(local_rank, pid, now)]
        held = {worker.local_rank for worker in self._workers.values()}
        missing = sorted(local_ranks - held - self._abandoned_ranks - self._finished.keys())
        return actions + [action for local_rank in missing for action in self._fill_rank(local_rank)]

    def handle_early_exit(self, local_rank: int, pid: int, now: float) -> list[PoolAction]:
        """A process ended with status 0, and the job is not over: a death like any other."""
        if self._finished.get(local_rank) != pid:
            return []
        del self._finished[local_rank]
        return self._handle_death(local_rank, pid, 0, None, now)

    def remove_worker(self, serial: int) -> int | None:
        """A process ended that is not to be replaced; returns the local rank it had."""
        worker = self._workers.pop(serial, None)
        return worker.local_rank if worker is not None else None

    # --- what is asked --------------------------------------------------------------------------------------------

    def worker_to_kill(self, local_rank: int, generation: int) -> int | None:
        """The worker that was ``local_rank`` in ``generation``; None where it has been replaced since, or is dead."""
        for worker in self._workers.values():
            if worker.local_rank == local_rank and worker.assigned_in_generation < generation:
                return worker.serial
        return None

    def active_workers(self) -> dict[int, int]:
        """Serial numbers of living active workers, with their local ranks."""
        return {w.serial: w.local_rank for w in self._workers.values() if w.local_rank is not None}

    @property
    def is_finished(self) -> bool:
        """Whether the last process of every local rank ended with status 0."""
        return len(self._finished) == self._settings.nproc

    def living_workers(self) -> list[tuple[int, int]]:
        """Serial numbers and pids of all living workers (pid 0: not forked yet), standbys first."""
        workers = sorted(self._workers.values(), key=lambda worker: worker.local_rank is not None)
        return [(worker.serial, worker.pid or 0) for worker in workers]

    def serials(self) -> list[int]:
        """All living workers, standbys last."""
        return sorted(self._workers, key=lambda serial: (self._workers[serial].local_rank is None, serial))

    # --- how ------------------------------------------------------------------------------------------------------

    def _new_worker(self, local_rank: int | None) -> StartWorker:
        self._serial += 1
        self._workers[self._serial] = PooledWorker(self._serial, local_rank, self.generation)
        return StartWorker(self._serial, local_rank)

    def _handle_death(
        self, local_rank: int, pid: int, code: int | None, signal: int | None, now: float
    ) -> list[PoolAction]:
        deaths = self._deaths[local_rank]
        while deaths and now - deaths[0] > self._settings.window_s:
            deaths.popleft()
        deaths.append(now)
        replaced = len(deaths) <= self._settings.max_deaths
        actions = self._fill_rank(local_rank) if replaced else [self._give_up(local_rank, len(deaths), code)]
        return [ReportExit(local_rank, pid, code, signal, replaced), *actions]

    def _give_up(self, local_rank: int, deaths: int, code: int | None) -> GiveUp:
        self._abandoned_ranks.add(local_rank)
        last = f", the last time with {EARLY_EXIT_REASON}" if code == 0 else ""
        return GiveUp(
            f"local rank {local_rank} died {deaths} times within {self._settings.window_s:g} s{last} "
            f"(--max-restarts {self._settings.max_deaths}): this node cannot keep it alive"
        )

    def _fill_rank(self, local_rank: int) -> list[PoolAction]:
        """Puts a process on ``local_rank``: a standby if one lives, preferably one that is warm already."""
        standbys = [worker for worker in self._workers.values() if worker.local_rank is None]
        if not standbys:
            return [self._new_worker(local_rank)]
        chosen = min(standbys, key=lambda worker: (not worker.has_reached_main, worker.serial))
        chosen.local_rank = local_rank
        chosen.assigned_in_generation = self.generation
        return [PromoteWorker(chosen.serial, local_rank), *self._refill_standbys()]

    def _refill_standbys(self) -> list[PoolAction]:
        living = sum(1 for worker in self._workers.values() if worker.local_rank is None)
        missing = self._settings.standbys - living - self._standbys_due
        if missing <= 0 or self._early_standby_deaths >= MAX_EARLY_STANDBY_DEATHS:
            return []
        self._standbys_due += missing
        return [ScheduleStandby(self._settings.standby_delay_s)] * missing

    def _standby_died(self, worker: PooledWorker) -> list[PoolAction]:
        if not worker.has_reached_main:
            self._early_standby_deaths += 1
        return self._refill_standbys()

    def _finish(self, local_rank: int, pid: int) -> list[PoolAction]:
        self._finished[local_rank] = pid
        if self._has_reached_main:
            return [AwaitJobEnd(local_rank, pid)]
        return [ScriptEnded()] if self.is_finished else []


def _script_failed(local_rank: int, code: int | None, signal: int | None) -> ScriptFailed:
    how = f"with exit status {code}" if signal is None else f"by signal {signal}"
    status = code if signal is None else 128 + signal
    assert status is not None
    sentence = f"the process of local rank {local_rank} ended {how} before the script called everstep.main"
    return ScriptFailed(status, sentence)


def describe_exit(code: int | None, number: int | None) -> str:
    """How a process ended, in words."""
    if number is None:
        return EARLY_EXIT_REASON if code == 0 else f"exit status {code}"
    try:
        return Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
