"""Policy format and loader, and the history of one rule on one subject.

A rule reads one metric of one kind of sample (``metric = "gpu.temperature_margin_c"``) and tests it. If the test held
in ``n`` of the last ``m`` polls, the rule makes a finding. An unknown value is neither good nor bad: it changes
nothing.

A site's files are laid over the shipped ones table by table and key by key. A table of a rule that exists gives the
keys that it changes; one with all required keys replaces the rule, and inherits nothing.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from everstep.errors import ConfigurationError
from everstep.settings import find_line, load_table, read_text, suggest
from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_agent.drivers.gpu_samples import FabricSample, GpuPeerComparison, GpuSample, LinkSample
from everstep_agent.drivers.samples import (
    DiskSample,
    EarlierBootSample,
    HostSample,
    MemoryModuleSample,
    NvlinkFabricSample,
    OtherGpusSample,
    PathSample,
    PciErrorSample,
    PortCounterGrowth,
    PortSample,
    RaidArraySample,
    SensorState,
    UnitSample,
    value_hints,
)
from everstep_agent.node_profile.profile import ProfileSample
from everstep_agent.policy.xids import XidEntry, load_xid_table, unknown_xid_entry

POLICY_FOLDER = Path(__file__).parent

SCOPES: dict[str, type[msgspec.Struct]] = {
    "gpu": GpuSample,
    "gpu_peers": GpuPeerComparison,
    "link": LinkSample,
    "fabric": FabricSample,
    "node_fabric": NvlinkFabricSample,
    "vendor": OtherGpusSample,
    "port": PortSample,
    "counter": PortCounterGrowth,
    "path": PathSample,
    "host": HostSample,
    "memory": MemoryModuleSample,
    "pci": PciErrorSample,
    "array": RaidArraySample,
    "disk": DiskSample,
    "unit": UnitSample,
    "earlier_boot": EarlierBootSample,
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
    enabled: bool = True  # false turns the rule off

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

    def judge(self, finding: Finding) -> Finding:
        """Return a finding of this rule with the rule's present judgement; its message stays."""
        return msgspec.structs.replace(
            finding,
            kind=self.kind,
            severity=self.severity,
            action=self.action,
            mode=self.mode,
            source=self.source,
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
    enabled: bool = True  # false makes rules judge the line again


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


# Loader: the tables of all files, laid over one another

SECTIONS: dict[str, tuple[type[StrictStruct], str]] = {
    "rule": (FindingRule, "id"),
    "line": (KernelLineRule, "id"),
    "benign": (BenignLine, "id"),
    "xid": (XidOverride, "xid"),
    "xid_clearing": (XidClearing, "action"),
}
"""Struct, and the key that names a table, by section of a policy file."""

REPLACEABLE_SECTIONS = ("rule", "line", "benign")
"""Sections in which a table with all required keys replaces an earlier one. Elsewhere hardly any key is required."""

MAX_POLLS = 3600
"""Largest m of ``n_of_m``, an hour at one poll a second: every subject of the rule keeps so many results."""

SHARE_SUFFIXES = ("_fraction", "_utilization")
"""Endings of metrics that lie between 0 and 1."""


SCOPES_WITHOUT_GPU = ("port", "counter", "path", "host", "sensor", "vendor", "node_fabric")
"""Scopes whose subjects are no GPUs, so that no reset or exchange of a GPU clears their findings."""


class Origin(NamedTuple):
    """Place of a key, or of a whole table, in a policy file."""

    path: Path
    text: str
    table: str  # ".rule[2]"
    key: str = ""

    def __str__(self) -> str:
        line = find_line(self.text, self.table, self.key)
        return str(self.path) if line is None else f"{self.path} line {line}"


class RuleTable(msgspec.Struct):
    """One table of the policy, merged from all files."""

    section: str
    name: str
    values: dict[str, Any]
    origins: dict[str, Origin]  # by key
    place: Origin  # of the newest file's table

    def where(self, key: str = "") -> str:
        """Return the place of a key and the table's name, as errors begin."""
        return f"{self.origins.get(key, self.place)}: [[{self.section}]] {self.name}"


def load_policy(
    site_files: Iterable[str | Path] = (), folder: Path = POLICY_FOLDER, texts: Mapping[str, str] = {}
) -> FindingPolicy:
    """Load the built-in rules and the site's over them. Raises ConfigurationError with file, line and key.

    ``texts``: contents of site files by path, which are not read then.
    """
    return PolicyTables(site_files, folder, texts).build()


class PolicyTables:
    """The merged tables of all policy files. Mistakes are collected, and ``build`` raises all of them at once."""

    def __init__(
        self, site_files: Iterable[str | Path] = (), folder: Path = POLICY_FOLDER, texts: Mapping[str, str] = {}
    ) -> None:
        self._texts = texts
        self.tables: dict[tuple[str, str], RuleTable] = {}
        """By section and name."""
        self._mistakes: list[str] = []
        for path in sorted(folder.glob("*.toml")):
            self._read(path, is_site=False)
        for path in map(Path, site_files):
            self._read(path, is_site=True)

    def build(self) -> FindingPolicy:
        """Return the policy. Raises ConfigurationError with a line for each mistake."""
        built = {key: struct for key, table in self.tables.items() if (struct := self._convert(table)) is not None}
        enabled = {key: struct for key, struct in built.items() if getattr(struct, "enabled", True)}
        rules = tuple(struct for struct in enabled.values() if isinstance(struct, FindingRule))
        lines = tuple(struct for struct in enabled.values() if isinstance(struct, KernelLineRule))
        benign = tuple(struct for struct in enabled.values() if isinstance(struct, BenignLine))
        overrides = {struct.xid: struct for struct in enabled.values() if isinstance(struct, XidOverride)}
        clearing = {struct.action: struct for struct in enabled.values() if isinstance(struct, XidClearing)}
        entries = _apply_overrides(load_xid_table(), overrides)
        for section, name, message in (*_unreachable_rules(rules), *_unreachable_lines(lines, benign)):
            self._mistakes.append(f"{self.tables[section, name].where()}: {message}")
        if missing := [action.value for action in Action if action not in clearing]:
            self._mistakes.append(f"no [[xid_clearing]] clears XIDs of action {', '.join(missing)}")
        if self._mistakes:
            raise ConfigurationError("\n".join(self._mistakes))
        return FindingPolicy(
            rules=rules,
            line_rules=lines,
            benign_lines=benign,
            xid_entries=entries,
            xid_modes={xid: each.mode for xid, each in overrides.items() if each.mode is not None},
            xids_of_site=frozenset(xid for xid, each in overrides.items() if each.severity or each.action),
            xid_clearing=clearing,
        )

    def _read(self, path: Path, *, is_site: bool) -> None:
        try:
            text = self._texts[str(path)] if str(path) in self._texts else read_text(path)
            document = load_table(text, str(path))
        except ConfigurationError as error:
            self._mistakes.append(str(error))
            return
        if not text.strip():  # left by a full disk or a broken copy; it must not undo the site's rules
            self._mistakes.append(f"{path}: the file is empty; a comment makes that intended")
        for section, tables in document.items():
            if section not in SECTIONS:
                place = Origin(path, text, "", section)
                self._mistakes.append(f"{place}: unknown key `{section}`; {suggest(section, SECTIONS)}")
            elif not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
                self._mistakes.append(f"{Origin(path, text, '', section)}: write {section} as [[{section}]]")
            else:
                places = [Origin(path, text, f".{section}[{number}]") for number in range(len(tables))]
                self._add_tables(section, list(zip(tables, places, strict=True)), is_site)

    def _add_tables(self, section: str, tables: list[tuple[dict[str, Any], Origin]], is_site: bool) -> None:
        named_here: dict[str, Origin] = {}
        for table, place in tables:
            name_key = SECTIONS[section][1]
            name = str(table.get(name_key, ""))
            if not name:
                self._mistakes.append(f"{place}: a [[{section}]] needs its {name_key}")
            elif name in named_here:
                self._mistakes.append(f"{place}: [[{section}]] {name} is defined twice, first at {named_here[name]}")
            else:
                named_here[name] = place
                origins = {key: place._replace(key=key) for key in table}
                self._add(RuleTable(section, name, table, origins, place), is_site)

    def _add(self, table: RuleTable, is_site: bool) -> None:
        """Lay a table over the earlier one of its name, if its keys are in order."""
        fields = _keys(table.section)
        missing = [key for key, is_required in fields.items() if is_required and key not in table.values]
        known = self.tables.get((table.section, table.name))
        mistakes = [
            f"{table.where(key)}: unknown key `{key}`; {suggest(key, fields)}"
            for key in table.values
            if key not in fields
        ]
        if missing and known is None:
            mistakes.append(f"{table.where()}: {self._explain_missing(table, missing)}")
        elif known is None and (other := self._find_other(table)):
            mistakes.append(f"{table.where()}: a [[{other}]] has this id already")
        elif is_site and "source" in fields and "source" not in table.values:
            mistakes.append(f"{table.where()}: give the source of the change, such as a ticket")
        if mistakes:
            self._mistakes += mistakes
            return
        if known is not None and (missing or table.section not in REPLACEABLE_SECTIONS):
            table.values, table.origins = known.values | table.values, known.origins | table.origins
        self.tables[table.section, table.name] = table

    def _explain_missing(self, table: RuleTable, missing: list[str]) -> str:
        """Return the message about a table that is neither complete nor the change of a rule that exists."""
        needs = f"a new one needs {', '.join(missing)}"
        if table.section not in REPLACEABLE_SECTIONS:
            return needs
        if other := self._find_other(table):
            return f"the rule of this id is a [[{other}]]"
        names = [name for section, name in self.tables if section == table.section]
        near = difflib.get_close_matches(table.name, names, n=1)
        hint = f"did you mean `{near[0]}`? " if near else ""
        return f"there is no such rule to change; {hint}{needs[0].upper() if near else needs[0]}{needs[1:]}"

    def _find_other(self, table: RuleTable) -> str:
        """Return another section in which the table's id is a rule's; else ""."""
        rules = [section for section in REPLACEABLE_SECTIONS if section != table.section]
        return next((section for section in rules if (section, table.name) in self.tables), "")

    def _convert(self, table: RuleTable) -> StrictStruct | None:
        """Return the table as a struct; None if it has mistakes, which are noted."""
        kind, _ = SECTIONS[table.section]
        before = len(self._mistakes)
        try:
            struct = msgspec.convert(table.values, kind)
        except msgspec.ValidationError as error:
            words, _, place = str(error).partition(" - at `$")
            key = re.split(r"[.\[`]", place.lstrip("."))[0]
            self._mistakes.append(f"{table.where(key)}: {f'{key}: ' if key else ''}{words}")
            return None
        for key, message in _find_mistakes(struct):
            self._mistakes.append(f"{table.where(key)}: {message}")
        return struct if len(self._mistakes) == before else None


@functools.cache
def _keys(section: str) -> dict[str, bool]:
    """Return the keys of a section's tables, and whether each is required."""
    return {field.encode_name: field.required for field in msgspec.structs.fields(SECTIONS[section][0])}


def _apply_overrides(table: dict[int, XidEntry], overrides: dict[int, XidOverride]) -> dict[int, XidEntry]:
    result = dict(table)
    for xid, site in overrides.items():
        entry = table.get(xid) or unknown_xid_entry(xid)
        result[xid] = msgspec.structs.replace(
            entry, severity=site.severity or entry.severity, action=site.action or entry.action, source=site.source
        )
    return result


@functools.cache
def metrics_of(struct: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of a sample's fields and properties that are numbers, those of its parts included."""
    hints = value_hints(struct)
    return tuple(name for name, (_, hint) in hints.items() if _is_number(hint) and not name.startswith("_"))


def _is_number(hint: Any) -> bool:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return all(kind in (int, float, bool, types.NoneType) for kind in kinds)


# Mistakes of one rule: the key to mend, and the message.


def _find_mistakes(struct: StrictStruct) -> Iterator[tuple[str, str]]:
    if isinstance(struct, _Rule):
        yield from _rule_mistakes(struct)
    if isinstance(struct, FindingRule):
        yield from _metric_mistakes(struct)
        yield from _test_mistakes(struct)
        numbers = {"value": 0.0, "threshold": 0.0, "window_s": 0.0}
        yield from _message_mistakes(struct.message, {"subject": "", **numbers, "detail": ""})
    elif isinstance(struct, KernelLineRule):
        yield from _line_mistakes(struct)
        yield from _message_mistakes(struct.message, {"subject": "", "line": "", "times": 0, "within_s": 0.0})
    elif isinstance(struct, BenignLine):
        if not struct.contains:
            yield "contains", "contains must be a text"
        yield from _pattern_mistakes("pattern", struct.pattern)
    elif isinstance(struct, XidOverride):
        if (struct.severity, struct.action, struct.mode) == (None, None, None):
            yield "xid", "it changes nothing: give severity, action or mode"
        if struct.severity is Severity.INFO and struct.mode is Mode.ENFORCE:
            yield "mode", "an XID of severity info has no consequence to enforce"


def _rule_mistakes(rule: _Rule) -> Iterator[tuple[str, str]]:
    if not rule.source.strip():
        yield "source", "the source is empty"
    for key in rule.__struct_fields__:
        value = getattr(rule, key)
        if key.endswith("_s") and value is not None and not 0 <= value < math.inf:
            yield key, f"{key} = {value} must be a number of seconds"
    if rule.severity is Severity.INFO and rule.mode is Mode.ENFORCE and rule.action is not Action.NONE:
        yield "mode", f"severity info has no consequences, so {rule.action.value} cannot be enforced"
    if rule.clear_after_s is None and not rule.clear_on:
        yield "clear_after_s", "the finding would never clear: set clear_after_s, clear_on, or both"
    elif rule.clear_after_s is None and ClearEvent.BOOT not in rule.clear_on and not _may_be_of_gpu(rule):
        yield "clear_on", "the finding would never clear: only GPUs are reset or replaced"


def _may_be_of_gpu(rule: _Rule) -> bool:
    return isinstance(rule, FindingRule) and rule.scope not in SCOPES_WITHOUT_GPU


def _metric_mistakes(rule: FindingRule) -> Iterator[tuple[str, str]]:
    struct = SCOPES.get(rule.scope)
    if struct is None:
        yield "metric", f"metric {rule.metric!r} must begin with one of {', '.join(SCOPES)}"
    elif rule.field not in metrics_of(struct):
        known = [f"{rule.scope}.{name}" for name in metrics_of(struct)]
        yield "metric", f"unknown metric {rule.metric!r}: no sensor gives it; {suggest(rule.metric, known)}"


def _test_mistakes(rule: FindingRule) -> Iterator[tuple[str, str]]:
    n, m = rule.n_of_m
    is_windowed = rule.criterion in (Criterion.INCREASE, Criterion.UNCHANGED)
    if not 1 <= n <= m <= MAX_POLLS:
        yield "n_of_m", f"n_of_m = [{n}, {m}] must be [n, m] with 1 <= n <= m <= {MAX_POLLS}"
    if is_windowed and rule.window_s <= 0:
        yield "window_s", f"criterion {rule.criterion.value!r} needs window_s above zero"
    elif not is_windowed and rule.window_s > 0:
        yield "window_s", f"criterion {rule.criterion.value!r} has no window_s: use n_of_m, or the criterion 'increase'"
    if not math.isfinite(rule.threshold):
        yield "threshold", f"threshold = {rule.threshold} must be a number"
    elif rule.criterion is Criterion.INCREASE and rule.threshold <= 0:
        yield "threshold", "a counter that stands still has increased by 0, so the threshold must be above zero"
    elif not is_windowed and rule.field.endswith(SHARE_SUFFIXES) and not 0 <= rule.threshold <= 1:
        yield "threshold", f"{rule.metric} lies between 0 and 1: write 3 percent as 0.03, not {rule.threshold:g}"


def _line_mistakes(rule: KernelLineRule) -> Iterator[tuple[str, str]]:
    yield from _pattern_mistakes("pattern", rule.pattern)
    yield from _pattern_mistakes("clear_pattern", rule.clear_pattern)
    if not all(rule.contains):
        yield "contains", "an empty text is in every line: remove it"
    if bool(rule.clear_pattern) != bool(rule.clear_contains):
        yield "clear_pattern", "set clear_pattern and clear_contains together"
    if rule.times < 1 or (rule.times > 1) != (rule.within_s > 0):
        yield "times", "times above 1 needs within_s above zero"


def _pattern_mistakes(key: str, pattern: str) -> Iterator[tuple[str, str]]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield key, f"the {key} is not a regular expression: {error}"


def _message_mistakes(message: str, fields: dict[str, object]) -> Iterator[tuple[str, str]]:
    try:
        message.format(**fields)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        names = ", ".join("{" + name + "}" for name in fields)
        yield "message", f"message {message!r} may use {names}: {error!r}"


# Rules that can never apply: section, name and message.

MAX_PATTERNS_PER_LINE = 8
"""Patterns that plain texts may select for one line. A site's rule without plain texts is tried on every line."""


def _unreachable_rules(rules: tuple[FindingRule, ...]) -> Iterator[tuple[str, str, str]]:
    """Yield rules whose findings a graver rule on the same metric, which applies whenever they do, always hides."""
    for rule in rules:
        for other in rules:
            if _covers(other, rule) and other.severity.gravity > rule.severity.gravity:
                yield "rule", rule.id, f"the finding never shows, since the graver rule {other.id} applies as early"


def _covers(rule: FindingRule, other: FindingRule) -> bool:
    """Return whether ``rule`` makes its finding, of the same key, whenever ``other`` does."""

    if rule.metric != other.metric or rule.criterion is not other.criterion:
        return False
    is_same = (rule.kind, rule.subject, rule.window_s) == (other.kind, other.subject, other.window_s)
    sign = -1.0 if rule.criterion is Criterion.AT_MOST else 1.0
    is_wider = rule.criterion is Criterion.UNCHANGED or sign * rule.threshold <= sign * other.threshold
    is_earlier = rule.n_of_m[0] <= other.n_of_m[0] and rule.n_of_m[1] >= other.n_of_m[1]
    return is_same and is_wider and is_earlier and rule.boot_grace_s <= other.boot_grace_s


def _unreachable_lines(
    lines: tuple[KernelLineRule, ...], benign: tuple[BenignLine, ...]
) -> Iterator[tuple[str, str, str]]:
    """Yield rules that no line with their texts ever reaches."""
    in_order = sorted(lines, key=lambda rule: rule.is_fallback)
    for number, rule in enumerate(in_order):
        if rule.contains and (cause := _unreachable_cause(rule, in_order[:number], benign)):
            yield "line", rule.id, f"it never applies, since {cause}"


def _unreachable_cause(rule: KernelLineRule, earlier: list[KernelLineRule], benign: tuple[BenignLine, ...]) -> str:
    if name := _all_hidden(rule, [(each.contains, each.id) for each in benign if not each.pattern]):
        return f"[[benign]] {name} has its lines: turn one of them off with enabled = false"
    fallbacks = [each for each in earlier if each.is_fallback]
    taken = [(text, each.id) for each in fallbacks for text in each.contains if _takes(each, text)]
    if rule.is_fallback and (name := _all_hidden(rule, taken)):
        return f"the fallback {name} takes its lines"
    rivals = [sum(any(known in text for known in each.contains) for each in earlier) for text in rule.contains]
    return f"{min(rivals)} rules have its texts: give longer ones" if min(rivals) >= MAX_PATTERNS_PER_LINE else ""


def _all_hidden(rule: KernelLineRule, hiding: list[tuple[str, str]]) -> str:
    """Return the name of a text that hides the rule, if each of the rule's texts contains such a one; else ""."""
    found = [next((name for text, name in hiding if text in own), "") for own in rule.contains]
    return found[0] if all(found) else ""


def _takes(fallback: KernelLineRule, text: str) -> bool:
    """Return whether the fallback applies to every line with its own text."""
    return re.search(fallback.pattern, text) is not None


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

    def change_rule(self, rule: FindingRule) -> bool:
        """Go on by a changed rule. Returns whether the history can be kept: not if the rule tests something else.

        An active rule stays active if the value that made it so is still bad.
        """
        before, self.rule = self.rule, rule
        if (before.metric, before.criterion) != (rule.metric, rule.criterion):
            return False
        if self._recent_results.maxlen != rule.n_of_m[1]:
            self._recent_results = deque(self._recent_results, maxlen=rule.n_of_m[1])
        test = before.threshold, before.window_s
        if test == (rule.threshold, rule.window_s):
            return True
        self._recent_results.clear()  # they are of the earlier threshold
        is_windowed = rule.criterion in (Criterion.INCREASE, Criterion.UNCHANGED)
        same_window = not is_windowed or before.window_s == rule.window_s
        self.is_active = self.is_active and same_window and self._is_bad(self.value)
        return True

    def restore_active(self, value: float) -> None:
        """Restore an active rule after a restart of the agent."""
        self.is_active, self.value = True, value

    def _is_bad(self, value: float) -> bool:
        """Return whether a value that was shown passes the threshold."""
        match self.rule.criterion:
            case Criterion.AT_LEAST | Criterion.INCREASE:
                return value >= self.rule.threshold
            case Criterion.AT_MOST:
                return value <= self.rule.threshold
            case Criterion.UNCHANGED:
                return True

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
            case Criterion.AT_LEAST | Criterion.AT_MOST:
                return self._is_bad(value), value
            case Criterion.INCREASE:
                grown = self._increase_in_window(value, now_s)
                return self._is_bad(grown), grown
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
