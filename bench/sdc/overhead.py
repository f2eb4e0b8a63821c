"""What audits cost a step: training without them, under ``light`` and under ``standard`` in turns on the same ranks.

Each preset has a chain of its own, which chooses its intervals itself. The presets take turns of some steps in one
process group, so that a machine that becomes slower for some seconds slows all of them. The batch is as large as the
step is to be long. Norms of gradients are taken with two ranks, too, so that they cost what they cost with more.

A step without an audit still calls the chain: its fixed cost is measured on rank 0 by the host's clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from everstep_trainer.data.rng import seed_step
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.gradients import gradient_norms
from everstep_trainer.sdc.presets import link_options
from everstep_trainer.sdc.schedule import FIRST_AGREEMENT_STEP

from bench.sdc.models import SEQUENCES, batch_of
from bench.table import Row

if TYPE_CHECKING:
    from bench.sdc.training import Training
    from everstep.wire.v1.training import SdcPreset

OFF = "off"
PRESETS: dict[SdcPreset, tuple[float, float]] = {"light": (1.0, 0.5), "standard": (3.0, 2.0)}
"""Percent of a step that a preset may cost at least, and should."""
IDLE_MS = 0.2
"""Milliseconds that the chain may take in a step without an audit."""
STEPS_OF_TURN = 16
WARM_STEPS = FIRST_AGREEMENT_STEP + 8
FITTING_STEPS = 12
DISTURBED = 1.5
"""Times its median that a turn takes at most; rounds with longer ones are left out under all presets."""
RESAMPLES = 2000
SEED = 5


@dataclass
class Timing:
    """What one rank measured at one length of a step."""

    sequences: int
    turns: dict[str, list[float]]
    """Seconds per step, by preset and round."""
    idle_s: dict[str, list[float]]
    """Seconds in the chain of each step in which no link was due."""
    intervals: dict[str, dict[str, int]] = field(default_factory=dict)


def time_presets(training: Training, step_s: float, seconds: float) -> Timing:
    """Train in turns for about this long. A collective.

    Args:
        training: This rank's.
        step_s: Length of a step without audits.
        seconds: For all presets together.
    """
    smallest, gradient_norms.MIN_RANKS = gradient_norms.MIN_RANKS, min(gradient_norms.MIN_RANKS, training.world)
    training.reset()
    turns = _Turns(training, _fit(training, step_s))
    gradient_norms.MIN_RANKS = smallest
    return turns.run(max(2, round(seconds / (step_s * STEPS_OF_TURN * (1 + len(PRESETS))))))


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
    loss.backward()  # type: ignore[no-untyped-call]
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
            self._chains[preset] = training._new_chain(link_options(preset, is_sharded=is_sharded), 1)
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
                links = {str(audit.link): chain._schedule.interval(audit.link) for audit in chain._audits}
                self._timing.intervals[name] = links
                chain.close()
        return self._timing

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
        found.append(100 * (sum(on[one] for one in chosen) / sum(off[one] for one in chosen) - 1))
    found.sort()
    share = 100 * (sum(on) / sum(off) - 1)
    return share, found[RESAMPLES // 40], found[-RESAMPLES // 40]


def undisturbed(turns: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the rounds in which no turn took much longer than usual."""
    limits = {name: DISTURBED * median(taken) for name, taken in turns.items()}
    rounds = range(len(next(iter(turns.values()))))
    kept = [one for one in rounds if all(taken[one] <= limits[name] for name, taken in turns.items())]
    return {name: [taken[one] for one in kept] for name, taken in turns.items()}


def rows_of(timing: Timing) -> list[Row]:
    """Return the table of one length of a step."""
    kept = undisturbed(timing.turns)
    step_ms = 1000 * fmean(kept[OFF])
    rounds, steps = len(kept[OFF]), f"steps of {step_ms:.0f} ms"
    rows = []
    for preset, (floor, aim) in PRESETS.items():
        share, low, high = percent_with_range(kept[preset], kept[OFF])
        about = f"{low:.2f} to {high:.2f} in 19 of 20; {rounds} of {len(timing.turns[OFF])} rounds"
        rows.append(Row(f"{preset}, {steps}", share, "% of a step", floor, aim, about))
        idle_s = timing.idle_s[preset]
        links = ", ".join(f"{link} {every}" for link, every in timing.intervals[preset].items())
        idle_ms = 1000 * median(idle_s) if idle_s else None
        limit = IDLE_MS if idle_s else None
        rows.append(Row(f"{preset}, {steps}, no link due", idle_ms, "ms", limit, limit, f"intervals: {links}"))
    return rows
