"""One rule on one subject through time: N of M, windows, grace, clearing. Pure; seconds are arguments."""

from __future__ import annotations

from collections import deque

from agent.policy.rules import Criterion, Event, Rule

WINDOW_PARTS = 64
"""A window is remembered at this resolution, so that an hour costs no more memory than a minute."""


class RuleHistory:
    """Whether the rule stands (``standing``), and the value that made it so."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.standing = False
        self.value = 0.0
        self._seen: deque[bool] = deque(maxlen=rule.n_of[1])
        self._window: deque[tuple[float, float]] = deque()
        self._moved_at: float | None = None
        self._last = 0.0
        self._good_since: float | None = None

    def take(self, value: float | None, now_s: float, uptime_s: float | None) -> bool:
        """Takes one poll's value; True where the rule has begun or ceased to stand. None moves nothing."""
        rule = self.rule
        if value is None or (uptime_s is not None and uptime_s < rule.boot_grace_s):
            return False
        judged = self._judged(value, now_s)
        if judged is None:
            return False
        bad, shown = judged
        self._seen.append(bad)
        if sum(self._seen) >= rule.n_of[0] and not self.standing:
            self.standing, self.value, self._good_since = True, shown, None
            return True
        return self.standing and self._ceases(bad, now_s)

    def event(self, event: Event) -> bool:
        """A reset, a boot or a replacement: history is void; True where the rule ceased to stand by it."""
        self._seen.clear()
        self._window.clear()
        self._moved_at = self._good_since = None
        if self.standing and event in self.rule.clear_on:
            self.standing = False
            return True
        return False

    def resume(self, value: float) -> None:
        """Stands again, as it did before the agent was restarted."""
        self.standing, self.value = True, value

    def _ceases(self, bad: bool, now_s: float) -> bool:
        if bad:
            self._good_since = None
            return False
        if self._good_since is None:
            self._good_since = now_s
        after_s = self.rule.clear_after_s
        if after_s is None or now_s - self._good_since < after_s:
            return False
        self.standing = False
        self._seen.clear()
        return True

    def _judged(self, value: float, now_s: float) -> tuple[bool, float] | None:
        """Whether the value is bad, and what to show for it. None: too early to tell."""
        rule = self.rule
        match rule.test:
            case Criterion.AT_LEAST:
                return value >= rule.threshold, value
            case Criterion.AT_MOST:
                return value <= rule.threshold, value
            case Criterion.INCREASE:
                grown = self._grown(value, now_s)
                return grown >= rule.threshold, grown
            case Criterion.UNCHANGED:
                return self._still_s(value, now_s) >= rule.window_s, value

    def _grown(self, value: float, now_s: float) -> float:
        window = self._window
        if window and value < window[-1][1]:
            window.clear()
        if not window or now_s - window[-1][0] >= self.rule.window_s / WINDOW_PARTS:
            window.append((now_s, value))
        while len(window) > 1 and window[1][0] <= now_s - self.rule.window_s:
            window.popleft()
        return value - window[0][1]

    def _still_s(self, value: float, now_s: float) -> float:
        if self._moved_at is None or value != self._last:
            self._moved_at, self._last = now_s, value
        return now_s - self._moved_at
