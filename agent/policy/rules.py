"""The shape of a policy, and its loader.

A rule reads one metric of one kind of sample (``metric = "gpu.temperature_margin_c"``), tests it, and, where the test
held in ``n`` of the last ``m`` polls, makes a finding. An unknown value is neither good nor bad: it moves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec

from agent.sensors.samples import GpuSample, HostSample, PathSample, PortSample, SensorState
from agent.xids import XidEntry, load_xids, unknown_xid
from everstep.errors import ConfigurationError
from everstep.strict_toml import load_toml
from everstep.vocabulary import Action, FindingKind, Mode, Severity

POLICY_FOLDER = Path(__file__).parent

SCOPES: dict[str, type[msgspec.Struct]] = {
    "gpu": GpuSample,
    "port": PortSample,
    "path": PathSample,
    "host": HostSample,
    "sensor": SensorState,
}


class Criterion(StrEnum):
    """How a value is judged. INCREASE: it grew by the threshold within the window. UNCHANGED: it never moved in it."""

    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    INCREASE = "increase"
    UNCHANGED = "unchanged"


class Event(StrEnum):
    """What ends a finding that time does not: the machine booted, the GPU was reset, another GPU sits there."""

    BOOT = "boot"
    RESET = "reset"
    REPLACED = "replaced"


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base: a key that nobody knows is an error."""


class Rule(Strict, frozen=True, kw_only=True):
    """One rule on a measured value.

    ``n_of`` = [n, m]: bad in n of the last m polls. ``window_s``: for increase and unchanged. ``boot_grace_s``: not
    judged while the machine is up for less. Over when the test has failed for ``clear_after_s``, or on one of
    ``clear_on``. ``subject`` replaces the sample's own in the finding. ``message`` may use {subject}, {value},
    {threshold}, {window_s} and {detail}.
    """

    id: str
    kind: FindingKind
    metric: str
    test: Criterion
    threshold: float
    severity: Severity
    message: str
    source: str
    subject: str = ""
    n_of: tuple[int, int] = (1, 1)
    window_s: float = 0.0
    boot_grace_s: float = 0.0
    action: Action = Action.NONE
    mode: Mode = Mode.RECOMMEND
    clear_after_s: float | None = None
    clear_on: tuple[Event, ...] = ()

    @property
    def scope(self) -> str:
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        return self.metric.partition(".")[2]


class LineRule(Strict, frozen=True, kw_only=True):
    """One rule on a line of the kernel log: a match is a finding. A named group ``subject`` names what it is about."""

    id: str
    kind: FindingKind
    pattern: str
    severity: Severity
    message: str
    source: str
    action: Action = Action.NONE
    mode: Mode = Mode.RECOMMEND
    clear_after_s: float | None = None
    clear_on: tuple[Event, ...] = ()


class XidOverride(Strict, frozen=True, kw_only=True):
    """A site's own word on an XID; what it leaves out stays as the table has it."""

    xid: int
    source: str
    severity: Severity | None = None
    action: Action | None = None
    mode: Mode | None = None


class Clearing(Strict, frozen=True, kw_only=True):
    """When an XID finding is over, by the action that would cure it."""

    action: Action
    clear_after_s: float | None = None
    clear_on: tuple[Event, ...] = ()


class PolicyFile(Strict, frozen=True, kw_only=True):
    """One file; all parts may be left out."""

    rule: tuple[Rule, ...] = ()
    line: tuple[LineRule, ...] = ()
    xid: tuple[XidOverride, ...] = ()
    xid_clearing: tuple[Clearing, ...] = ()


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """All that samples are judged by."""

    rules: tuple[Rule, ...]
    lines: tuple[LineRule, ...]
    xids: dict[int, XidEntry]
    xid_modes: dict[int, Mode]
    xid_clearing: dict[Action, Clearing]

    def xid(self, number: int) -> XidEntry:
        return self.xids.get(number) or unknown_xid(number)

    def xid_mode(self, number: int) -> Mode:
        """What may be done about it by itself: evict for a fatal one, watch the others."""
        default = Mode.ENFORCE if self.xid(number).severity is Severity.CRITICAL else Mode.OBSERVE
        return self.xid_modes.get(number, default)

    def clearing(self, action: Action) -> Clearing:
        return self.xid_clearing[action]


def load_policy(site: Iterable[str | Path] = (), folder: Path = POLICY_FOLDER) -> Policy:
    """Our rules, and the site's over them. Raises ConfigurationError with file, line and key for what is wrong."""
    rules: dict[str, Rule] = {}
    lines: dict[str, LineRule] = {}
    clearing: dict[Action, Clearing] = {}
    overrides: dict[int, XidOverride] = {}
    for path in [*sorted(folder.glob("*.toml")), *map(Path, site)]:
        part = load_toml(path, PolicyFile, (PolicyFile, Rule, LineRule, XidOverride, Clearing))
        rules |= {rule.id: _checked(rule, path) for rule in part.rule}
        lines |= {rule.id: _checked_line(rule, path) for rule in part.line}
        clearing |= {each.action: each for each in part.xid_clearing}
        overrides |= {each.xid: each for each in part.xid}
    missing = [action.value for action in Action if action not in clearing]
    if missing:
        raise ConfigurationError(
            f"{folder}: no [[xid_clearing]] says when XIDs of action {', '.join(missing)} are over"
        )
    return Policy(
        rules=tuple(rules.values()),
        lines=tuple(lines.values()),
        xids=_overridden(load_xids(), overrides),
        xid_modes={xid: each.mode for xid, each in overrides.items() if each.mode is not None},
        xid_clearing=clearing,
    )


def _overridden(table: dict[int, XidEntry], overrides: dict[int, XidOverride]) -> dict[int, XidEntry]:
    result = dict(table)
    for xid, site in overrides.items():
        entry = table.get(xid) or unknown_xid(xid)
        result[xid] = msgspec.structs.replace(
            entry, severity=site.severity or entry.severity, action=site.action or entry.action, source=site.source
        )
    return result


def _checked(rule: Rule, path: Path) -> Rule:
    where = f"{path}: rule {rule.id!r}"
    struct = SCOPES.get(rule.scope)
    if struct is None:
        raise ConfigurationError(f"{where}: metric {rule.metric!r} must begin with one of {', '.join(SCOPES)}")
    if not hasattr(struct, rule.field):
        raise ConfigurationError(f"{where}: no metric {rule.metric!r}; see agent/sensors/samples.py")
    n, m = rule.n_of
    if not 1 <= n <= m:
        raise ConfigurationError(f"{where}: n_of = [{n}, {m}] must be [n, m] with 1 <= n <= m")
    if rule.test in (Criterion.INCREASE, Criterion.UNCHANGED) and rule.window_s <= 0:
        raise ConfigurationError(f"{where}: test {rule.test.value!r} needs window_s above zero")
    _check_end(where, rule.clear_after_s, rule.clear_on)
    _check_message(where, rule.message, {"subject": "", "value": 0.0, "threshold": 0.0, "window_s": 0.0, "detail": ""})
    return rule


def _checked_line(rule: LineRule, path: Path) -> LineRule:
    where = f"{path}: line rule {rule.id!r}"
    try:
        re.compile(rule.pattern)
    except re.error as error:
        raise ConfigurationError(f"{where}: pattern is no regular expression: {error}") from error
    _check_end(where, rule.clear_after_s, rule.clear_on)
    _check_message(where, rule.message, {"subject": "", "line": ""})
    return rule


def _check_end(where: str, clear_after_s: float | None, clear_on: tuple[Event, ...]) -> None:
    if clear_after_s is None and not clear_on:
        raise ConfigurationError(f"{where}: has no end: give clear_after_s, clear_on, or both")


def _check_message(where: str, message: str, fields: dict[str, object]) -> None:
    try:
        message.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join("{" + name + "}" for name in fields)
        raise ConfigurationError(f"{where}: message {message!r} may use {names}: {error!r}") from error
