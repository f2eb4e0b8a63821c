"""Run one rank under ``everstep-launch``: call its training function once in each generation."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from everstep.clock import Clock
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import ConnectionRole, Hello, Welcome
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec, Member, RankFinished, UserError
from everstep_trainer.base import injected_flip, interrupt
from everstep_trainer.base.interrupt import Interrupter, Regroup
from everstep_trainer.base.progress import StepProgress
from everstep_trainer.config import HookSettings
from everstep_trainer.launch.assignment import WorkerAssignment, enter_environment
from everstep_trainer.launch.forking.process_title import change_title
from everstep_trainer.launch.job_cache import ImportRecorder, cache_folder
from everstep_trainer.launch.output.marks import show_line
from everstep_trainer.memory_tier.tier import MemoryTier
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run, call_generation_hooks
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.agent_connection import AgentConnection
from everstep_trainer.runtime.directives import DirectiveListener, GenerationMembership, ReceivedDirectives
from everstep_trainer.runtime.process_group import GenerationGroup, Rendezvous
from everstep_trainer.runtime.regroup_record import RecoveryTally
from everstep_trainer.session.generation_session import GenerationSession, PhaseTimeline
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.live_rescue import RESCUE_WAIT_S
from everstep_trainer.state.tensors import list_names
from everstep_trainer.worker.cached_groups import cached_groups, script_modules
from everstep_trainer.worker.error_attribution import (
    UnattributedFailures,
    clear_frames,
    describe_error,
    explain_missing_step,
    full_traceback,
    is_communication_error,
)
from everstep_trainer.worker.shown_errors import claim_error, launcher_shares_stderr, show

# ---- restore the main thread's torch state after an interrupt
#
# An exception between two byte codes can hit the exit of a context manager just before it restores what it changed.
# Gradients then stay off, or a checkpointed block's hooks stay installed, also in the next generation.


def reset_thread_state() -> None:
    """Reset grad mode, autocast, saved-tensor hooks and the determinism of a checkpoint's recomputation."""
    torch.set_grad_enabled(True)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    torch.clear_autocast_cache()
    autograd = torch._C._autograd
    top = getattr(autograd, "_top_saved_tensors_default_hooks", None)  # private: absent, hooks are kept
    while top is not None and top(True) is not None:
        autograd._pop_saved_tensors_default_hooks()


logger = logging.getLogger(__name__)

TrainingFunction = Callable[[Run], None]
_ReportKind = type[RankFinished | CollectiveFailed | UserError]
MAX_SHOWN_NAMES = 3
REPLACEMENT_WAIT_S = 0.5  # until a process that replaces another learns of its generation; a spare may wait for hours


def _is_return(failure: BaseException) -> bool:
    """Return whether the training function ended by ``sys.exit()`` with status 0."""
    return isinstance(failure, SystemExit) and failure.code in (None, 0)


def _end_child(failure: BaseException | None) -> None:
    """End a child that training code forked and let leave the training function: it must not speak for its parent."""
    if failure is not None and not _is_return(failure):
        show(full_traceback(failure))
    os._exit(0 if failure is None or _is_return(failure) else 1)


class Worker:
    """The process of one rank, for the main thread. A standby makes it before it waits for its local rank."""

    # set when ``run`` begins
    _local_rank: int
    _connection: AgentConnection
    _welcome: Welcome  # the agent's answer
    _timeline: PhaseTimeline
    _imports: ImportRecorder | None

    def __init__(self, assignment: WorkerAssignment, settings: HookSettings, clock: Clock) -> None:
        self._assignment = assignment
        self._job = assignment.job
        self._start_from = assignment.start_from
        self._settings, self._clock = settings, clock
        self._pid = os.getpid()
        self._directives = ReceivedDirectives()
        self._progress = StepProgress(settings.step_window)
        self._tally, self._equal_moments = RecoveryTally(), set[str]()
        self._interrupter = Interrupter()
        injected_flip.accept_requests()
        backend = make_backend(settings.backend)
        backend.prepare()
        self._rendezvous = Rendezvous(backend, settings)
        cut_store, end_process = self._rendezvous.cut_store, self._ask_for_replacement
        self._membership = GenerationMembership(
            self._directives, self._progress, self._interrupter, backend.abort, cut_store, end_process, settings
        )
        interrupt.set_wait_callbacks(lambda: self._membership.must_leave, self._handle_wait_error)
        self._listener = DirectiveListener(
            self._directives, self._membership, self._progress, lambda m: self._connection.send(m), settings, clock
        )
        self._vault: VaultClient | None = None
        self._unattributed = UnattributedFailures(settings.max_unattributed_failures)
        self._generations_entered = 0
        self._script_modules: list[ModuleType] = []

    def run(self, train: TrainingFunction, local_rank: int | None = None) -> None:
        """Take part in generation after generation until the job is stopped; return if it ended well.

        ``sys.exit()`` in the training function counts as a return; with another status it is an error.

        Args:
            train: The training function.
            local_rank: That of a standby, which its assignment lacks.

        Raises:
            SystemExit: With status 1, the job was stopped because of an error.
            Unavailable: No agent answers at the start.
            KeyboardInterrupt: The training function's.
        """
        self._connect_agent(self._assignment.local_rank if local_rank is None else local_rank)
        gc.freeze()  # imports are not garbage: a collection between generations then costs microseconds
        detail = "failed"
        try:
            self._run_generations(train)
            detail = "finished"
        finally:
            self._rendezvous.close()
            if self._vault is not None:
                self._vault.close()
            self._connection.close(detail)

    def _connect_agent(self, local_rank: int | None) -> None:
        assert local_rank is not None
        self._local_rank = local_rank
        self._timeline = PhaseTimeline(self._assignment.started_at)
        if self._assignment.started_at is not None:
            self._timeline.end("start")
        folder = cache_folder(os.environ)
        self._imports = None if folder is None else ImportRecorder(folder, local_rank)
        role = ConnectionRole.RANK
        hello = Hello(protocols=SUPPORTED_VERSIONS, role=role, job=self._job, pid=self._pid, local_rank=local_rank)
        path, settings = self._assignment.agent_socket, self._settings
        self._connection = AgentConnection(path, hello, self._listener, settings, self._clock, random.random)
        self._welcome = self._connection.start(settings.agent_connect_timeout_s)

    def _connect_vault(self) -> VaultClient:
        """Return the connection to the vault, made when something is first tracked and kept for the process's life."""
        if self._vault is None:
            self._vault = VaultClient(self._welcome.vault_socket, clock=self._clock)
        return self._vault

    def _run_generations(self, train: TrainingFunction) -> None:
        number, parked = 0, True
        while True:
            order = self._next_directive(number, parked)
            if isinstance(order, StopJob):
                if order.ok:
                    return
                if not launcher_shares_stderr():
                    show_line(f"job {order.job} was stopped: {order.reason}")
                raise SystemExit(1)
            number = order.number
            member = order.member_at(self._welcome.node, self._local_rank)
            parked = member is None
            if member is None:
                change_title("standby")
                message = "generation %d continues without this process, which stays on standby"
                logger.info(message, number, extra=self._extra(order))
            else:
                self._timeline.end("wait")
                change_title(f"rank {member.rank}")
                self._take_part(order, member, train)

    def _next_directive(self, number: int, is_parked: bool) -> GenerationSpec | StopJob:
        """Wait for the directive after generation ``number``, with which a parked process's timeline begins."""
        order = self._directives.wait_next(number, REPLACEMENT_WAIT_S if "start" in self._timeline.phases_s else 0.0)
        if order is None:
            order = self._directives.wait_next(number)
            if is_parked:
                self._timeline = PhaseTimeline()
        assert order is not None
        return order

    def _take_part(self, spec: GenerationSpec, member: Member, train: TrainingFunction) -> None:
        """Take part in one generation, from its rendezvous until it is left."""
        self._listener.enter(spec, member)
        try:
            if self._join(spec, member):
                failure = self._enter(spec, member, train)
                if failure is None or _is_return(failure):
                    clear_frames(failure)
                    self._finished(spec, member)
                else:
                    self._failed(spec, member, failure)
        finally:
            self._membership.leave()
            self._connection.send_persistent(None)
            self._listener.leave()

    def _join(self, spec: GenerationSpec, member: Member) -> bool:
        """Join the generation; return False if its group did not form, once the next directive is known."""
        self._membership.join(spec.number)
        try:
            self._rendezvous.join(spec, member, self._membership.must_end)
        except Regroup:
            self._membership.leave()
            self._rendezvous.release()
            return False
        except RuntimeError as error:
            self._membership.leave()
            self._rendezvous.release()
            self._report(CollectiveFailed, spec, member, detail=describe_error(error))
            self._await_directive(spec, member, describe_error(error))
            return False
        finally:
            self._timeline.end("rendezvous")
        enter_environment(spec, member)
        reset_thread_state()
        return True

    def _enter(self, spec: GenerationSpec, member: Member, train: TrainingFunction) -> BaseException | None:
        """Run the training function once; return what it raised, and keep nothing else of it."""
        group = self._rendezvous.group
        assert group is not None
        uses_gpu = group.device.type == "cuda"
        self._progress.enter(spec.number, group.count_collectives, world_size=spec.world_size, uses_gpu=uses_gpu)
        session = GenerationSession(
            group,
            directives=self._directives,
            progress=self._progress,
            interrupter=self._interrupter,
            connect_vault=self._connect_vault,
            send=self._connection.send,
            timeline=self._timeline,
            clock=self._clock,
            start_from=self._start_from,
            on_first_step=self._note_imports,
            tally=self._tally,
            equal_moments=self._equal_moments,
        )
        self._listener.on_versions = session.handle_versions
        self._membership.enter()
        run = Run(self._make_rank_context(group), session)
        call_generation_hooks()
        self._generations_entered += 1
        if self._generations_entered == 2:
            self._warn_of_cached_groups(spec)
        failure = self._interrupter.run(partial(train, run))
        if os.getpid() != self._pid:
            _end_child(failure)
        self._membership.leave()
        run.close()
        self._timeline = PhaseTimeline(self._membership.take_regroup_start())
        self._timeline.end("abort")
        if failure is not None and not self._directives.is_superseded(spec.number) and is_communication_error(failure):
            # Before the group is left: waiting peers then receive the verdict instead of a lost peer.
            if self._unattributed.count_failure(self._progress.finished_step, spec.reason):
                self._report_user_error(spec, member, describe_error(failure), full_traceback(failure))
            else:
                self._report(CollectiveFailed, spec, member, detail=describe_error(failure))
        self._listener.on_versions = None
        session.close(self._rescue_wait_s(spec, failure))
        return failure

    def _rescue_wait_s(self, spec: GenerationSpec, failure: BaseException | None) -> float | None:
        """Return for how long to wait for others' shares of the last step; None if no generation follows. A lost peer
        can show as any error, so even the script's own may be a loss."""
        order = self._directives.wait_next(spec.number, 0.0)
        if failure is None or _is_return(failure) or isinstance(order, StopJob):
            return None
        is_loss = order is not None or is_communication_error(failure)
        return RESCUE_WAIT_S if is_loss else self._settings.error_attribution_grace_s

    def _note_imports(self) -> None:
        """Note what the script has imported, after a first step: for standbys, and for the first regroup."""
        if self._imports is not None:
            self._imports.record()
        if not self._script_modules:
            self._script_modules = list(script_modules())

    def _warn_of_cached_groups(self, spec: GenerationSpec) -> None:
        """Name what the script still holds of the groups of its first generation, once on this node."""
        if not (names := cached_groups(self._script_modules)):
            return
        warning = (
            f"{list_names(names, MAX_SHOWN_NAMES)} holds a process group of an earlier generation, which has ended. "
            "Make groups and meshes inside the training function, which is called again in each generation"
        )
        if claim_error(warning, f"{spec.secret}/{spec.number}"):
            logger.warning("%s", warning, extra=self._extra(spec))

    def _handle_wait_error(self, error: BaseException) -> None:
        if isinstance(error, Regroup) or is_communication_error(error):
            self._interrupter.record_interruption(error)

    def _make_rank_context(self, group: GenerationGroup) -> RankContext:
        spec, member = group.spec, group.member
        return RankContext(
            rank=member.rank,
            world_size=spec.world_size,
            local_rank=member.local_rank,
            local_world_size=spec.spec.nproc_per_node,
            generation=spec.number,
            device=group.device,
            will_restore=spec.restore.floor is not None,
            is_elastic=spec.spec.min_nodes < spec.spec.max_nodes,
            job=spec.job,
            mesh=lambda: group.mesh,
            tier=lambda: MemoryTier(self._connect_vault(), spec, member, group.store),
        )

    def _finished(self, spec: GenerationSpec, member: Member) -> None:
        """Report the return. The group stays until all ranks are done: peers may still read what this rank sent."""
        begun, count = self._progress.begun_step, self._progress.collective_count
        loss = self._progress.loss.wait()
        self._report(RankFinished, spec, member, started_step=begun, collectives=count, loss=loss)
        order = self._directives.wait_next(spec.number)
        self._timeline = PhaseTimeline()
        if not isinstance(order, StopJob):
            self._leave_group(must_abort=True)
        self._timeline.end("teardown")

    def _failed(self, spec: GenerationSpec, member: Member, failure: BaseException) -> None:
        """Handle an exception: caused by a peer, by a newer generation, or by the training function itself."""
        if isinstance(failure, KeyboardInterrupt):
            raise failure
        at_boundary = isinstance(failure, Regroup) and not self._directives.is_generation_over(spec.number, -1)
        communication, text = is_communication_error(failure), describe_error(failure)
        is_own = not communication and not isinstance(failure, Regroup)
        trace = full_traceback(failure) if is_own else ""  # reads source files, while other ranks wait
        if self._progress.had_no_step_left:
            text += explain_missing_step(failure)
        clear_frames(failure)
        self._leave_group(must_abort=not at_boundary)
        self._timeline.end("teardown")
        if isinstance(failure, Regroup):
            return
        if communication:
            self._await_directive(spec, member, text)
        elif self._directives.wait_next(spec.number, self._settings.error_attribution_grace_s) is None:
            self._report_user_error(spec, member, text, trace)

    def _leave_group(self, *, must_abort: bool) -> None:
        """Destroy the groups, including those that objects of the training function held."""
        self._progress.leave()
        self._rendezvous.leave(must_abort=must_abort)
        gc.collect()
        self._rendezvous.release()

    def _await_directive(self, spec: GenerationSpec, member: Member, detail: str) -> None:
        """Wait for the controller's decision after a failed collective; a new controller needs the report again."""
        began = self._clock.monotonic()
        while self._directives.wait_next(spec.number, self._settings.regroup_wait_s) is None:
            waited_s = self._clock.monotonic() - began
            message = "a collective failed %.0f s ago (%s); still waiting for the controller's decision"
            logger.warning(message, waited_s, detail, extra=self._extra(spec))
            self._report(CollectiveFailed, spec, member, detail=detail)

    def _report_user_error(self, spec: GenerationSpec, member: Member, error: str, trace: str) -> None:
        """Report the training function's own error and wait for the decision about the job, or raise SystemExit."""
        if claim_error(error, f"{spec.secret}/{spec.number}"):
            show(trace)
        self._report(UserError, spec, member, error=error, traceback=trace, started_step=self._progress.begun_step)
        if self._directives.wait_next(spec.number, self._settings.job_decision_timeout_s) is None:
            logger.error("no decision about the job arrived: exiting", extra=self._extra(spec))
            raise SystemExit(1)

    def _ask_for_replacement(self) -> None:
        """End the process from the connection's thread, because the main thread cannot be reached."""
        logger.error("the main thread did not leave within %.1f s: this process ends", self._settings.leave_timeout_s)
        with contextlib.suppress(Exception):  # stderr may be gone
            faulthandler.dump_traceback()
        os._exit(os.EX_TEMPFAIL)

    def _report(self, kind: _ReportKind, spec: GenerationSpec, member: Member, **fields: Any) -> None:
        """Send a report, again after every reconnect. It carries no trace: a new fault begins a new one."""
        fields |= {"job": self._job, "at": self._clock.wall(), "generation": spec.number, "rank": member.rank}
        self._connection.send_persistent(kind(step=self._progress.finished_step, **fields))

    def _extra(self, spec: GenerationSpec) -> dict[str, Any]:
        return {"node": self._welcome.node, "job": self._job, "generation": spec.number, "trace": spec.trace}
