"""Deliberate mistakes. Each breaks a promise; a checker must see it within the default seeds.

``seeds`` are worlds in which it was seen before: they are tried first, so that the suite stays quick. They are hints:
where a change of the code makes a world go another way, the others are played as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
from everstep_agent.uplink.session import ControllerSession, UplinkState
from everstep_controller.core import startup
from everstep_controller.core import transition as transitions
from everstep_controller.core.checkpoints import commits, parity, storage
from everstep_controller.core.health import (
    case_outcomes,
    eviction,
    findings,
    maintenance,
    node_state,
    outbreaks,
    quarantine,
)
from everstep_controller.core.jobs import generations, lifecycle, losses, membership, stragglers
from everstep_controller.core.liveness import node_liveness, registration
from everstep_controller.core.records import DiagnosticsStatus
from everstep_controller.leadership import lease
from everstep_controller.remediation.executor import RemediationExecutor
from everstep_controller.runtime.agent_requests import AgentRequests
from everstep_controller.runtime.push import Outbox
from everstep_controller.runtime.transaction import Transaction
from everstep_controller.server import session
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.restore import version_choice
from everstep_trainer.runtime.directives import ReceivedDirectives

from everstep.wire.v1.agent import FrameKind, Register
from tests.sim import training_state
from tests.sim.mutants.mutant import Mutant, nothing
from tests.sim.mutants.of_audits import OF_AUDITS
from tests.sim.mutants.of_passages import OF_PASSAGES
from tests.sim.mutants.of_places import OF_PLACES
from tests.sim.mutants.of_windows import OF_WINDOWS
from tests.sim.mutants.surgery import method_mistaken, method_swapped, mistaken, swapped


def _no(*_: Any, **__: Any) -> bool:
    return False


def _no_words(*_: Any, **__: Any) -> str:
    return ""


def _one_of_a_tie(digests: Any, _spec: Any) -> commits.DigestVote:
    vote = commits.compare_digests(digests)
    return commits.DigestVote(divergent_ranks=vote.divergent_ranks or frozenset(sorted(vote.tied_ranks)[:1]))


# --- mistakes that take more than a line ---------------------------------------------------------------------------


def _one_eviction_more(real: Any) -> AbstractContextManager[None]:
    """``real``: the budget of the fleet, of a rack or of a job."""

    def scope(*arguments: Any) -> Any:
        found = real(*arguments)
        return msgspec.structs.replace(found, limit=found.limit + 1)

    return swapped(real, scope)


def _stale_seals() -> AbstractContextManager[None]:
    """Seals of a generation that is over count for its version."""
    real = case_outcomes.handle_sealed

    def arrived(transition: Any, job: Any, node: str, report: Any) -> None:
        spec = job.running_generation
        if spec is not None and report.generation < spec.number and report.rank < spec.world_size:
            commits.record_seal(transition, job, spec, report)
        else:
            real(transition, job, node, report)

    return swapped(real, arrived)


@contextmanager
def _earlier_lives() -> Iterator[None]:
    """A session that another one replaced goes on, and what it says is taken, of whatever life it is."""
    with (
        swapped(registration.check_incarnation, nothing),
        method_swapped(AgentRequests, "check_incarnation", nothing),
        method_swapped(session.AgentSession, "dismiss", nothing),
    ):
        yield


def _numbers_from_before() -> AbstractContextManager[None]:
    """What a job's record says of its newest generation is one too low after every restart."""
    real = startup.restore_state

    def restore(*arguments: Any, **more: Any) -> Any:
        state = real(*arguments, **more)
        for job in state.jobs.values():
            job.progress.last_number = max(0, job.progress.last_number - 1)
        return state

    return swapped(real, restore)


def _orders_forgotten() -> AbstractContextManager[None]:
    """A new controller does not know who keeps nodes out of service."""
    real = startup.restore_state

    def restore(*arguments: Any, **more: Any) -> Any:
        state = real(*arguments, **more)
        for node in state.nodes.values():
            node.scheduling.hold_reason = node.scheduling.external_cordon_by = ""
        return state

    return swapped(real, restore)


@contextmanager
def _overlapping_shares() -> Iterator[None]:
    """Neighbouring ranks share samples. What is remembered of the real sampler is forgotten before and after."""
    mistake = method_mistaken(
        ElasticSampler, "batch_range", "(self._rank + 1) * batch // world", "(self._rank + 1) * batch"
    )
    _forget_samples()
    try:
        with mistake:
            yield
    finally:
        _forget_samples()


def _forget_samples() -> None:
    training_state.share_of.cache_clear()
    training_state.seen_by_all.cache_clear()


def _told_before_written() -> AbstractContextManager[None]:
    """Directives reach sessions as they are decided."""
    real = Transaction._send

    def send(self: Transaction, node: str, body: Any) -> None:
        real(self, node, body)
        self.outbox.deliver([self.outgoing[-1]])

    return method_swapped(Transaction, "_send", send)


def _waiting_directives_lost() -> AbstractContextManager[None]:
    """Whoever connects anew is not told what waited for it."""
    real = Outbox.attach

    def attach(self: Outbox, node: str, receiver: Any) -> tuple[Any, ...]:
        for one in real(self, node, receiver):
            self.acknowledge(node, one.seq)
        return ()

    return method_swapped(Outbox, "attach", attach)


def _sent_is_taken() -> AbstractContextManager[None]:
    """An agent lets go of what it has sent once it is on another connection, answered or not."""
    begin = ControllerSession.__init__

    def begins(self: ControllerSession, words: UplinkState, *others: Any, **more: Any) -> None:
        words.spool.acknowledge(words.spool.sent_through)
        begin(self, words, *others, **more)

    return method_swapped(ControllerSession, "__init__", begins)


def _never_asks() -> AbstractContextManager[None]:
    """After its first beat an agent never wants an answer, so that it stays with a controller that has died unheard."""

    def choose_beat_kind(self: ControllerSession, message: Any, now: float) -> FrameKind:
        if isinstance(message, Register):
            return FrameKind.REGISTER
        return FrameKind.HEARTBEAT if self._answer_due_at == -math.inf else FrameKind.ONE_WAY_HEARTBEAT

    return method_swapped(ControllerSession, "_choose_heartbeat_kind", choose_beat_kind)


def _rule_without_floor() -> AbstractContextManager[None]:
    real = commits.restore_rule

    def rule(transition: Any, job: Any) -> Any:
        return msgspec.structs.replace(real(transition, job), floor=None)

    return swapped(real, rule)


def _suspects_taken_in() -> AbstractContextManager[None]:
    """Nodes that are doubted are chosen for new rosters."""
    return mistaken(
        membership.unfit_reason,
        "(running and record.state is NodeState.SUSPECT)",
        "record.state is NodeState.SUSPECT",
    )


@contextmanager
def _parity_unmade() -> Iterator[None]:
    """A refusal is taken for an answer, and what homes say they made is not compared."""
    with (
        mistaken(parity.handle_version_protected, "elif report.code:", "elif False:"),
        mistaken(parity._check_parity, "if p is None or p != q:", "if False:"),
    ):
        yield


@contextmanager
def _orders_given_once() -> Iterator[None]:
    """Whoever does not answer an order of a spill or of parity is not asked again."""
    with swapped(storage.check_spill, nothing), swapped(parity.check_protection, nothing):
        yield


def _against_its_own_past() -> AbstractContextManager[None]:
    """A rank is slow when it takes longer than in the window before, whatever the others take."""
    real, before = transitions.find_stragglers, dict[tuple[str, int], float]()

    def laggards_of(job: str, pace: Any, factor: float) -> Any:
        busy = {rank: one.busy_s for rank, one in pace.by_rank.items() if one.busy_s}
        slow = {rank: own for rank, own in busy.items() if own > factor * before.get((job, rank), own)}
        before.update({(job, rank): own for rank, own in busy.items()})
        return msgspec.structs.replace(real(job, pace, factor), slow=slow)

    return swapped(real, laggards_of)


def _healthy_at_once() -> AbstractContextManager[None]:
    """Probation without any diagnostic."""
    real = quarantine.run_next_diagnostic

    def next_check(transition: Any, node: str) -> None:
        transition.state.nodes[node].quarantine.diagnostics = DiagnosticsStatus.PASSED

    return swapped(real, next_check)


MUTANTS: tuple[Mutant, ...] = (
    # budget and evictions
    Mutant("the fleet's budget allows one eviction more", lambda: _one_eviction_more(eviction.fleet_scope), seeds=(9,)),
    Mutant("a rack's budget allows one eviction more", lambda: _one_eviction_more(eviction.rack_scope), seeds=(78,)),
    Mutant("a job's budget allows one eviction more", lambda: _one_eviction_more(eviction.job_scope), seeds=(142,)),
    Mutant(
        "evictions go on while the database is away",
        lambda: mistaken(eviction.find_deferral, "if state.database_outage:", "if False:"),
        seeds=(93,),
    ),
    Mutant(
        "the breaker does not latch",
        lambda: mistaken(eviction.find_deferral, "if state.fleet.breaker_reason:", "if False:"),
        seeds=(60,),
    ),
    Mutant("an eviction may take a job below its minimum", lambda: swapped(eviction._shortage, _no_words), seeds=(93,)),
    Mutant(
        "a tie of digests names a liar",
        lambda: swapped(commits.compare_digests_by_node, _one_of_a_tie),
        seeds=(15, 34),
    ),
    # whose fault it is
    Mutant("nobody is acquitted", lambda: swapped(eviction._roll_back, nothing), seeds=(2,)),
    Mutant("no outbreak is recognised", lambda: swapped(outbreaks.common_cause, _no_words), seeds=(2,)),
    Mutant(
        "the breaker latches for what others show",
        lambda: swapped(outbreaks.shared_by_other, _no_words),
        seeds=(11, 58),
    ),
    Mutant(
        "who accuses a pair is convicted without a second pass",
        lambda: mistaken(
            findings.judge_by_rule, "rule.blame_isolation is BlameIsolationMethod.PAIR and not proof", "False"
        ),
        seeds=(2,),
    ),
    Mutant(
        "both of a failed pair are convicted",
        lambda: mistaken(
            case_outcomes._settle_pair,
            "if node in case.failed and is_serving(transition, node):\n            "
            'proof = f"{case.summary}; it also failed with a known-good partner: {case.failed[node]}"',
            "if case.failed and is_serving(transition, node):\n            proof = case.summary",
        ),
        seeds=(6,),
    ),
    # the way back
    Mutant("nodes come back without a probe", _healthy_at_once),
    Mutant("quarantine never ends", lambda: swapped(quarantine.check_quarantine, nothing)),
    Mutant(
        "what was told while a node was held is forgotten",
        lambda: swapped(quarantine._has_blocking_finding, _no),
        seeds=(124,),
    ),
    Mutant("probation never ends", lambda: swapped(quarantine.check_probation, nothing)),
    # who is slow
    Mutant(
        "a node is named as slow a window too soon",
        lambda: mistaken(stragglers.check_stragglers, ">= policy.straggler_count:", ">= policy.straggler_count - 1:"),
        seeds=(128,),
    ),
    Mutant("a rank is compared with its own past", _against_its_own_past, seeds=(8,)),
    Mutant(
        "whoever is slow beside many others is named",
        lambda: mistaken(stragglers.slow_nodes, "if len(slow) <= max(1.0, share * len(spec.seats)) else {}", ""),
        seeds=(40,),
    ),
    Mutant(
        "slow windows are never forgotten",
        lambda: mistaken(stragglers.check_stragglers, "[w for w in seen if w > oldest]", "list(seen)"),
        seeds=(55,),
    ),
    # what is done to machines
    Mutant(
        "a foreign cordon is ignored",
        lambda: mistaken(node_state.out_of_service_reason, "if record.scheduling.external_cordon_by:", "if False:"),
        (1,),
    ),
    Mutant(
        "a hold of who is out already is ignored",
        lambda: mistaken(
            maintenance.hold_node,
            "record.scheduling.hold_reason = sentence",
            "record.scheduling.hold_reason = sentence if record.state not in QUARANTINE_STATES else ''",
        ),
        seeds=(89,),
    ),
    Mutant(
        "a maintenance window is ignored",
        lambda: mistaken(
            node_state.out_of_service_reason, "if now < record.scheduling.maintenance_until:", "if False:"
        ),
        seeds=(29,),
    ),
    Mutant(
        "a remedy is asked for again after a crash, without a look",
        lambda: method_mistaken(RemediationExecutor, "_carry_out", "check_first=was_started", "check_first=False"),
        seeds=(0,),
    ),
    Mutant(
        "a remedy is asked for before it is written that it begins",
        lambda: method_mistaken(RemediationExecutor, "_carry_out", "await self._write(row)", "pass"),
        seeds=(28,),
    ),
    Mutant(
        "a node is reset as often as it takes",
        lambda: swapped(node_state.node_remediation_cap, _no_words),
        seeds=(114,),
    ),
    Mutant(
        "the whole fleet may be rebooted at once",
        lambda: swapped(node_state.fleet_remediation_cap, lambda transition: ("", 0.0)),
        seeds=(64,),
    ),
    Mutant("what was cordoned stays cordoned", lambda: swapped(node_state.uncordon, nothing), seeds=(1,)),
    # generations and membership
    Mutant("a new controller forgets who keeps a node out", _orders_forgotten, seeds=(57, 4)),
    Mutant("numbers are used again after a restart", _numbers_from_before, seeds=(50,)),
    Mutant(
        "ranks ignore that their generation is over",
        lambda: method_swapped(ReceivedDirectives, "is_generation_over", _no),
        seeds=(4,),
    ),
    Mutant("rosters take suspects in", _suspects_taken_in, seeds=(2,)),
    Mutant("a witness is ignored", lambda: swapped(losses.regroup_without_missing, _no), seeds=(23, 112)),
    Mutant("jobs never grow back", lambda: swapped(generations.consider_growth, nothing)),
    Mutant(
        "a return is not heard",
        lambda: mistaken(node_liveness.mark_seen, "_handle_return(transition, node)", "pass"),
        seeds=(3,),
    ),
    # checkpoints
    Mutant("seals of an older generation count", _stale_seals, seeds=(7,)),
    Mutant(
        "a version is committed before every rank keeps it",
        lambda: mistaken(commits._settle_version, "ballot.safe_ranks == ballot.sealed_ranks and", ""),
        seeds=(3,),
    ),
    Mutant(
        "a seal that is not safe counts",
        lambda: mistaken(commits.record_seal, "report.durable and report.commit_candidate", "report.commit_candidate"),
        seeds=(17,),
    ),
    Mutant("the floor of a restore is forgotten", _rule_without_floor, seeds=(20,)),
    Mutant(
        "after corruption anything may be restored",
        lambda: mistaken(commits.roll_back_to_clean, "job.commits.restore_ceiling = clean or NO_VERSION", "pass"),
        seeds=(109,),
    ),
    Mutant(
        "a version above the ceiling is admitted",
        lambda: mistaken(version_choice.is_admitted, "rule.ceiling is None or version <= rule.ceiling", "True"),
        seeds=(22,),
    ),
    # what was acknowledged
    Mutant(
        "reports are acknowledged before they are written",
        lambda: method_swapped(Transaction, "acknowledge_reports", nothing),
    ),
    Mutant("what comes late on a connection that was replaced counts", _earlier_lives, seeds=(32,)),
    Mutant(
        "a report that comes again is taken again",
        lambda: method_mistaken(AgentRequests, "_take_reports", "report.number > through", "True"),
    ),
    Mutant("directives are told before they are written", _told_before_written),
    Mutant("directives that waited are lost", _waiting_directives_lost, seeds=(93,)),
    Mutant("what an earlier session sent counts as taken", _sent_is_taken, seeds=(1,)),
    Mutant("an agent never asks for an answer", _never_asks, seeds=(42,)),
    # what is kept besides
    Mutant("parity that a home could not make counts", _parity_unmade, seeds=(62,)),
    Mutant(
        "a checkpoint counts as stored when one vault has written its part",
        lambda: mistaken(storage._written, "if report.complete:", "if True:"),
        seeds=(1,),
    ),
    Mutant("what is kept besides is not pinned", lambda: swapped(parity.pinned_versions, lambda job: ()), seeds=(102,)),
    Mutant("orders to vaults are given once", _orders_given_once, seeds=(16,)),
    # samples
    Mutant("ranks share samples", _overlapping_shares),
    # after a takeover
    Mutant("a new controller forgets its deadlines", lambda: swapped(startup.handle_controller_started, nothing)),
    Mutant("a leader that no node reaches stays", lambda: swapped(lease.is_cut_off, _no), seeds=(4, 34)),
    Mutant("a resumed generation is not noticed", lambda: swapped(lifecycle.handle_resumed, nothing)),
    *OF_AUDITS,
    *OF_WINDOWS,
    *OF_PLACES,
    *OF_PASSAGES,
)
