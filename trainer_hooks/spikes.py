"""Whether a loss is one to go on from: a pure judgement over those before it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import msgspec

NORMAL_MAD = 1.4826
"""Standard deviations in a median absolute deviation, of normal noise."""
LEAST_SPREAD = 0.01
"""Of the median: losses that happen to be nearly equal do not make the next one a spike."""


class SpikeRule(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as a spike: a loss that many spreads above the median of the last ones.

    spike: in standard deviations, estimated from the median absolute deviation; None: only NaN and infinities count.
    window: losses that are looked at. More: a slow change is mistaken for a spike sooner; fewer: noise is.
    warmup: losses that are needed before anything but NaN counts.
    """

    spike: float | None = 10.0
    window: int = 64
    warmup: int = 16

    def __post_init__(self) -> None:
        if self.spike is not None and self.spike <= 0:
            raise ValueError(f"spike is {self.spike}: a positive number of standard deviations, or None for NaN only")
        if not 2 <= self.warmup <= self.window:
            raise ValueError(f"warmup is {self.warmup}: take 2 up to the window of {self.window} losses")


class LossHistory:
    """The last losses that were fit to go on from, the newest last."""

    def __init__(self, rule: SpikeRule, losses: list[float] | None = None) -> None:
        self._rule = rule
        self.losses: deque[float] = deque(losses or (), maxlen=rule.window)

    def judge(self, loss: float) -> str:
        """What is wrong with it, as a phrase; empty where nothing is."""
        if not math.isfinite(loss):
            return f"it is {loss}"
        if self._rule.spike is None or len(self.losses) < self._rule.warmup:
            return ""
        middle = median(self.losses)
        spread = max(NORMAL_MAD * median(abs(past - middle) for past in self.losses), LEAST_SPREAD * abs(middle))
        if loss <= middle + self._rule.spike * spread:
            return ""
        return f"it is {(loss - middle) / spread:.1f} standard deviations above the last {len(self.losses)}"

    def add(self, loss: float) -> None:
        self.losses.append(loss)
