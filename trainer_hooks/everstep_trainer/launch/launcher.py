"""Run one node's launcher: start everything, handle events, and clean up.

All events come through one queue and are handled in order. ``worker_pool`` decides what follows from a death;
``processes`` carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.receipts.text import format_count
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.local import RankExited
from everstep.wire.v1.training import EarlierRun, JobSpec, LauncherJoined, LauncherLeaving
from everstep_trainer.launch.earlier_run import describe_start, find_earlier_run
from everstep_trainer.launch.forking.fork_client import ForkServerLost
from everstep_trainer.launch.forking.fork_messages import Exited, Forked, ForkServerReady
from everstep_trainer.launch.forking.process_setup import NOTICE_SIGNALS
from everstep_trainer.launch.interruption import EndingSignals, describe_continuation, wait_until_saved
from everstep_trainer.launch.options import LaunchOptions
from everstep_trainer.launch.output.worker_output import WorkerOutput, copying_output
from everstep_trainer.launch.processes import STORE_SERIAL, ProcessEvent, WorkerProcesses, WorkerReachedMain
from everstep_trainer.launch.progress_display import showing_progress
from everstep_trainer.launch.run_receipt import report_fleet_run, report_run
from everstep_trainer.launch.services.daemon_call import call_in_daemon
from everstep_trainer.launch.services.fleet_access import FleetAccess
from everstep_trainer.launch.services.job_rendezvous import (
    LOOPBACK,
    Endpoint,
    claim_job,
    collective_environment,
    meet,
    rendezvous_host,
    watch_first_node,
)
from everstep_trainer.launch.services.launcher_connection import Directive, LauncherConnection
from everstep_trainer.launch.services.private_services import PrivateServices, prepare_state_dir
from everstep_trainer.launch.worker_pool import (
    AwaitJobEnd,
    GiveUp,
    PoolAction,
    PromoteWorker,
    RestartScript,
    ScheduleStandby,
    ScriptEnded,
    StartWorker,
    WorkerPool,
    describe_exit,
)

log = logging.getLogger(__name__)

EXCLUSION_TIMEOUT_S = 30.0
"""Longest wait of a node that gave up on a local rank, and may host the store, for a generation without it."""
JOB_END_WAIT_S = 5.0
"""Seconds after a rank's exit with status 0 until it counts as too early, if a connected agent has not ended
the job."""
MAX_JOB_END_WAITS = 6
"""Number of such waits without an agent after which a launcher whose ranks all exited with status 0 assumes that the
job is over."""
ERROR_PRINT_WAIT_S = 0.5
"""Seconds from a StopJob for a failure, which ranks receive too, to SIGTERM: time to print the reason."""
MAX_EARLY_FORK_SERVER_DEATHS = 3
"""Fork servers in a row that may end before they are ready: a node under memory pressure kills again."""
MAX_STORE_DEATHS = 5
STORE_WINDOW_S = 60.0


class LauncherOutcome(msgspec.Struct, frozen=True):
    """The launcher's exit status, and a sentence for people and for the agent.

    As an event, the end of a wait that has reached its limit. ``is_shown``: the sentence has been printed.
    """

    exit_status: int
    sentence: str
    is_shown: bool = False


class StandbyDue(msgspec.Struct, frozen=True):
    """The next standby may be forked."""


class FirstNodeLost(msgspec.Struct, frozen=True):
    """The first node, which has the job's controller, does not answer any more."""

    sentence: str


class JobEndOverdue(msgspec.Struct, frozen=True):
    """A process ended with status 0 ``waits`` waits ago, and nothing has ended the job.

    ``joins``: how often this launcher had joined the job before the last of these waits.
    """

    ended: AwaitJobEnd
    joins: int
    waits: int


class EndRequested(msgspec.Struct, frozen=True):
    """A signal asks the launcher to end."""

    number: signal.Signals


class GraceOver(msgspec.Struct, frozen=True):
    """The ranks' time to end is over."""


class RankGraceOver(msgspec.Struct, frozen=True):
    """The time to end of a rank that was to leave, the worker ``serial``, is over."""

    serial: int


class ScriptGraceOver(msgspec.Struct, frozen=True):
    """The time of a script's ranks to end before its restart ``number`` is over."""

    number: int


LauncherEvent = (
    ProcessEvent
    | Directive
    | LauncherOutcome
    | StandbyDue
    | FirstNodeLost
    | JobEndOverdue
    | EndRequested
    | GraceOver
    | RankGraceOver
    | ScriptGraceOver
    | signal.Signals
)
"""A signal is one that concerns ranks alone, such as a scheduler's notice of pre-emption."""


def ended_by_signal(number: signal.Signals) -> LauncherOutcome:
    """Return the outcome of a launcher that a signal ended."""
    return LauncherOutcome(128 + number, f"ended by {number.name}")


def listening_socket(host: str) -> socket.socket:
    """Listen on a free port of ``host`` alone. Raises ConfigurationError if the address is not this machine's."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=4096)
    except OSError as error:
        advice = "give one of this machine's addresses with --local-addr"
        if host == LOOPBACK:  # a host with [::1] alone; private services and ranks meet on 127.0.0.1
            advice = "ranks of one node meet there, so give the loopback its address: ip addr add 127.0.0.1/8 dev lo"
        raise ConfigurationError(f"cannot listen on {host}: {error}; {advice}") from error


async def launch(
    options: LaunchOptions, clock: Clock, environ: Mapping[str, str], signals: EndingSignals
) -> LauncherOutcome:
    """Run this node's part of a job from start to end, on an event loop in the main thread.

    The first of ``signals`` lets ranks end and checkpoints be written. Cancel the task to end at once. Children die
    with the thread that forked them. Raises ConfigurationError for unusable options, or Unavailable.
    """
    async with contextlib.AsyncExitStack() as stack:
        state_dir, labels = prepare_state_dir(options.directories.state_dir, environ), dict[int, str]()
        output = stack.enter_context(copying_output(options, state_dir, clock, labels))
        if options.agent_socket is not None:
            stack.enter_context(claim_job(options.agent_socket, options.job))
        earlier = await call_in_daemon(partial(find_earlier_run, options))
        network, own_address = None, options.rendezvous.local_addr
        if options.meets_at_endpoint:
            network = await call_in_daemon(partial(meet, options, state_dir, stack))
            own_address = network.address
            environ = {**environ, **collective_environment(own_address, environ)}
        segment_dir, display = options.directories.segment_dir, options.display
        segments = Path(segment_dir).absolute() if segment_dir is not None else None
        private = PrivateServices(
            state_dir, options.job, clock, options.vault_linger_s, network, start=options.run_start, segments=segments
        )
        stack.push_async_callback(private.end)
        events: asyncio.Queue[LauncherEvent] = asyncio.Queue()
        for number in NOTICE_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, events.put_nowait, number)
        listener = listening_socket(rendezvous_host(own_address, several_nodes=options.max_nodes > 1))
        processes = WorkerProcesses(options, environ, stack.enter_context(listener), events.put_nowait, output)
        stack.push_async_callback(processes.end)
        processes.start()
        agent_socket = options.agent_socket or str(await private.start())
        if network is not None and not private.has_controller:

            async def watch() -> None:
                sentence = await watch_first_node(*private.controller(), options.rendezvous.first_node_timeout_s, clock)
                events.put_nowait(FirstNodeLost(sentence))

            stack.callback(asyncio.create_task(watch(), name="first node").cancel)
        spec = options.job_spec(await processes.count_ranks())
        fleet = FleetAccess(options.job) if options.agent_socket is not None else None
        how_to_watch = private.how_to_watch() if fleet is None else f"everstep job show {options.job}"
        log.info("%s", describe_start(options, spec, earlier, how_to_watch, environ))
        launcher = Launcher(options, clock, spec, agent_socket, processes, events, labels, output, fleet, earlier)
        exit_status, detail, until = None, "interrupted", clock.wall()
        try:
            interval_s = display.progress_interval_s if display.progress and not options.torchrun_script else None
            signals.deliver_to(lambda number: events.put_nowait(EndRequested(number)))
            async with showing_progress(fleet or private, options.job, clock, interval_s, environ):
                outcome = await launcher.run()
            signals.deliver_to(None)
            until, detail = launcher.signalled_at or clock.wall(), outcome.sentence
            exit_status = None if launcher.was_interrupted else outcome.exit_status
            if fleet is None and launcher.was_interrupted and not options.torchrun_script:
                outcome = await _conclude_interruption(outcome, launcher, private, options, clock)
            if outcome.exit_status:
                log.info("%s", outcome.sentence)  # now, because nothing follows the receipt
            if options.torchrun_script:
                log.info("the script of job %s: %s", options.job, launcher.describe_restarts())
            elif fleet is not None:
                await report_fleet_run(fleet, options.job)
            return msgspec.structs.replace(outcome, is_shown=True)
        finally:
            output.stop_showing_ranks()  # what ranks print while they end is kept only
            try:
                if not options.torchrun_script:
                    await report_run(
                        private, options.job, state_dir, exit_status=exit_status, sentence=detail, now=until
                    )
            finally:
                await launcher.leave(detail, at_once=len(signals.received) > 1)
            if network is not None and private.has_controller:  # the other nodes must know of the end before it goes
                if not launcher.is_job_over:
                    await private.stop_job(f"the first node's launcher ended: {detail}"[:1000])
                await private.wait_for_other_nodes()


async def _conclude_interruption(
    outcome: LauncherOutcome, launcher: Launcher, private: PrivateServices, options: LaunchOptions, clock: Clock
) -> LauncherOutcome:
    """Wait within the grace time until the newest version is on storage; add to the outcome how to continue."""
    if launcher.is_job_over and not launcher.is_paused:
        return outcome
    kept = None
    if options.checkpoints.spill_to is not None:
        kept = await wait_until_saved(private.ask, options.job, launcher.ends_by, clock)
    told = describe_continuation(
        kept, spill_to=options.checkpoints.spill_to, grace_s=options.waits.grace_s, command=options.command_to_continue
    )
    return LauncherOutcome(outcome.exit_status, f"{outcome.sentence}: {told}")


class Launcher:
    """The launcher between its start and its end."""

    def __init__(
        self,
        options: LaunchOptions,
        clock: Clock,
        spec: JobSpec,
        agent_socket: str,
        processes: WorkerProcesses,
        events: asyncio.Queue[LauncherEvent],
        labels: dict[int, str],
        output: WorkerOutput,
        fleet: FleetAccess | None = None,
        earlier: EarlierRun | None = None,
    ) -> None:
        self._options = options
        self._earlier = earlier
        self._clock = clock
        self._spec = spec
        self._agent_socket = agent_socket
        self._processes = processes
        self._events = events
        self._labels = labels
        self._output = output
        self._fleet = fleet
        self._pool = WorkerPool(
            spec.nproc_per_node,
            standbys=options.processes.standbys,
            max_deaths=(options.max_script_restarts or 0) if options.torchrun_script else options.max_restarts,
            standby_delay_s=options.processes.standby_delay_s,
            max_script_restarts=options.max_script_restarts if options.max_nodes == 1 else None,
        )
        self._connection = LauncherConnection(agent_socket, options.job, self._make_joined, events.put_nowait)
        self._connection_task: asyncio.Task[None] | None = None
        self._incarnation = int(clock.wall() * 1000)
        self._global_ranks: dict[int, int] = {}
        self._generations_seen = 0
        self._joins = 0
        self._preloaded = False
        self._early_losses_left = MAX_EARLY_FORK_SERVER_DEATHS
        self._was_preloaded = False
        self._has_fork_server = True
        self._stopping: LauncherOutcome | None = None
        self._ending: LauncherOutcome | None = None  # set by the first signal
        self._ranks_were_cut = False  # after it, a rank did not end with status 0
        self.was_interrupted = False  # a signal ended the launcher before its ranks were through
        self.is_job_over = False  # the controller has ended the job
        self.is_paused = False  # and it may continue: its ranks returned because of a signal
        self.signalled_at: float | None = None  # wall seconds
        self.ends_by = 0.0  # monotonic seconds
        self._giving_up: str | None = None
        self._store_deaths: deque[float] = deque(maxlen=MAX_STORE_DEATHS)
        self._is_store_renewed = False  # the store host was killed to drop its keys
        self._starts_after_store: list[StartWorker] = []

    async def run(self) -> LauncherOutcome:
        """Work until the job, or this node's part in it, is over."""
        self._carry_out(self._pool.start())
        while True:
            outcome = self._handle(await self._events.get())
            if outcome is not None:
                return outcome

    def describe_restarts(self) -> str:
        """Return how often a script for torchrun has started again, in words."""
        count = max(0, self._generations_seen - 1)
        return f"it started again {format_count(count, 'time')}" if count else "it did not start again"

    async def leave(self, detail: str, *, at_once: bool = False) -> None:
        """Send SIGTERM to all workers and say goodbye; those left after the grace time, or ``at_once``, are killed."""
        if self._pool.living_workers() and self._has_fork_server and self._ending is None and not at_once:
            self._tell_leaving(detail)
            self._processes.signal(self._pool.living_workers(), signal.SIGTERM)
            try:
                async with asyncio.timeout(self._options.waits.grace_s):
                    while any(self._pool.living_workers().values()):  # one that was never forked sends no end
                        event = await self._events.get()
                        if isinstance(event, ForkServerLost):
                            break
                        if isinstance(event, Exited):
                            self._pool.remove_worker(event.serial)
            except TimeoutError:
                self._warn_of_kill()
        await self._connection.leave(detail)
        if self._connection_task is not None:
            self._connection_task.cancel()
            await asyncio.wait([self._connection_task])

    # --- ending by a signal -------------------------------------------------------------------------------------------

    def _begin_ending(self, number: signal.Signals) -> LauncherOutcome | None:
        """Pass the signal on to the ranks, and give them time to end; the controller saves the newest version."""
        grace_s = self._options.waits.grace_s
        self._ending = ended_by_signal(number)
        self.signalled_at, self.ends_by = self._clock.wall(), self._clock.monotonic() + grace_s
        self._tell_leaving(number.name)
        ranks = self._pool.active_workers()
        self._processes.signal(self._pool.living_workers().keys() - ranks.keys(), signal.SIGTERM)
        self._processes.signal(ranks, number)
        self._schedule(grace_s, GraceOver())
        log.info("%s: ranks have %g s to end (--grace-s); a second signal ends at once", number.name, grace_s)
        return self._ended_if_empty()

    def _tell_leaving(self, cause: str, *, ranks_ended: bool = False, is_notice: bool = False) -> None:
        if self.is_job_over:
            return
        message = LauncherLeaving(
            job=self._options.job,
            at=self._clock.wall(),
            launcher=self._incarnation,
            cause=cause[:4096],
            grace_s=self._options.waits.grace_s,
            ranks_ended=ranks_ended,
            is_notice=is_notice,
        )
        self._connection.report(message)

    def _handle_while_ending(self, event: LauncherEvent, outcome: LauncherOutcome) -> LauncherOutcome | None:
        """Handle an event after the first signal: nothing is replaced, and the last exit ends the work."""
        match event:
            case Forked():
                self._pool.handle_forked(event.serial, event.pid)
            case Exited():
                self._processes.close_control(event.serial)
                local_rank = self._pool.remove_worker(event.serial)
                self._ranks_were_cut = self._ranks_were_cut or (local_rank is not None and event.code != 0)
                return self._ended_if_empty()
            case StopJob():
                self.is_job_over, self.is_paused = True, event.keeps_checkpoints
                if not event.keeps_checkpoints:
                    self._stopping = LauncherOutcome(0 if event.ok else 1, event.reason)
            case GraceOver() | ForkServerLost():
                if isinstance(event, GraceOver):
                    self._warn_of_kill()
                self._ranks_were_cut = True
                return self._end_ranks(outcome)
        return None

    def _ended_if_empty(self) -> LauncherOutcome | None:
        assert self._ending is not None
        return None if self._pool.living_workers() else self._end_ranks(self._ending)

    def _end_ranks(self, outcome: LauncherOutcome) -> LauncherOutcome:
        """Kill what is left, and tell the controller that no rank runs here any more."""
        self._processes.signal(self._pool.living_workers(), signal.SIGKILL)
        self._tell_leaving(outcome.sentence, ranks_ended=True)
        self.was_interrupted = self._stopping is None or self._ranks_were_cut
        return self._stopping if self._stopping is not None and not self._ranks_were_cut else outcome

    def _warn_of_kill(self) -> None:
        left = len(self._pool.living_workers())
        log.warning("%d processes did not end within --grace-s %g; killing them", left, self._options.waits.grace_s)

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: LauncherEvent) -> LauncherOutcome | None:
        """Handle one event; a returned outcome ends the work."""
        if self._ending is not None:
            return self._handle_while_ending(event, self._ending)
        match event:
            case EndRequested():
                return self._begin_ending(event.number)
            case ForkServerReady():
                self._preloaded = self._was_preloaded = True
                self._early_losses_left = MAX_EARLY_FORK_SERVER_DEATHS
            case Forked():
                self._pool.handle_forked(event.serial, event.pid)
            case Exited():
                return self._handle_exit(event)
            case ForkServerLost():
                return self._handle_fork_server_loss()
            case WorkerReachedMain():
                outcome = self._carry_out(self._pool.handle_reached_main(event.serial))
                # Join once all ranks here could begin: a spare that is still importing would delay all nodes.
                if self._connection_task is None and self._pool.is_ready:
                    self._connection_task = asyncio.create_task(self._connection.run(), name="agent connection")
                return outcome
            case StandbyDue():
                return self._carry_out(self._pool.handle_standby_due()) if self._stopping is None else None
            case NewGeneration():
                return self._handle_generation(event)
            case KillRank():
                if event.job == self._options.job:
                    self._end_rank(event)
            case RankGraceOver():
                if event.serial in self._pool.living_workers():
                    log.warning("a rank did not end within --grace-s %g; killing it", self._options.waits.grace_s)
                    self._processes.signal([event.serial], signal.SIGKILL)
            case ScriptGraceOver():
                self._processes.signal(self._pool.workers_to_end_before(event.number), signal.SIGKILL)
            case StopJob():
                self.is_paused = event.keeps_checkpoints
                return self._stop(LauncherOutcome(0 if event.ok else 1, event.reason))
            case LauncherOutcome():
                return self._stopping or event
            case FirstNodeLost():  # nothing can regroup without the controller; ranks past the job's end may finish
                return LauncherOutcome(1, event.sentence) if not (self._stopping or self._pool.is_finished) else None
            case signal.Signals():
                self._tell_leaving(event.name, is_notice=True)
                self._processes.forward_signal(event, self._pool.living_workers())
            case JobEndOverdue():
                return self._handle_job_end_overdue(event)
        return None

    def _end_rank(self, order: KillRank) -> None:
        """Kill a rank, or let it end by itself first if nothing is wrong with it."""
        serial = self._pool.handle_kill_order(order.local_rank, order.generation, has_grace=order.has_grace)
        if serial is None:
            return
        if order.has_grace:
            grace_s = self._options.waits.grace_s
            log.info("local rank %d has %g s to end (--grace-s): %s", order.local_rank, grace_s, order.reason)
            self._processes.signal([serial], signal.SIGTERM)
            self._schedule(grace_s, RankGraceOver(serial))
        else:
            log.warning("killing local rank %d: %s", order.local_rank, order.reason)
            self._processes.signal([serial], signal.SIGKILL)

    def _handle_exit(self, event: Exited) -> LauncherOutcome | None:
        self._processes.close_control(event.serial)
        if event.serial == STORE_SERIAL:
            return self._handle_store_death(event)
        if self._stopping is not None:
            return self._handle_exit_after_stop(event, self._stopping)
        now = self._clock.monotonic()
        return self._carry_out(self._pool.handle_exit(event.serial, event.pid, event.code, event.signal, now))

    def _handle_store_death(self, event: Exited) -> LauncherOutcome | None:
        """Start another store host on the same listening socket; only a running rendezvous notices the lost keys."""
        if self._is_store_renewed:
            self._is_store_renewed = False
            self._processes.start_store_host()
            starts, self._starts_after_store = self._starts_after_store, []
            return self._carry_out([*starts])
        now = self._clock.monotonic()
        self._store_deaths.append(now)
        if len(self._store_deaths) == MAX_STORE_DEATHS and now - self._store_deaths[0] < STORE_WINDOW_S:
            return LauncherOutcome(1, f"the store host ended {MAX_STORE_DEATHS} times within {STORE_WINDOW_S:g} s")
        log.warning("the store host (pid %d) ended; starting it again at the same address", event.pid)
        self._processes.start_store_host()
        return None

    def _handle_exit_after_stop(self, event: Exited, outcome: LauncherOutcome) -> LauncherOutcome | None:
        """Handle an exit after the job ended: nothing is replaced, and the last exit ends the work."""
        local_rank = self._pool.remove_worker(event.serial)
        if local_rank in self._global_ranks and outcome.exit_status == 0 and event.code != 0:
            status = describe_exit(event.code, event.signal)
            outcome = LauncherOutcome(1, f"the training finished, but local rank {local_rank} then ended with {status}")
            self._stopping = outcome
        return None if self._pool.active_workers() else outcome

    def _handle_fork_server_loss(self) -> LauncherOutcome | None:
        """Start anew with another fork server after one died with all its children."""
        if not self._preloaded:
            # An error at the first start is the environment's, and does not pass; a kill for want of memory may.
            may_pass = self._was_preloaded or self._processes.was_fork_server_killed()
            if self._early_losses_left == 0 or not may_pass:
                self._has_fork_server = False
                return LauncherOutcome(1, "the fork server ended before it was ready; see its output above")
            self._early_losses_left -= 1
        if self._stopping is not None:
            return self._stopping
        log.error("the fork server died together with all ranks of this node; restarting")
        self._preloaded = False
        self._is_store_renewed = False  # the new store is empty; workers that waited for it were never forked
        self._starts_after_store.clear()
        self._processes.start()
        for serial, pid in self._pool.living_workers().items():
            if pid:
                outcome = self._handle_exit(Exited(serial=serial, pid=pid, code=None, signal=signal.SIGKILL))
            else:
                self._processes.close_control(serial)
                outcome = self._carry_out(self._pool.handle_never_forked(serial))
            if outcome is not None:
                return outcome
        return None

    # --- directives ---------------------------------------------------------------------------------------------------

    def _handle_generation(self, directive: NewGeneration) -> LauncherOutcome | None:
        spec = directive.spec
        if spec.job != self._options.job or spec.number < self._pool.generation or self._stopping is not None:
            return None
        self._global_ranks = {member.local_rank: member.rank for member in spec.members_on(self._connection.node)}
        self._output.note_ranks(self._connection.node, self._global_ranks)
        if self._fleet is not None and self._connection.welcome is not None:
            self._fleet.update(self._connection.welcome, spec)
        if spec.number > self._pool.generation:
            self._generations_seen += 1
            context = {"job": spec.job, "generation": spec.number, "trace": spec.trace, "node": self._connection.node}
            is_plain = spec.reason is GenerationReason.FORMED and self._options.max_nodes == 1
            level = logging.DEBUG if is_plain else logging.INFO
            log.log(level, "generation %d, %d ranks: %s", spec.number, spec.world_size, spec.sentence, extra=context)
        if self._giving_up is not None and not self._global_ranks:
            return LauncherOutcome(1, self._giving_up)
        local_ranks, now = frozenset(self._global_ranks), self._clock.monotonic()
        return self._carry_out(self._pool.handle_generation(spec.number, local_ranks, now))

    def _stop(self, outcome: LauncherOutcome) -> LauncherOutcome | None:
        """Handle the job's end. If it succeeded, ranks may finish what follows training in the script."""
        self.is_job_over = True
        if self._stopping is not None:
            return None
        self._stopping = outcome
        ranks = self._pool.active_workers()
        if not ranks:
            return outcome
        if outcome.exit_status != 0:
            self._schedule(ERROR_PRINT_WAIT_S, outcome)
        elif self._global_ranks:
            self._processes.signal(self._pool.living_workers().keys() - ranks.keys(), signal.SIGTERM)
            self._schedule(self._options.waits.exit_wait_s, outcome)
        else:  # workers of a spare node, which never got a rank
            return outcome
        return None

    def _await_job_end(self, ended: AwaitJobEnd, waits: int = 1) -> None:
        self._schedule(JOB_END_WAIT_S, JobEndOverdue(ended, self._joins, waits))

    def _handle_job_end_overdue(self, event: JobEndOverdue) -> LauncherOutcome | None:
        if self._stopping is not None:
            return None
        # An agent that connected meanwhile may not know yet.
        if self._connection.connected and event.joins == self._joins:
            ended, now = event.ended, self._clock.monotonic()
            return self._carry_out(self._pool.handle_early_exit(ended.local_rank, ended.pid, now))
        if event.waits >= MAX_JOB_END_WAITS and self._pool.is_finished:
            return LauncherOutcome(0, "every rank of this node finished; the agent never confirmed the end of the job")
        self._await_job_end(event.ended, event.waits + 1)
        return None

    def _make_joined(self) -> LauncherJoined:
        self._joins += 1
        return LauncherJoined(
            job=self._options.job,
            at=self._clock.wall(),
            spec=self._spec,
            launcher=self._incarnation,
            store=str(Endpoint(*self._processes.address)),
            generation=self._pool.generation,
            earlier=self._earlier,
        )

    # --- actions ------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[PoolAction]) -> LauncherOutcome | None:
        outcomes = [self._execute(action) for action in actions]
        for serial, local_rank in self._pool.active_workers().items():
            rank = self._global_ranks.get(local_rank)
            self._labels[serial] = f"local rank {local_rank}" if rank is None else f"rank {rank}"
        return next((outcome for outcome in outcomes if outcome is not None), None)

    def _execute(self, action: PoolAction) -> LauncherOutcome | None:
        several_nodes = self._options.max_nodes > 1
        match action:
            case StartWorker() if self._is_store_renewed:
                self._starts_after_store.append(action)
            case StartWorker():
                self._processes.start_worker(
                    action.serial,
                    action.local_rank,
                    nproc=self._spec.nproc_per_node,
                    agent_socket=self._agent_socket,
                    script_restarts=self._pool.script_restarts,
                )
            case PromoteWorker():
                self._processes.promote(action.serial, action.local_rank)
            case ScheduleStandby():
                self._schedule(action.delay_s, StandbyDue())
            case RankExited():
                self._connection.report(action)
                status = describe_exit(action.exit_code, action.signal)
                then = "; a replacement takes over" if action.has_replacement else ""
                log.warning("local rank %d (pid %d) ended with %s%s", action.local_rank, action.pid, status, then)
            case AwaitJobEnd():
                self._await_job_end(action)
            case GiveUp():
                self._giving_up = action.sentence
                log.error("%s; leaving the job", action.sentence)
                wait_s = EXCLUSION_TIMEOUT_S if several_nodes else ERROR_PRINT_WAIT_S
                self._schedule(wait_s, LauncherOutcome(1, action.sentence))
            case RestartScript():
                log.warning("%s", action.sentence)
                self._processes.signal(action.serials, signal.SIGTERM)
                self._renew_store()
                self._schedule(self._options.waits.grace_s, ScriptGraceOver(action.number))
            case ScriptEnded():
                hint = " (in a job of several nodes, a script that does not call everstep.main needs --torchrun-script)"
                is_hinted = several_nodes and action.exit_status
                return LauncherOutcome(action.exit_status, action.sentence + (hint if is_hinted else ""))
        return None

    def _renew_store(self) -> None:
        """Drop the store's keys with its host: env:// takes those of an earlier start of the script for its own."""
        self._is_store_renewed = True
        self._processes.signal([STORE_SERIAL], signal.SIGKILL)

    def _schedule(self, delay_s: float, event: LauncherEvent) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._events.put_nowait, event)
