"""Train on one rank, with or without a fault and a chain of audits, and go back to the beginning for the next fault."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bench.sdc.injection import DETECTORS, MEMORY, Fault, Injection, Site
from bench.sdc.judging import Outcome, Statement, judge_all, node_of
from bench.sdc.models import Config, batch_of, build
from bench.sdc.overhead import Timing, time_presets
from bench.sdc.peers import PeerSignals, StepSignals
from bench.sdc.sites import GRAPH_SITES, SITES, FaultySite, local
from everstep.vocabulary import AuditKind
from everstep.wire.v1.training import SdcPreset
from everstep_trainer.data.rng import seed_step
from everstep_trainer.digests.digest import WeightedDigest
from everstep_trainer.parallel.lane import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.build import build_chain
from everstep_trainer.sdc.chain import ROTATIONS_UNTIL_CLEAN, AuditChain
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.presets import AuditOptions, audit_options
from everstep_trainer.sdc.state_digests import StateAudit
from everstep_trainer.sdc.updates import UpdateAudit

DETECTABLE_STEPS = 24
"""Steps in which an audit may still find an activation whose step is over: gradient norms are exchanged within 16."""
REPLICA_STEPS = 50
"""Steps from one comparison of replicas to the next, as Everstep's default."""
ONSET = 3
"""The step of a run in which its fault is first active."""
REFERENCE_STEPS = 64
"""Steps of the undisturbed run that tell whether a fault has changed a parameter. Its first activation is in the first
of them."""
SETTLED = 3
"""Steps after which a transient fault that changed no parameter will change none."""
WARM_AUDITS = 48
"""Audits of each kind before a fault: the audit then knows what is usual."""
FLUSH_STEPS = 3
STEPS_OF_TURN = 8
"""Steps that are timed without the chain, and then with it, in turns."""
DATA_SEED = 1

Intervals = Mapping[str, int]
"""Steps between two audits by their kind; a kind that is not named is off."""


@dataclass
class Result:
    """The observations of one rank in one run."""

    statements: list[Mismatch] = field(default_factory=list)
    replica_digests: list[int] = field(default_factory=list)
    """The digests of all ranks, where they had to be equal and were not."""
    steps: int = 0
    """The last step."""
    changed_step: int = 0
    """The first step after which parameters of any rank differed from the undisturbed run's; 0: none."""
    differing_steps: list[int] = field(default_factory=list)
    """Steps after which the parameters of replicas differed."""
    elements: int = 0
    """Elements that pass the fault's site in a step."""
    activations: int = 0
    signals: list[StepSignals] = field(default_factory=list)


class Training:
    """One configuration on one rank. All methods are collectives."""

    def __init__(self, config: Config, rank: int, world: int, warm_steps: int) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.model, self.inner, self.optimizer = build(config, world)
        self._digest = WeightedDigest([local(parameter) for parameter in self.inner.parameters()])
        self._elements: dict[Site, int] = {}
        self._reference: list[list[int]] = []
        for step in range(-warm_steps, 1):
            self.step(step, DATA_SEED)
        self._statements: list[Mismatch] = []
        self._chains: dict[tuple[tuple[str, int], ...], _WarmChain] = {}
        self._base = [tensor.clone() for tensor in self._state()]

    def reference(self) -> list[list[int]]:
        """Return all ranks' digests after each of the first steps of the undisturbed run."""
        if not self._reference:
            self.reset()
            self._reference = [[]]
            for step in range(1, ONSET + REFERENCE_STEPS + 1):
                self.step(step, DATA_SEED)
                self._reference.append(self.gather(0)[1])
        return self._reference

    def intervals(self, preset: SdcPreset, steps: int) -> dict[str, int]:
        """Return the intervals that the chain chooses from the costs it measures in ``steps`` steps."""
        self.reset()
        chain = self._new_chain(audit_options(preset, is_sharded=self.config.parallel != "ddp"), 1)
        if chain is None:
            return {}
        for step in range(1, steps + 1):
            self.step(step, DATA_SEED, chain)
        chain.close()
        return {str(audit.kind): chain._schedule.interval(audit.kind) for audit in chain._audits}

    def steps_until_audited(self, intervals: Intervals) -> int:
        """Return the steps after which a version before them counts as audited.

        Args:
            intervals: The chain's.
        """
        warm = self._warm_chain(intervals)
        audits = warm.chain._audits if warm is not None else []
        parts = {str(audit.kind): audit.rounds - len(set(audit.left_out)) for audit in audits}
        return ROTATIONS_UNTIL_CLEAN * max((count * intervals[kind] for kind, count in parts.items()), default=0)

    def run(
        self,
        injection: Injection | None,
        intervals: Intervals,
        phase: float,
        window: int,
        steps: int = 0,
        signals: bool = False,
    ) -> Result:
        """Return what happens after an injection: until the chain finds it, or to the end of the window.

        After a suspicion that names no rank, it begins once more, as a job would go back; the fault goes on.

        A chain's run leaves out steps in which the fault is not active, once an activation can be found no more: such
        steps are those of an undisturbed run, and the audits' intervals count them. Once a permanent or intermittent
        fault has changed a parameter, the run also leaves out the steps in which no audit is due. Audits then see a
        training run that makes fewer steps between them, with a fault as frequent in each step.

        Args:
            injection: The fault; None: none.
            intervals: The chain's; empty: no chain, and no comparison of replicas.
            phase: Where in its interval and rotation each audit begins, 0 to 1.
            window: Steps in which the fault may be found.
            steps: Last step; 0: the window's.
            signals: Record what other detectors read, in each step.
        """
        reference = self.reference() if not steps else []
        warm = self._warm_chain(intervals)
        fault, site = self._faulty_site(injection)
        self.reset()
        self._statements.clear()
        elements = self.elements(injection.site) if injection is not None else 0
        peers = PeerSignals(self.inner, self.optimizer) if signals else None
        result = Result(elements=elements)
        run = _Run(self, injection, fault, site, warm, phase, steps or ONSET + window, reference, peers, result)
        with ExitStack() as stack:
            if site is not None:
                stack.enter_context(site.install())
            if peers is not None:
                stack.enter_context(peers.install())
            run.train()
        result.activations = fault.activations
        result.statements += self.take_statements()
        return result

    @property
    def statement_count(self) -> int:
        """Number of this rank's statements that were not taken yet."""
        return len(self._statements)

    def take_statements(self) -> list[Mismatch]:
        """Return this rank's statements, and forget them."""
        taken = list(self._statements)
        self._statements.clear()
        return taken

    def all_statements(self) -> list[Statement]:
        """Return the statements of all ranks that were not taken yet."""
        gathered: list[list[Mismatch]] = [[] for _ in range(self.world)]
        dist.all_gather_object(gathered, list(self._statements))
        return [Statement(rank, statement) for rank, statements in enumerate(gathered) for statement in statements]

    def time_steps(self, intervals: Intervals, blocks: int, block_steps: int) -> tuple[list[float], list[float]]:
        """Return the seconds per step of pairs of blocks of steps, without and with a chain.

        Both blocks of a pair are trained in turns, a few steps of each, so that a machine that becomes slower for some
        seconds slows both.
        """
        warm = self._warm_chain(intervals)
        assert warm is not None
        self.reset()
        first = 1 + WARM_AUDITS + FLUSH_STEPS
        chain = warm.begin(first, 0.0)
        seconds: tuple[list[float], list[float]] = [], []
        turns = [min(STEPS_OF_TURN, block_steps - done) for done in range(0, block_steps, STEPS_OF_TURN)]
        step, audited_step = 1, first
        for pair in range(blocks + 1):  # the first one is not counted
            taken = [0.0, 0.0]
            for number, steps in enumerate(turns):
                for is_audited in (True, False) if number % 2 else (False, True):
                    if is_audited:
                        taken[True] += self._time_turn(step, steps, chain, audited_step - step)
                        audited_step += steps
                    else:
                        taken[False] += self._time_turn(step, steps)
                    step += steps
            if pair:
                for of_all, second in zip(seconds, taken, strict=True):
                    of_all.append(second / block_steps)
        return seconds

    def time_presets(self, step_s: float, seconds: float) -> Timing:
        """See `bench.sdc.overhead.time_presets`."""
        return time_presets(self, step_s, seconds)

    def _time_turn(self, first: int, steps: int, chain: AuditChain | None = None, offset: int = 0) -> float:
        """Train some steps; return their seconds. ``offset``: of the chain's step numbers. A collective."""
        dist.barrier()
        began = time.perf_counter()
        for step in range(first, first + steps):
            self.step(step, DATA_SEED, chain, offset=offset)
        seconds = time.perf_counter() - began
        for audit in chain._audits if chain is not None else ():
            if isinstance(audit, StateAudit):  # the next steps update without the chain
                audit._watched = audit._outcome = None
        return seconds

    def reset(self) -> None:
        """Go back to the trained state that all runs begin with."""
        gradient_norms.to_repeat.clear()  # it outlives generations
        self.restore_base()

    def restore_base(self) -> None:
        """Restore the trained state, and leave what audits know."""
        with torch.no_grad():
            for target, source in zip(self._state(), self._base, strict=True):
                target.copy_(source)
        self.optimizer.zero_grad()

    def _state(self) -> list[torch.Tensor]:
        moments = [local(moment) for state in self.optimizer.state.values() for moment in state.values()]
        return [*map(local, self.inner.parameters()), *map(local, self.inner.buffers()), *moments]

    def _new_chain(self, options: Mapping[AuditKind, AuditOptions], first: int) -> AuditChain | None:
        setup = AuditSetup(
            rank=self.rank,
            world_size=self.world,
            nodes=tuple(node_of(rank) for rank in range(self.world)),
            device=torch.device("cpu"),
            objects={"model": self.model, "optimizer": self.optimizer},
            has_replica_per_rank=True,
            report=self._statements.append,
        )
        return build_chain(options, setup, first, lambda step: None) if options else None

    def _warm_chain(self, intervals: Intervals) -> _WarmChain | None:
        """Return a chain that has audited all units before, without faults."""
        key = tuple(intervals.items())
        if key not in self._chains:
            self.reset()
            every = {AuditKind(kind): AuditOptions(interval=1) for kind in intervals}
            chain = self._new_chain(every, 1)
            if chain is None:
                return None
            for step in range(1, WARM_AUDITS + 1):
                self.step(step, DATA_SEED, chain)
            for cost in chain._schedule._costs.values():
                cost.since = WARM_AUDITS + FLUSH_STEPS + 1
            for step in range(WARM_AUDITS + 1, WARM_AUDITS + FLUSH_STEPS + 1):
                self.step(step, DATA_SEED, chain)  # what was begun is compared
            self._chains[key] = _WarmChain(chain, intervals)
        return self._chains[key]

    def _faulty_site(self, injection: Injection | None) -> tuple[Fault, FaultySite | None]:
        if injection is None:
            return Fault(None, 0), None
        elements = self.elements(injection.site)
        is_faulty = injection.rank == self.rank
        if not is_faulty and injection.site not in GRAPH_SITES:
            return Fault(None, 0), None
        fault = Fault(injection, elements) if is_faulty else Fault(None, 0)
        return fault, SITES[injection.site](fault, self.model, self.inner, self.optimizer)

    def elements(self, kind: Site) -> int:
        """Return the elements that pass a site in a step of training. Raises ValueError if none does."""
        if kind in DETECTORS:
            return 1  # active from its first use on
        if kind not in self._elements:
            fault = Fault(None, 0)
            site = SITES[kind](fault, self.model, self.inner, self.optimizer)
            with site.install():
                self.step(1, DATA_SEED, site=site)
            site.at_rest()
            self.reset()
            if not fault.seen:
                raise ValueError(f"no value of {self.config.model} passes {kind}: a fault there changes nothing")
            self._elements[kind] = fault.seen
        return self._elements[kind]

    def step(
        self,
        step: int,
        seed: int,
        chain: AuditChain | None = None,
        site: FaultySite | None = None,
        offset: int = 0,
        peers: PeerSignals | None = None,
    ) -> float:
        """Train one step; return this rank's loss. ``offset``: of the chain's step numbers."""
        if chain is not None:
            chain._update_number = step + offset  # runs leave out steps, and go back
            chain.begin_step(step + offset)
        seed_step(seed, step, self.rank)
        batch = batch_of(self.config.model, seed, step, self.rank)
        with ExitStack() as stack:
            stack.enter_context(self.config.autocast())
            if site is not None:
                site.is_in_passes = True
                stack.enter_context(site.forward_pass())
            loss: torch.Tensor = self.model(*batch)
        if site is not None:
            site.before_backward()
        loss.backward()
        if site is not None:
            site.is_in_passes = False
            site.after_backward()
        if peers is not None:
            peers.after_backward()
        if chain is not None:
            chain.before_update(step + offset)
        self.optimizer.step()
        if chain is not None:
            chain.step_finished(step + offset)
        self.optimizer.zero_grad()
        return loss.item()

    def gather(self, statements: int, idle_steps: int = 0) -> tuple[int, list[int], int]:
        """Return how many statements all ranks have made, the digest of each rank's parameters, and how many of the
        next steps the fault leaves alone."""
        mine = torch.stack([torch.tensor(statements), self._digest.enqueue(), torch.tensor(idle_steps)])
        of_all_ranks = mine.new_empty(self.world * len(mine))
        all_gather(of_all_ranks, mine)
        numbers, digests, idle = of_all_ranks.view(self.world, -1).unbind(1)
        return int(numbers.sum()), digests.tolist(), int(idle.max())


@dataclass
class _Run:
    """The steps of one run after an injection, and what they show."""

    _training: Training
    _injection: Injection | None
    _fault: Fault
    _site: FaultySite | None
    _warm: _WarmChain | None
    _phase: float
    _last: int
    _reference: list[list[int]]
    _peers: PeerSignals | None
    result: Result
    _number: int = 0  # of the step
    _activations: int = 0
    _activated_step: int = 0
    _searched_step: int = 0  # in which a suspicion named no rank

    def __post_init__(self) -> None:
        self._first = 1 + WARM_AUDITS + FLUSH_STEPS + int(self._phase * 1000)
        self._chain = self._warm.begin(self._first, self._phase) if self._warm is not None else None

    def train(self) -> None:
        """Train until the chain finds the fault, it can be found no more, or the last step is over."""
        while self._number < self._last:
            self._number += 1
            found, digests, idle_steps = self._train_step()
            if found and self._warm is not None and not self._searched_step and self._names_no_rank():
                self._begin_again(self._warm)
                continue
            self._compare(digests)
            if found or self.result.replica_digests:
                return
            if self._searched_step or self._injection is None:
                continue
            if not self.result.changed_step:
                if _is_settled(self._injection, self._number):
                    return
            elif self._chain is not None:
                self._skip_steps(self._chain, self._injection, idle_steps if self._is_forgotten(digests) else 0)

    def _train_step(self) -> tuple[int, list[int], int]:
        """Train a step. Return the statements, the ranks' digests, and the next steps that the fault leaves alone."""
        fault, number = self._fault, self._number
        fault.is_armed = number >= ONSET
        offset = self._first - 1
        loss = self._training.step(number, DATA_SEED, self._chain, self._site, offset=offset, peers=self._peers)
        if self._peers is not None:
            self.result.signals.append(self._peers.read(loss))
        if fault.activations > self._activations:
            self._activated_step, self._activations = number, fault.activations
        idle = 0
        can_skip = self._chain is not None and self._injection is not None
        if can_skip and number - self._activated_step >= DETECTABLE_STEPS:
            idle_steps = fault.elements_until_active() // max(1, self.result.elements) - 1
            idle = int(min(self._last - number, idle_steps))
        gathered = self._training.gather(self._training.statement_count, idle)
        self.result.steps = max(number, self._searched_step)
        if self._site is not None:
            self._site.at_rest()
        return gathered

    def _begin_again(self, warm: _WarmChain) -> None:
        """Go back to the beginning, as a job does after a suspicion that names no rank."""
        self._searched_step = self._last = self._number
        self.result.statements += self._training.take_statements()
        self._training.restore_base()
        self._chain, self._number = warm.begin(self._first, self._phase, is_repeated=True), 0

    def _compare(self, digests: list[int]) -> None:
        """Compare the parameters with those of the undisturbed run, and replicas with each other."""
        number, result = self._number, self.result
        if not result.changed_step and number < len(self._reference) and digests != self._reference[number]:
            result.changed_step = number
        if self._training.config.parallel == "ddp" and len(set(digests)) > 1:
            result.differing_steps.append(number)
            if self._chain is not None and number % REPLICA_STEPS == 0:
                result.replica_digests = digests

    def _skip_steps(self, chain: AuditChain, injection: Injection, idle_steps: int) -> None:
        """Leave out steps that change nothing: the fault is not active in them, or no audit is due."""
        skipped = max(0, idle_steps)
        if injection.recurs:
            due = _steps_until_due(chain, self._number, self._number + self._first)
            skipped = max(skipped, min(self._last - self._number - 1, due))
        self._fault.skip_ahead(skipped * self.result.elements)
        self._number += skipped
        chain._updated_step = self._number + self._first - 1  # its norms were not read

    def _names_no_rank(self) -> bool:
        """Return whether all statements so far are suspicions that name no rank. A collective."""
        judgements = judge_all(self._training.all_statements(), self._training.world)
        return all(judgement.outcome is Outcome.UNNAMED_SUSPICION for judgement in judgements)

    def _is_forgotten(self, digests: list[int]) -> bool:
        """Return whether an activation some steps ago has left nothing that differs between ranks."""
        assert self._injection is not None
        if self._injection.site in DETECTORS:
            return False
        if self._training.config.parallel == "ddp":
            return len(set(digests)) == 1
        return self._injection.site not in MEMORY


def _is_settled(injection: Injection, step: int) -> bool:
    """Return whether a fault that has changed no parameter until ``step`` will change none, or not within the run."""
    settled = REFERENCE_STEPS if injection.recurs else SETTLED
    return step >= ONSET + settled and injection.site not in DETECTORS


def _steps_until_due(chain: AuditChain, step: int, update: int) -> int:
    """Return the steps after ``step`` in which no audit is due and replicas are not compared.

    Args:
        chain: The audits.
        step: A step of the run.
        update: The number of the next update in the chain.
    """
    needed = next(
        n for n in itertools.count() if chain._schedule.due_audits(update + n) or not (step + 1 + n) % REPLICA_STEPS
    )
    return 0 if any(audit.is_needed(update) for audit in chain._audits) else needed


class _WarmChain:
    """A chain as it is after many audits, to which it returns before each run."""

    def __init__(self, chain: AuditChain, intervals: Intervals) -> None:
        self.chain, self._intervals = chain, intervals
        self._memory: list[tuple[Any, dict[str, Any]]] = []
        for audit in chain._audits:
            for part in (audit, *_parts_of(audit)):
                plain = {name: copy(value) for name, value in vars(part).items() if isinstance(value, _PLAIN)}
                self._memory.append((part, plain))

    def begin(self, first: int, phase: float, *, is_repeated: bool = False) -> AuditChain:
        """Return the chain before step ``first``, each audit somewhere in its interval and in its rotation.

        Args:
            first: The step.
            phase: Where in its interval and rotation each audit begins, 0 to 1.
            is_repeated: The job went back, so that ranks agree in the first step on what to read again.
        """
        chain = self.chain
        for part, plain in self._memory:
            vars(part).update({name: copy(value) for name, value in plain.items()})
        for number, audit in enumerate(chain._audits):
            place = (phase * 7919 + number * 0.381966) % 1.0
            cost = chain._schedule._costs[audit.kind]
            cost.interval = self._intervals[str(audit.kind)]
            cost.options = AuditOptions(interval=cost.interval)
            cost.since = first + int(place * cost.interval)
            _rotate(audit, place * 7919 % 1.0)
            if is_repeated and isinstance(audit, gradient_norms.GradientNorms):
                audit._agreed = None
        for rotation in chain._rotations.values():
            rotation.spoil()
            rotation.clean_since = first - 1
        chain._clean_since = first - 1
        return chain


_PLAIN = (int, float, str, list, set, dict, tuple, type(None))


def _parts_of(audit: Audit) -> list[Any]:
    """Return the objects in which an audit keeps its progress besides itself."""
    package = Audit.__module__.rpartition(".")[0]
    kept = (item for value in vars(audit).values() if isinstance(value, list) for item in value)
    return [item for item in kept if type(item).__module__.startswith(package) and hasattr(item, "__dict__")]


def _rotate(audit: Audit, place: float) -> None:
    """Let an audit begin at another of its units: ``place`` of the way through them."""
    if isinstance(audit, UpdateAudit):
        for rotation in audit._rotations:
            rotation._next = int(place * len(rotation))
    elif isinstance(audit, StateAudit):
        audit._parts = audit._plan()
        del audit._parts[: int(place * len(audit._parts))]
    elif audit.kind is AuditKind.PEER_REPLAY:
        rotations: list[Any] = vars(audit)["_rotations"]
        for number, turn in enumerate(rotations):
            turn.visits = 1 + (number < int(place * len(rotations)))
