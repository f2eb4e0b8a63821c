"""Other detectors of silent corruption, fed from the same runs: what they read in each step, and when they fire.

Thresholds lie just above all that undisturbed runs of the same configuration show, so no detector here has a false
alarm in them. He et al. (ISCA'23) derive bounds of the moments from the optimizer's formula; a bound fitted to the run,
as here, is tighter and so sees more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from bench.sdc.networks import Network
from bench.sdc.sites import local
from everstep_trainer.sdc.audit import is_in_backward

MARGIN = 1.25
"""Thresholds over the largest value of undisturbed runs."""
HISTORY = 32
REPLICA_STEPS = 50
LOSS_SPIKE, NORM_SPIKE, NOT_FINITE = "loss spike", "gradient norm spike", "NaN or infinity"
MOMENT_BOUNDS, XOR, REPLICA_HASH = "moment bounds", "XOR of recomputation", "replica hash"
PEERS = (LOSS_SPIKE, NORM_SPIKE, NOT_FINITE, MOMENT_BOUNDS, XOR, REPLICA_HASH)


@dataclass
class StepSignals:
    """The observations of one rank in one step."""

    loss: float
    gradient_norm: float
    first_moment: float
    second_moment: float
    differing_blocks: int
    """Blocks whose XOR fingerprints differ between forward and recomputation."""


class PeerSignals:
    """The readings of one rank. It reads each step as other detectors do: in full."""

    def __init__(self, inner: Network, optimizer: torch.optim.Optimizer) -> None:
        self._inner, self._optimizer = inner, optimizer
        self._norm = 0.0
        self._forward: dict[int, int] = {}
        self._differing = 0

    @contextmanager
    def install(self) -> Iterator[None]:
        """Fingerprint the outputs of blocks that are computed again."""
        with ExitStack() as stack:
            for number, block in enumerate(self._inner.blocks if self._inner.recompute else ()):
                hook = block.register_forward_hook(self._fingerprint(number))
                stack.callback(hook.remove)
            yield

    def _fingerprint(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            value = int(torch.hash_tensor(output.detach()))
            if not is_in_backward():
                self._forward[number] = value
            elif self._forward.pop(number, value) != value:
                self._differing += 1

        return hook

    def after_backward(self) -> None:
        """Read the gradients."""
        gradients = [local(parameter.grad) for parameter in self._inner.parameters() if parameter.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm(gradients))

    def read(self, loss: float) -> StepSignals:
        """Return the step's readings."""
        state = list(self._optimizer.state.values())
        first = max(float(local(moments["exp_avg"]).abs().max()) for moments in state)
        second = max(float(local(moments["exp_avg_sq"]).max()) for moments in state)
        differing, self._differing = self._differing, 0
        self._forward.clear()
        return StepSignals(loss, self._norm, first, second, differing)


Signals = Sequence[Sequence[StepSignals]]
"""Of each rank, by step."""


@dataclass(frozen=True)
class Thresholds:
    """Smallest readings that count as corruption."""

    loss_jump: float
    norm_jump: float
    first_moment: float
    second_moment: float

    @staticmethod
    def fit(clean: Sequence[Signals]) -> Thresholds:
        """Return thresholds above everything in undisturbed runs."""
        ranks = [rank for run in clean for rank in run]
        return Thresholds(
            loss_jump=MARGIN * max(max(_jumps([signal.loss for signal in rank])) for rank in ranks),
            norm_jump=MARGIN * max(max(_jumps([signal.gradient_norm for signal in rank])) for rank in ranks),
            first_moment=MARGIN * max(signal.first_moment for rank in ranks for signal in rank),
            second_moment=MARGIN * max(signal.second_moment for rank in ranks for signal in rank),
        )

    def first_alarms(self, signals: Signals, replicas_differ: Sequence[int]) -> dict[str, int]:
        """Return the first step in which each detector fires on any rank; 0: never.

        Args:
            signals: The readings of all ranks.
            replicas_differ: Steps after which the replicas' parameters differed.
        """
        return {
            LOSS_SPIKE: _first_of(signals, lambda rank: [j > self.loss_jump for j in _jumps([s.loss for s in rank])]),
            NORM_SPIKE: _first_of(
                signals, lambda rank: [j > self.norm_jump for j in _jumps([s.gradient_norm for s in rank])]
            ),
            NOT_FINITE: _first_of(
                signals, lambda rank: [not math.isfinite(s.loss) or not math.isfinite(s.gradient_norm) for s in rank]
            ),
            MOMENT_BOUNDS: _first_of(
                signals,
                lambda rank: [
                    not (s.first_moment <= self.first_moment and s.second_moment <= self.second_moment) for s in rank
                ],
            ),
            XOR: _first_of(signals, lambda rank: [s.differing_blocks > 0 for s in rank]),
            REPLICA_HASH: next((step for step in replicas_differ if step % REPLICA_STEPS == 0), 0),
        }


def _first_of(signals: Signals, alarms: Any) -> int:
    found = [step for rank in signals for step, alarm in enumerate(alarms(rank), 1) if alarm]
    return min(found, default=0)


def _jumps(values: Sequence[float]) -> list[float]:
    """Return by how many median deviations each value lies above the median of those before it."""
    jumps = []
    for at, value in enumerate(values):
        before = [value for value in values[max(0, at - HISTORY) : at] if math.isfinite(value)]
        if len(before) < HISTORY // 4:
            jumps.append(0.0)
            continue
        middle = median(before)
        deviation = median(abs(earlier - middle) for earlier in before) or 1e-12
        jumps.append((value - middle) / deviation)
    return jumps
