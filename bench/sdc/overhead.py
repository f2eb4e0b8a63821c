"""What audits cost a step: training without them, under ``light`` and under ``standard`` in turns on the same ranks.

Each preset has a chain of its own, which chooses its intervals itself. The presets take turns of some steps in one
process group, so that a machine that becomes slower for some seconds slows all of them. The batch is as large as the
step is to be long. Norms of gradients are taken with two ranks, too, so that they cost what they cost with more.

A preset makes a step longer by a percent or two, and the machine's noise is larger than that. So each kind of audit is
timed alone as well, in every second step, where it costs ten times as much. Divided by the preset's intervals, with the
fixed cost of a step without an audit, that gives the same figure with a narrow range. The fixed cost is measured on
rank 0 by the host's clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bench.sdc.models import SEQUENCES, batch_of
from bench.table import Row
from everstep.vocabulary import AuditKind
from everstep_trainer.data.rng import seed_step
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.presets import AuditOptions, audit_options
from everstep_trainer.sdc.schedule import FIRST_AGREEMENT_STEP

if TYPE_CHECKING:
    from bench.sdc.training import Training
    from everstep.wire.v1.training import SdcPreset

OFF, ON = "off", "on"
PRESETS: dict[SdcPreset, tuple[float, float]] = {"light": (1.0, 0.5), "standard": (3.0, 2.0)}
"""Percent of a step that a preset may cost at least, and should."""
IDLE_MS = 0.2
"""Milliseconds that the chain may take in a step without an audit."""
STEPS_OF_TURN, STEPS_OF_AUDIT_TURN = 16, 8
AUDIT_INTERVAL = 2
"""Steps between two audits of a kind that is timed alone."""
WARM_STEPS = FIRST_AGREEMENT_STEP + 8
FITTING_STEPS = 12
DISTURBED = 1.5
"""Times its median that a turn takes at most; rounds with longer ones are left out under all presets."""
RESAMPLES = 2000
SEED = 5


@dataclass
class Timing:
    """The measurements of one rank at one length of a step."""

    sequences: int
    turns: dict[str, list[float]]
    """Seconds per step, by preset and round."""
    idle_s: dict[str, list[float]]
    """Seconds in the chain of each step in which no audit was due."""
    intervals: dict[str, dict[str, int]] = field(default_factory=dict)
    audits: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Seconds per step by kind of audit, and with it ``OFF`` and ``ON`` by round: it is due in every second step."""


def time_presets(training: Training, step_s: float, seconds: float) -> Timing:
    """Train in turns for about this long. A collective.

    Args:
        training: This rank's.
        step_s: Length of a step without audits.
        seconds: For all presets together, and as long again for all audits.
    """
    smallest, gradient_norms.MIN_RANKS = gradient_norms.MIN_RANKS, min(gradient_norms.MIN_RANKS, training.world)
    training.reset()
    turns = _Turns(training, _fit(training, step_s))
    gradient_norms.MIN_RANKS = smallest
    timing = turns.run(max(2, round(seconds / (step_s * STEPS_OF_TURN * (1 + len(PRESETS))))))
    turns.time_audits(max(2, round(seconds / (step_s * STEPS_OF_AUDIT_TURN * 2 * len(turns.audits)))))
    return timing


def _fit(training: Training, step_s: float) -> int:
    """Return how many sequences make a step of this length. A collective."""
    taken = {}
    for sequences in (1, SEQUENCES):
        steps = []
        for step in range(FITTING_STEPS):
            began = time.perf_counter()
            _train_step(training, step, sequences, None)
            steps.append(time.perf_counter() - began)
        taken[sequences] = median(steps)
    each = max(1e-9, (taken[SEQUENCES] - taken[1]) / (SEQUENCES - 1))
    fitting = torch.tensor(round(1 + (step_s - taken[1]) / each))
    dist.broadcast(fitting, 0)
    return max(1, min(SEQUENCES, int(fitting)))


def _train_step(training: Training, step: int, sequences: int, chain: AuditChain | None, number: int = 0) -> float:
    """Train one step; return the seconds in the chain. ``number``: the chain's step."""
    seed_step(SEED, step, training.rank)
    inputs, targets = batch_of(training.config.model, SEED, step % 512, training.rank)
    inside = _Clock()
    if chain is not None:
        inside.start()
        chain.begin_step(number)
        inside.stop()
    loss: torch.Tensor = training.model(inputs[:sequences], targets[:sequences])
    loss.backward()
    if chain is not None:
        inside.start()
        chain.before_update(number)
        inside.stop()
    training.optimizer.step()
    if chain is not None:
        inside.start()
        chain.step_finished(number)
        inside.stop()
    training.optimizer.zero_grad()
    return inside.seconds


class _Clock:
    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._began


class _Turns:
    """The chains, and the steps of each."""

    def __init__(self, training: Training, sequences: int) -> None:
        self._training, self._sequences, self._step = training, sequences, 0
        self._chains: dict[str, AuditChain | None] = {OFF: None}
        self._numbers = dict.fromkeys((OFF, *PRESETS), 0)
        is_sharded = training.config.parallel != "ddp"
        for preset in PRESETS:
            self._chains[preset] = training._new_chain(audit_options(preset, is_sharded=is_sharded), 1)
        self.audits: dict[str, AuditChain | None] = {
            str(kind): training._new_chain({kind: AuditOptions(interval=AUDIT_INTERVAL)}, 1)
            for kind in audit_options("standard", is_sharded=is_sharded)
            if kind is not AuditKind.CHECKPOINT
        }
        names = list(self._chains)
        self._timing = Timing(sequences, {name: [] for name in names}, {name: [] for name in names})

    def run(self, rounds: int) -> Timing:
        for name in self._chains:
            self._turn(name, WARM_STEPS)
        for taken in self._timing.idle_s.values():
            taken.clear()
        names = list(self._chains)
        for number in range(rounds):
            at = number % len(names)
            for name in names[at:] + names[:at]:
                self._timing.turns[name].append(self._turn(name, STEPS_OF_TURN) / STEPS_OF_TURN)
        for name, chain in self._chains.items():
            if chain is not None:
                audits = {str(audit.kind): chain._schedule.interval(audit.kind) for audit in chain._audits}
                self._timing.intervals[name] = audits
                chain.close()
        return self._timing

    def time_audits(self, rounds: int) -> None:
        """Time each kind of audit alone, in turns with training without it. A collective."""
        for kind, chain in self.audits.items():
            self._chains[kind], self._numbers[kind], self._timing.idle_s[kind] = chain, 0, []
            self._turn(kind, WARM_STEPS)
            taken: dict[str, list[float]] = {OFF: [], ON: []}
            for number in range(rounds):
                for name in (OFF, kind) if number % 2 else (kind, OFF):
                    seconds = self._turn(name, STEPS_OF_AUDIT_TURN) / STEPS_OF_AUDIT_TURN
                    taken[OFF if name == OFF else ON].append(seconds)
            self._timing.audits[kind] = taken
            if chain is not None:
                chain.close()

    def _turn(self, name: str, steps: int) -> float:
        """Train some steps; return their seconds. A collective."""
        chain = self._chains[name]
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self._step += 1
            self._numbers[name] += 1
            inside = _train_step(self._training, self._step, self._sequences, chain, self._numbers[name])
            if chain is not None and not chain._due:
                self._timing.idle_s[name].append(inside)
        taken = time.perf_counter() - began
        if chain is not None:
            chain._unmeasured = None  # its last step would end with the turns of the others
        return taken


# ---- the report


def percent_with_range(on: Sequence[float], off: Sequence[float]) -> tuple[float, float, float]:
    """Return by how many percent ``on`` is longer in the sum of all rounds, with the bounds of 19 in 20 resamples."""
    draw = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        chosen = draw.choices(range(len(on)), k=len(on))
        found.append(100 * (sum(on[index] for index in chosen) / sum(off[index] for index in chosen) - 1))
    found.sort()
    share = 100 * (sum(on) / sum(off) - 1)
    return share, found[RESAMPLES // 40], found[-RESAMPLES // 40]


def undisturbed(turns: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the rounds in which no turn took much longer than usual."""
    limits = {name: DISTURBED * median(taken) for name, taken in turns.items()}
    rounds = range(len(next(iter(turns.values()))))
    kept = [index for index in rounds if all(taken[index] <= limits[name] for name, taken in turns.items())]
    return {name: [taken[index] for index in kept] for name, taken in turns.items()}


def audit_seconds(taken: dict[str, list[float]]) -> list[float]:
    """Return what an audit took in each undisturbed round, from the steps of one kind; see `Timing.audits`."""
    kept = undisturbed(taken)
    return [AUDIT_INTERVAL * (on - off) for on, off in zip(kept[ON], kept[OFF], strict=True)]


def sum_of_audits(timing: Timing, preset: str) -> tuple[float, float]:
    """Return the percent of a step that a preset's audits take at its intervals, and its standard error."""
    step_s = fmean(undisturbed(timing.turns)[OFF])
    idle_s = timing.idle_s[preset]
    total_s, variance = median(idle_s) if idle_s else 0.0, 0.0
    for kind, interval in timing.intervals[preset].items():
        seconds = audit_seconds(timing.audits[kind])
        total_s += fmean(seconds) / interval
        variance += (stdev(seconds) / interval) ** 2 / len(seconds)
    return 100 * total_s / step_s, 100 * math.sqrt(variance) / step_s


def rows_of(timing: Timing) -> list[Row]:
    """Return the table of one length of a step."""
    kept = undisturbed(timing.turns)
    step_ms = 1000 * fmean(kept[OFF])
    rounds, steps = len(kept[OFF]), f"steps of {step_ms:.0f} ms"
    rows = []
    for preset, (floor, aim) in PRESETS.items():
        share, error = sum_of_audits(timing, preset)
        each = [
            f"{kind} {1000 * fmean(audit_seconds(timing.audits[kind])):.1f} ms every {interval}"
            for kind, interval in timing.intervals[preset].items()
        ]
        low, high = share - 2 * error, share + 2 * error
        about = f"{low:.2f} to {high:.2f} in 19 of 20; {', '.join(each)}"
        rows.append(Row(f"{preset}, {steps}, sum of audits", share, "% of a step", floor, aim, about))
        whole, low, high = percent_with_range(kept[preset], kept[OFF])
        about = f"{low:.2f} to {high:.2f} in 19 of 20; {rounds} of {len(timing.turns[OFF])} rounds"
        rows.append(Row(f"{preset}, {steps}, in turns", whole, "% of a step", None, None, about))
        idle_s = timing.idle_s[preset]
        limit = IDLE_MS if idle_s else None
        idle_ms = 1000 * median(idle_s) if idle_s else None
        rows.append(Row(f"{preset}, {steps}, no audit due", idle_ms, "ms", limit, limit))
    return rows
