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
from everstep_trainer.data.rng import seed_step
from everstep_trainer.parallel.exact.summation import all_gather
from everstep_trainer.sdc.audit import Audit, AuditSetup, Mismatch
from everstep_trainer.sdc.build import build_chain
from everstep_trainer.sdc.chain import ROTATIONS_UNTIL_CLEAN, AuditChain
from everstep_trainer.sdc.digests.digest import WeightedDigest
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.presets import LinkOptions, link_options
from everstep_trainer.sdc.state_digests import StateAudit
from everstep_trainer.sdc.updates import UpdateAudit

from bench.sdc.injection import DETECTORS, MEMORY, Fault, Injection, Site
from bench.sdc.judging import Judgement, Outcome, Statement, judge_all, node_of
from bench.sdc.models import Config, batch_of, build
from bench.sdc.overhead import Timing, time_presets
from bench.sdc.peers import PeerSignals, StepSignals
from bench.sdc.sites import GRAPH_SITES, SITES, FaultySite, local
from everstep.vocabulary import AuditLink
from everstep.wire.v1.training import SdcPreset

DETECTABLE_STEPS = 24
"""Steps in which a link may still find an activation whose step is over: norms of gradients are exchanged within 16."""
REPLICA_STEPS = 50
"""Steps from one comparison of replicas to the next, as Everstep's default."""
ONSET = 3
"""The step of a run in which its fault is first active."""
REFERENCE_STEPS = 64
"""Steps of the undisturbed run that tell whether a fault has changed a parameter. Its first activation is in the first
of them."""
SETTLED = 3
"""Steps after which a fault that acts once and changed no parameter will change none."""
WARM_AUDITS = 48
"""Audits that each link has done before a fault: it knows then what is usual."""
FLUSH_STEPS = 3
KEPT_STEPS = 10
"""Steps from one kept state to the next, where a run may go back."""
STEPS_OF_TURN = 8
"""Steps that are timed without the chain, and then with it, in turns."""
DATA_SEED, EVALUATION_SEED, EVALUATIONS = 1, 10_007, 4

Intervals = Mapping[str, int]
"""Steps between two audits by link; a link that is not named is off."""


@dataclass
class Result:
    """What one rank saw of one run."""

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
    stratum: str = ""
    final_loss: float | None = None
    """On fixed data, after a whole window without a chain."""
    clean_audits: int = 0
    """How often steps were reported as clean."""
    signals: list[StepSignals] = field(default_factory=list)


@dataclass
class Report:
    """What all ranks learn in one step. ``back_at``: the step that they go back to; the same one if they go on."""

    step: int
    back_at: int
    judgements: list[Judgement]


@dataclass
class Story:
    """A run in which a chain may find a fault and go back. ``losses``: means over ranks by step, as last computed."""

    losses: dict[int, float] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    replaced: dict[int, int] = field(default_factory=dict)
    """The step by replaced rank."""
    digests: list[int] = field(default_factory=list)
    """All ranks' parameters at the end."""


STRIKES = 2
"""Strikes that convict, as the controller's policy has them."""
UNDOING = (Outcome.CONVICTED, Outcome.STRIKE, Outcome.SUSPICION, Outcome.UNNAMED_SUSPICION, Outcome.TIE)
"""Outcomes after which work is undone."""


class StrikeRule:
    """The controller's rule: a rank is replaced once it is convicted or has two strikes."""

    def __init__(self) -> None:
        self._strikes: dict[int, int] = {}

    def replaced(self, judgements: list[Judgement]) -> list[int]:
        """Return the ranks that the judgements of one step replace. Several strikes of one step count as one."""
        added: dict[int, int] = {}
        for one in judgements:
            if one.rank is None or one.outcome not in (Outcome.CONVICTED, Outcome.STRIKE, Outcome.AUDITOR_STRIKE):
                continue
            added[one.rank] = max(added.get(one.rank, 0), STRIKES if one.outcome is Outcome.CONVICTED else 1)
        found = []
        for rank, strikes in added.items():
            self._strikes[rank] = self._strikes.get(rank, 0) + strikes
            if self._strikes[rank] >= STRIKES:
                self._strikes[rank] = 0  # the next node begins without any
                found.append(rank)
        return found


class Training:
    """One configuration on one rank. All methods are collectives."""

    def __init__(self, config: Config, rank: int, world: int, warm_steps: int) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.model, self.inner, self.optimizer = build(config, world)
        self._digest = WeightedDigest([local(one) for one in self.inner.parameters()])
        self._elements: dict[Site, int] = {}
        self._reference: list[list[int]] = []
        for step in range(-warm_steps, 1):
            self._step(step, DATA_SEED)
        self._statements: list[Mismatch] = []
        self._clean_steps: list[int] = []
        self._chains: dict[tuple[tuple[str, int], ...], _WarmChain] = {}
        self._base = [one.clone() for one in self._state()]

    def reference(self) -> list[list[int]]:
        """Return all ranks' digests after each of the first steps of the undisturbed run."""
        if not self._reference:
            self.reset()
            self._reference = [[]]
            for step in range(1, ONSET + REFERENCE_STEPS + 1):
                self._step(step, DATA_SEED)
                self._reference.append(self._gather(0)[1])
        return self._reference

    def final_loss(self, seed: int, window: int) -> float:
        """Return the loss on fixed data after an undisturbed run over other data."""
        self.reset()
        for step in range(1, ONSET + window + 1):
            self._step(step, seed)
        return self._evaluate()

    def intervals(self, preset: SdcPreset, steps: int) -> dict[str, int]:
        """Return the intervals that the chain chooses from the costs it measures in ``steps`` steps."""
        self.reset()
        chain = self._new_chain(link_options(preset, is_sharded=self.config.parallel != "ddp"), 1)
        if chain is None:
            return {}
        for step in range(1, steps + 1):
            self._step(step, DATA_SEED, chain)
        chain.close()
        return {str(audit.link): chain._schedule.interval(audit.link) for audit in chain._audits}

    def steps_until_audited(self, intervals: Intervals) -> int:
        """Return the steps after which a version before them counts as audited.

        Args:
            intervals: The chain's.
        """
        warm = self._warm_chain(intervals)
        audits = warm.chain._audits if warm is not None else []
        parts = {str(audit.link): audit.rounds - len(set(audit.left_out)) for audit in audits}
        return ROTATIONS_UNTIL_CLEAN * max((count * intervals[link] for link, count in parts.items()), default=0)

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
        steps are those of an undisturbed run, and the links' intervals count them. Once a permanent fault has changed
        a parameter, the run also leaves out the steps in which no link is due. Audits then see a training run that
        makes fewer steps between them, with a fault as frequent in each step.

        Args:
            injection: The fault; None: none.
            intervals: The chain's; empty: no chain, and no comparison of replicas.
            phase: Where in its interval and rotation each link begins, 0 to 1.
            window: Steps in which the fault may be found.
            steps: Last step; 0: the window's.
            signals: Record what other detectors read, in each step.
        """
        reference = self.reference() if not steps else []
        warm = self._warm_chain(intervals)
        fault, site = self._faulty_site(injection)
        self.reset()
        result = Result()
        self._statements.clear()
        self._clean_steps.clear()
        first = 1 + WARM_AUDITS + FLUSH_STEPS + int(phase * 1000)
        chain = warm.begin(first, phase) if warm is not None else None
        if injection is not None:
            result.elements = self._count(injection.site)
        peers = PeerSignals(self.inner, self.optimizer) if signals else None
        with ExitStack() as stack:
            if site is not None:
                stack.enter_context(site.install())
            if peers is not None:
                stack.enter_context(peers.install())
            last, step, active = steps or ONSET + window, 0, (0, 0)
            searched = 0  # the step in which a suspicion named no rank
            while step < last:
                step += 1
                fault.is_armed = step >= ONSET
                loss = self._step(step, DATA_SEED, chain, site, offset=first - 1, peers=peers)
                if peers is not None:
                    result.signals.append(peers.read(loss))
                if fault.activations > active[1]:
                    active = step, fault.activations
                can_skip = chain is not None and injection is not None and step - active[0] >= DETECTABLE_STEPS
                idle = min(last - step, fault.elements_until_active() // max(1, result.elements) - 1) if can_skip else 0
                found, digests, idle_steps = self._gather(len(self._statements), int(idle))
                result.steps = max(step, searched)
                if site is not None:
                    site.at_rest()
                if found and warm is not None and not searched and self._names_no_rank():
                    searched = last = step
                    result.statements += self._statements
                    self._statements.clear()
                    self._restore(self._base)
                    chain, step = warm.begin(first, phase, is_repeated=True), 0
                    continue
                if not result.changed_step and step < len(reference) and digests != reference[step]:
                    result.changed_step = step
                if self.config.parallel == "ddp" and len(set(digests)) > 1:
                    result.differing_steps.append(step)
                    if intervals and step % REPLICA_STEPS == 0:
                        result.replica_digests = digests
                if found or result.replica_digests:
                    break
                if searched:
                    continue
                if injection is not None and not result.changed_step and _is_settled(injection, step):
                    break
                if chain is not None and injection is not None and result.changed_step:
                    skipped = max(0, idle_steps) if self._is_forgotten(injection, digests) else 0
                    if injection.is_permanent:
                        skipped = max(skipped, min(last - step - 1, _steps_until_due(chain, step, step + first)))
                    fault.skip_ahead(skipped * result.elements)
                    step += skipped
                    chain._updated_step = step + first - 1  # its norms were not read
            else:
                result.final_loss = self._evaluate() if chain is None else None
        result.activations, result.stratum = fault.activations, fault.stratum
        result.statements += self._statements
        result.clean_audits = len(self._clean_steps)
        return result

    def _names_no_rank(self) -> bool:
        """Return whether all statements so far are suspicions that name no rank. A collective."""
        judgements = judge_all(self._all_statements(), self.world)
        return all(one.outcome is Outcome.UNNAMED_SUSPICION for one in judgements)

    def _is_forgotten(self, injection: Injection | None, digests: list[int]) -> bool:
        """Return whether an activation some steps ago has left nothing that differs between ranks."""
        if injection is None or injection.site in DETECTORS:
            return False
        if self.config.parallel == "ddp":
            return len(set(digests)) == 1
        return injection.site not in MEMORY

    def tell(self, injection: Injection | None, intervals: Intervals, onset: int, steps: int) -> Story:
        """Return the losses of a run with a fault from step ``onset`` on, and what the chain does about it.

        The ranks follow the controller's rule: a convicted rank's node counts as replaced, and so does one with two
        strikes. After those, a suspicion or a tie, all ranks go back to the newest state whose steps were audited.
        """
        warm = self._warm_chain(intervals)
        fault, site = self._faulty_site(injection)
        self.reset()
        self._statements.clear()
        self._clean_steps.clear()
        offset = WARM_AUDITS + FLUSH_STEPS
        chain = warm.begin(offset + 1, 0.0) if warm is not None else None
        story, tribunal = Story(), StrikeRule()
        kept = {0: [one.clone() for one in self._state()]}
        step = verified = 0
        with ExitStack() as stack:
            if site is not None:
                stack.enter_context(site.install())
            while step < steps:
                step += 1
                fault.is_armed = self.rank not in story.replaced and step >= onset
                loss = torch.tensor(self._step(step, DATA_SEED, chain, site, offset=offset))
                dist.all_reduce(loss)
                story.losses[step] = loss.item() / self.world
                found, story.digests, _ = self._gather(len(self._statements))
                if step % KEPT_STEPS == 0 and not found:
                    kept[step] = [one.clone() for one in self._state()]
                if not found or warm is None:
                    continue
                clean = torch.tensor(max(self._clean_steps, default=offset) - offset)
                dist.all_reduce(clean, op=dist.ReduceOp.MIN)
                verified = max(verified, int(clean.item()))
                judgements = judge_all(self._all_statements(), self.world)
                replaced = tribunal.replaced(judgements)
                story.replaced.update(dict.fromkeys(replaced, step))
                is_undone = bool(replaced) or any(one.outcome in UNDOING for one in judgements)
                back = max(one for one in kept if one <= verified) if is_undone else step
                story.reports.append(Report(step, back, judgements))
                self._statements.clear()
                if not is_undone:
                    continue
                self._restore(kept[back])
                kept = {one: state for one, state in kept.items() if one <= back}
                chain, step = warm.begin(offset + back + 1, 0.0, is_repeated=True), back
        return story

    def _all_statements(self) -> list[Statement]:
        everybodys: list[list[Mismatch]] = [[] for _ in range(self.world)]
        dist.all_gather_object(everybodys, list(self._statements))
        return [Statement(rank, one) for rank, said in enumerate(everybodys) for one in said]

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
                for of_all, one in zip(seconds, taken, strict=True):
                    of_all.append(one / block_steps)
        return seconds

    def time_presets(self, step_s: float, seconds: float) -> Timing:
        """See `bench.sdc.overhead.time_presets`."""
        return time_presets(self, step_s, seconds)

    def _time_turn(self, first: int, steps: int, chain: AuditChain | None = None, offset: int = 0) -> float:
        """Train some steps; return their seconds. ``offset``: of the chain's step numbers. A collective."""
        dist.barrier()
        began = time.perf_counter()
        for step in range(first, first + steps):
            self._step(step, DATA_SEED, chain, offset=offset)
        seconds = time.perf_counter() - began
        for audit in chain._audits if chain is not None else ():
            if isinstance(audit, StateAudit):  # the next steps update without the chain
                audit._watched = audit._outcome = None
        return seconds

    def reset(self) -> None:
        """Go back to the trained state that all runs begin with."""
        gradient_norms.to_repeat.clear()  # it outlives generations
        self._restore(self._base)

    def _restore(self, state: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for target, source in zip(self._state(), state, strict=True):
                target.copy_(source)
        self.optimizer.zero_grad()

    def _state(self) -> list[torch.Tensor]:
        moments = [local(one) for state in self.optimizer.state.values() for one in state.values()]
        return [*map(local, self.inner.parameters()), *map(local, self.inner.buffers()), *moments]

    def _new_chain(self, options: Mapping[AuditLink, LinkOptions], first: int) -> AuditChain | None:
        setup = AuditSetup(
            rank=self.rank,
            world_size=self.world,
            nodes=tuple(node_of(rank) for rank in range(self.world)),
            device=torch.device("cpu"),
            objects={"model": self.model, "optimizer": self.optimizer},
            has_replica_per_rank=True,
            report=self._statements.append,
        )
        return build_chain(options, setup, first, self._clean_steps.append) if options else None

    def _warm_chain(self, intervals: Intervals) -> _WarmChain | None:
        """Return a chain that has audited all units before, without faults."""
        key = tuple(intervals.items())
        if key not in self._chains:
            self.reset()
            every = {AuditLink(link): LinkOptions(interval=1) for link in intervals}
            chain = self._new_chain(every, 1)
            if chain is None:
                return None
            for step in range(1, WARM_AUDITS + 1):
                self._step(step, DATA_SEED, chain)
            for cost in chain._schedule._costs.values():
                cost.since = WARM_AUDITS + FLUSH_STEPS + 1
            for step in range(WARM_AUDITS + 1, WARM_AUDITS + FLUSH_STEPS + 1):
                self._step(step, DATA_SEED, chain)  # what was begun is compared
            self._chains[key] = _WarmChain(chain, intervals)
        return self._chains[key]

    def _faulty_site(self, injection: Injection | None) -> tuple[Fault, FaultySite | None]:
        if injection is None:
            return Fault(None, 0), None
        elements = self._count(injection.site)
        is_faulty = injection.rank == self.rank
        if not is_faulty and injection.site not in GRAPH_SITES:
            return Fault(None, 0), None
        fault = Fault(injection, elements) if is_faulty else Fault(None, 0)
        return fault, SITES[injection.site](fault, self.model, self.inner, self.optimizer)

    def _count(self, kind: Site) -> int:
        """Return the elements that pass a site in a step of training."""
        if kind in DETECTORS:
            return 1  # active from its first use on
        if kind not in self._elements:
            fault = Fault(None, 0)
            site = SITES[kind](fault, self.model, self.inner, self.optimizer)
            with site.install():
                self._step(1, DATA_SEED, site=site)
            site.at_rest()
            self.reset()
            self._elements[kind] = fault.seen
        return self._elements[kind]

    def _step(
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

    def _gather(self, statements: int, idle_steps: int = 0) -> tuple[int, list[int], int]:
        """Return how many statements all ranks have made, the digest of each rank's parameters, and how many of the
        next steps the fault leaves alone."""
        mine = torch.stack([torch.tensor(statements), self._digest.enqueue(), torch.tensor(idle_steps)])
        everybodys = mine.new_empty(self.world * len(mine))
        all_gather(everybodys, mine)
        numbers, digests, idle = everybodys.view(self.world, -1).unbind(1)
        return int(numbers.sum()), digests.tolist(), int(idle.max())

    @torch.no_grad()
    def _evaluate(self) -> float:
        self.inner.eval()
        total = torch.zeros(())
        for number in range(EVALUATIONS):
            batch = batch_of(self.config.model, EVALUATION_SEED, number, self.rank)
            total += self.model(*batch)
        self.inner.train()
        dist.all_reduce(total)
        return total.item() / EVALUATIONS / self.world


def _is_settled(injection: Injection, step: int) -> bool:
    """Return whether a fault that has changed no parameter until ``step`` will change none, or not within the run."""
    settled = REFERENCE_STEPS if injection.is_permanent else SETTLED
    return step >= ONSET + settled and injection.site not in DETECTORS


def _steps_until_due(chain: AuditChain, step: int, update: int) -> int:
    """Return the steps after ``step`` in which no link is due and replicas are not compared.

    Args:
        chain: The links.
        step: A step of the run.
        update: The number of the next update in the chain.
    """
    needed = next(
        n for n in itertools.count() if chain._schedule.due_links(update + n) or not (step + 1 + n) % REPLICA_STEPS
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
        """Return the chain before step ``first``, each link somewhere in its interval and in its rotation.

        Args:
            first: The step.
            phase: Where in its interval and rotation each link begins, 0 to 1.
            is_repeated: The job went back, so that ranks agree in the first step on what to read again.
        """
        chain = self.chain
        for part, plain in self._memory:
            vars(part).update({name: copy(value) for name, value in plain.items()})
        for number, audit in enumerate(chain._audits):
            place = (phase * 7919 + number * 0.381966) % 1.0
            cost = chain._schedule._costs[audit.link]
            cost.interval = self._intervals[str(audit.link)]
            cost.options = LinkOptions(interval=cost.interval)
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
    kept = (one for value in vars(audit).values() if isinstance(value, list) for one in value)
    return [one for one in kept if type(one).__module__.startswith(package) and hasattr(one, "__dict__")]


def _rotate(audit: Audit, place: float) -> None:
    """Let a link begin at another of its units: ``place`` of the way through them."""
    if isinstance(audit, UpdateAudit):
        for rotation in audit._rotations:
            rotation._next = int(place * len(rotation))
    elif isinstance(audit, StateAudit):
        audit._parts = audit._plan()
        del audit._parts[: int(place * len(audit._parts))]
    elif audit.link is AuditLink.PEER_REPLAY:
        rotations: list[Any] = vars(audit)["_rotations"]
        for number, one in enumerate(rotations):
            one.visits = 1 + (number < int(place * len(rotations)))
