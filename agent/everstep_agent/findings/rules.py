"""Policy format and loader, and the history of one rule on one subject.

A rule reads one metric of one kind of sample (``metric = "gpu.temperature_margin_c"``) and tests it. If the test held
in ``n`` of the last ``m`` polls, the rule makes a finding. An unknown value is neither good nor bad: it changes
nothing.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from everstep.errors import ConfigurationError
from everstep.settings import load_toml
from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_agent.drivers.samples import (
    GpuSample,
    HostSample,
    LinkSample,
    PathSample,
    PortCounts,
    PortSample,
    SensorState,
)
from everstep_agent.findings.profile import ProfileSample
from everstep_agent.findings.xids import XidEntry, load_xid_table, unknown_xid_entry

POLICY_FOLDER = Path(__file__).parents[1] / "policy"

SCOPES: dict[str, type[msgspec.Struct]] = {
    "gpu": GpuSample,
    "link": LinkSample,
    "port": PortSample,
    "counter": PortCounts,
    "path": PathSample,
    "host": HostSample,
    "sensor": SensorState,
    "profile": ProfileSample,
}


class Criterion(StrEnum):
    """Test of a value. INCREASE: it grew by the threshold within the window. UNCHANGED: it never changed in the
    window."""

    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    INCREASE = "increase"
    UNCHANGED = "unchanged"


class ClearEvent(StrEnum):
    """Events that clear a finding: the machine booted, the GPU was reset, another GPU sits there."""

    BOOT = "boot"
    RESET = "reset"
    REPLACED = "replaced"


class StrictStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class that rejects unknown keys."""


class _Rule(StrictStruct, frozen=True, kw_only=True):
    """The finding that a rule makes, and its end."""

    id: str
    kind: FindingKind
    severity: Severity
    message: str  # may have fields in braces: see ``_checked`` and ``_checked_line``
    source: str
    action: Action = Action.NONE
    mode: Mode = Mode.RECOMMEND
    clear_after_s: float | None = None  # the finding clears when its cause has been absent for so long
    clear_on: tuple[ClearEvent, ...] = ()  # events that clear the finding

    def finding(self, subject: str, message: str, since: float) -> Finding:
        return Finding(
            kind=self.kind,
            subject=subject,
            severity=self.severity,
            message=message,
            action=self.action,
            mode=self.mode,
            rule=self.id,
            source=self.source,
            since=since,
        )


class FindingRule(_Rule, frozen=True, kw_only=True):
    """One rule on a measured value."""

    metric: str
    criterion: Criterion
    threshold: float
    subject: str = ""  # replaces the sample's own subject in the finding
    n_of_m: tuple[int, int] = (1, 1)  # [n, m]: bad in n of the last m polls
    window_s: float = 0.0  # the window of INCREASE and UNCHANGED
    boot_grace_s: float = 0.0  # seconds after boot during which the rule is not applied
    clear_unknown_after_s: float | None = None  # the finding clears when its value has been unknown for so long

    @property
    def scope(self) -> str:
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        return self.metric.partition(".")[2]


class KernelLineRule(_Rule, frozen=True, kw_only=True):
    """One rule on a line of the kernel log: a match is a finding. A named group ``subject`` gives its subject."""

    pattern: str
    contains: tuple[str, ...] = ()  # the pattern is tried only on lines with one of these texts
    times: int = 1  # matches on one subject within ``within_s`` that make the finding
    within_s: float = 0.0
    clear_pattern: str = ""  # a line that ends the finding of its subject
    clear_contains: str = ""  # the clearing pattern is tried only on lines with this text
    is_fallback: bool = False  # tried only on lines that nothing else knows


class BenignLine(StrictStruct, frozen=True, kw_only=True):
    """A line of the kernel log that is no fault, though a rule's pattern might match it. No rule is tried on it."""

    id: str
    contains: str  # text that the line has
    source: str
    pattern: str = ""  # the line has to match this too, if it is given


R = TypeVar("R", bound=_Rule)


class XidOverride(StrictStruct, frozen=True, kw_only=True):
    """A site's settings for an XID; omitted ones stay as in the table."""

    xid: int
    source: str
    severity: Severity | None = None
    action: Action | None = None
    mode: Mode | None = None


class XidClearing(StrictStruct, frozen=True, kw_only=True):
    """When an XID finding clears, by the action that would cure it."""

    action: Action
    clear_after_s: float | None = None
    clear_on: tuple[ClearEvent, ...] = ()


class FindingPolicyFile(StrictStruct, frozen=True, kw_only=True):
    """One policy file; all parts are optional."""

    rule: tuple[FindingRule, ...] = ()
    line: tuple[KernelLineRule, ...] = ()
    benign: tuple[BenignLine, ...] = ()
    xid: tuple[XidOverride, ...] = ()
    xid_clearing: tuple[XidClearing, ...] = ()


class FindingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """All rules by which samples are judged."""

    rules: tuple[FindingRule, ...]
    line_rules: tuple[KernelLineRule, ...]
    benign_lines: tuple[BenignLine, ...]
    xid_entries: dict[int, XidEntry]
    xid_modes: dict[int, Mode]
    xids_of_site: frozenset[int]  # numbers that a site judges itself, so that no decoding changes them
    xid_clearing: dict[Action, XidClearing]

    def get_xid_entry(self, number: int) -> XidEntry:
        return self.xid_entries.get(number) or unknown_xid_entry(number)

    def get_xid_mode(self, number: int) -> Mode:
        """Return the permitted automatic response: evict for a fatal XID, watch the others."""
        default = Mode.ENFORCE if self.get_xid_entry(number).severity is Severity.CRITICAL else Mode.OBSERVE
        return self.xid_modes.get(number, default)


def load_policy(site_files: Iterable[str | Path] = (), folder: Path = POLICY_FOLDER) -> FindingPolicy:
    """Load the built-in rules and the site's over them. Raises ConfigurationError with file, line and key."""
    rules: dict[str, FindingRule] = {}
    lines: dict[str, KernelLineRule] = {}
    benign: dict[str, BenignLine] = {}
    clearing: dict[Action, XidClearing] = {}
    overrides: dict[int, XidOverride] = {}
    for path in [*sorted(folder.glob("*.toml")), *map(Path, site_files)]:
        known = (FindingPolicyFile, FindingRule, KernelLineRule, BenignLine, XidOverride, XidClearing)
        part = load_toml(path, FindingPolicyFile, known)
        rules |= {rule.id: _checked(rule, path) for rule in part.rule}
        lines |= {rule.id: _checked_line(rule, path) for rule in part.line}
        benign |= {each.id: _checked_benign(each, path) for each in part.benign}
        clearing |= {each.action: each for each in part.xid_clearing}
        overrides |= {each.xid: each for each in part.xid}
    missing = [action.value for action in Action if action not in clearing]
    if missing:
        raise ConfigurationError(f"{folder}: no [[xid_clearing]] clears XIDs of action {', '.join(missing)}")
    return FindingPolicy(
        rules=tuple(rules.values()),
        line_rules=tuple(lines.values()),
        benign_lines=tuple(benign.values()),
        xid_entries=_apply_overrides(load_xid_table(), overrides),
        xid_modes={xid: each.mode for xid, each in overrides.items() if each.mode is not None},
        xids_of_site=frozenset(xid for xid, each in overrides.items() if each.severity or each.action),
        xid_clearing=clearing,
    )


def _apply_overrides(table: dict[int, XidEntry], overrides: dict[int, XidOverride]) -> dict[int, XidEntry]:
    result = dict(table)
    for xid, site in overrides.items():
        entry = table.get(xid) or unknown_xid_entry(xid)
        result[xid] = msgspec.structs.replace(
            entry, severity=site.severity or entry.severity, action=site.action or entry.action, source=site.source
        )
    return result


def _checked(rule: FindingRule, path: Path) -> FindingRule:
    where = f"{path}: rule {rule.id!r}"
    struct = SCOPES.get(rule.scope)
    if struct is None:
        raise ConfigurationError(f"{where}: metric {rule.metric!r} must begin with one of {', '.join(SCOPES)}")
    if not hasattr(struct, rule.field):
        raise ConfigurationError(f"{where}: unknown metric {rule.metric!r}; see everstep_agent/drivers/samples.py")
    n, m = rule.n_of_m
    if not 1 <= n <= m:
        raise ConfigurationError(f"{where}: n_of_m = [{n}, {m}] must be [n, m] with 1 <= n <= m")
    if rule.criterion in (Criterion.INCREASE, Criterion.UNCHANGED) and rule.window_s <= 0:
        raise ConfigurationError(f"{where}: criterion {rule.criterion.value!r} needs window_s above zero")
    numbers = {"value": 0.0, "threshold": 0.0, "window_s": 0.0}
    return _with_checked_finding(rule, where, {"subject": "", **numbers, "detail": ""})


def _checked_line(rule: KernelLineRule, path: Path) -> KernelLineRule:
    where = f"{path}: line rule {rule.id!r}"
    _check_pattern(rule.pattern, where)
    _check_pattern(rule.clear_pattern, where)
    if bool(rule.clear_pattern) != bool(rule.clear_contains):
        raise ConfigurationError(f"{where}: set clear_pattern and clear_contains together")
    if rule.times < 1 or (rule.times > 1) != (rule.within_s > 0):
        raise ConfigurationError(f"{where}: times above 1 needs within_s above zero")
    return _with_checked_finding(rule, where, {"subject": "", "line": "", "times": 0, "within_s": 0.0})


def _checked_benign(benign: BenignLine, path: Path) -> BenignLine:
    where = f"{path}: benign line {benign.id!r}"
    if not benign.contains:
        raise ConfigurationError(f"{where}: contains must be a text")
    _check_pattern(benign.pattern, where)
    return benign


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{where}: the pattern is not a regular expression: {error}") from error


def _with_checked_finding(rule: R, where: str, fields: dict[str, object]) -> R:
    if rule.clear_after_s is None and not rule.clear_on:
        raise ConfigurationError(f"{where}: the finding would never clear: set clear_after_s, clear_on, or both")
    try:
        rule.message.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join("{" + name + "}" for name in fields)
        raise ConfigurationError(f"{where}: message {rule.message!r} may use {names}: {error!r}") from error
    return rule


# Rule history: N of M, windows, grace and clearing of one rule on one subject. Pure; seconds are arguments.

MAX_WINDOW_SAMPLES = 64
"""Resolution of a window, so that an hour costs no more memory than a minute."""


class RuleHistory:
    """State of one rule on one subject: ``is_active``, and the ``value`` that made it so."""

    def __init__(self, rule: FindingRule) -> None:
        self.rule = rule
        self.is_active = False
        self.value = 0.0
        self._recent_results: deque[bool] = deque(maxlen=rule.n_of_m[1])
        self._window: deque[tuple[float, float]] = deque()
        self._changed_at: float | None = None
        self._last_value = 0.0
        self._good_since: float | None = None
        self._unknown_since: float | None = None

    def add_value(self, value: float | None, now_s: float, uptime_s: float | None) -> bool:
        """Add one poll's value. Returns whether ``is_active`` changed.

        None changes nothing, unless the rule clears when its value stays unknown.
        """
        rule = self.rule
        if value is None:
            return self._should_clear_unknown(now_s)
        self._unknown_since = None
        if uptime_s is not None and uptime_s < rule.boot_grace_s:
            return False
        judged = self._test(value, now_s)
        if judged is None:
            return False
        bad, shown = judged
        self._recent_results.append(bad)
        if sum(self._recent_results) >= rule.n_of_m[0] and not self.is_active:
            self.is_active, self.value, self._good_since = True, shown, None
            return True
        return self.is_active and self._should_clear(bad, now_s)

    def apply_clear_event(self, event: ClearEvent) -> bool:
        """Drop the history after a reset, a boot or a replacement. Returns whether the rule ceased to be active."""
        self._recent_results.clear()
        self._window.clear()
        self._changed_at = self._good_since = None
        if self.is_active and event in self.rule.clear_on:
            self.is_active = False
            return True
        return False

    def restore_active(self, value: float) -> None:
        """Restore an active rule after a restart of the agent."""
        self.is_active, self.value = True, value

    def _should_clear(self, bad: bool, now_s: float) -> bool:
        if bad:
            self._good_since = None
            return False
        if self._good_since is None:
            self._good_since = now_s
        after_s = self.rule.clear_after_s
        if after_s is None or now_s - self._good_since < after_s:
            return False
        self.is_active = False
        self._recent_results.clear()
        return True

    def _should_clear_unknown(self, now_s: float) -> bool:
        after_s = self.rule.clear_unknown_after_s
        if not self.is_active or after_s is None:
            return False
        if self._unknown_since is None:
            self._unknown_since = now_s
        if now_s - self._unknown_since < after_s:
            return False
        self.is_active, self._unknown_since = False, None
        self._recent_results.clear()
        return True

    def _test(self, value: float, now_s: float) -> tuple[bool, float] | None:
        """Return whether the value is bad, and the value to show; None if it is too early to tell."""
        rule = self.rule
        match rule.criterion:
            case Criterion.AT_LEAST:
                return value >= rule.threshold, value
            case Criterion.AT_MOST:
                return value <= rule.threshold, value
            case Criterion.INCREASE:
                grown = self._increase_in_window(value, now_s)
                return grown >= rule.threshold, grown
            case Criterion.UNCHANGED:
                return self._unchanged_for_s(value, now_s) >= rule.window_s, value

    def _increase_in_window(self, value: float, now_s: float) -> float:
        window = self._window
        if window and value < window[-1][1]:
            window.clear()
        if not window or now_s - window[-1][0] >= self.rule.window_s / MAX_WINDOW_SAMPLES:
            window.append((now_s, value))
        while len(window) > 1 and window[1][0] <= now_s - self.rule.window_s:
            window.popleft()
        return value - window[0][1]

    def _unchanged_for_s(self, value: float, now_s: float) -> float:
        if self._changed_at is None or value != self._last_value:
            self._changed_at, self._last_value = now_s, value
        return now_s - self._changed_at
