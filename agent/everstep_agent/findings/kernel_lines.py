"""Findings from lines of the kernel log, by rules and by the table of SXids. Pure: no clock, no files.

The log can flood, so that each line costs little and memory is bounded: plain texts select the few patterns that are
tried on a line, one finding stands for all lines of a rule on a subject, and its number is shown when it has doubled.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep_agent.policy.rules import MAX_PATTERNS_PER_LINE, BenignLine, ClearEvent, FindingPolicy, KernelLineRule
from everstep_agent.policy.sxids import SXID_MARK, is_sxid_detail, parse_sxid, sxid_rule

MAX_LINE_FINDINGS = 64
"""Maximum number of active findings from lines, and one more for those that do not fit."""
MAX_LINE_LENGTH = 1024
"""Characters of a line that patterns see."""
MAX_SHOWN_LENGTH = 300
MAX_DISTINCT_LINES = 8
"""Different lines that a finding for unknown lines shows."""
MAX_LINKS = 64
MAX_PENDING = 256
"""Subjects for which matches are counted that do not make a finding yet."""

SXID_TOTAL = "sxid"
"""Name under which SXids of all numbers are counted."""

_DIGITS = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{4,}|\d+")

OVERFLOW_SUBJECT = "kernel-log"
OVERFLOW_RULE = KernelLineRule(
    id="kernel-lines-overflow",
    kind=FindingKind.HOST_KERNEL,
    severity=Severity.WARNING,
    action=Action.NONE,
    mode=Mode.OBSERVE,
    message="the kernel log has more faults than are told apart; the newest: {line}",
    source=f"the agent keeps {MAX_LINE_FINDINGS} findings of lines apart",
    pattern="",
    clear_after_s=600.0,
    clear_on=(ClearEvent.BOOT,),
)


class _LineState(msgspec.Struct):
    """One active finding. ``reported_count`` is the count that the finding shows."""

    rule: KernelLineRule
    finding: Finding
    line: str  # the first
    last_seen_s: float
    count: int = 1
    reported_count: int = 1
    distinct: dict[str, str] = {}  # lines by their text without numbers, of a rule for unknown lines
    links: set[int] = set()


class LineFindings:
    """All findings from lines that have not cleared. Methods return whether ``findings`` changed."""

    def __init__(self, policy: FindingPolicy) -> None:
        self._states: dict[tuple[str, str], _LineState] = {}
        self._pending: dict[tuple[str, str], deque[float]] = {}
        self.totals: dict[str, int] = {}
        """Lines by rule since the start."""
        self._use(policy)

    def _use(self, policy: FindingPolicy) -> None:
        in_order = sorted(policy.line_rules, key=lambda rule: rule.is_fallback)
        self._rules = [(rule, re.compile(rule.pattern)) for rule in in_order]
        # One plain list, because a search for a text costs less than a call.
        self._texts = [(text, at) for at, rule in enumerate(in_order) for text in rule.contains]
        self._without_text = [at for at, rule in enumerate(in_order) if not rule.contains]
        self._benign = [(each.contains, _compiled(each)) for each in policy.benign_lines]

    def change_policy(self, policy: FindingPolicy) -> bool:
        """Go on by a changed policy. Findings whose line it would not report any more end."""
        before = {rule.id: rule for rule, _ in self._rules}
        self._use(policy)
        rules = {rule.id: rule for rule, _ in self._rules}
        changed = {name for name, rule in before.items() if rules.get(name) != rule}
        self._pending = {key: times for key, times in self._pending.items() if key[0] not in changed}
        is_over = {key: self._is_over(state, rules) for key, state in self._states.items() if key[0] in before}
        over = self._drop(key for key, ended in is_over.items() if ended)
        for key, state in self._states.items():
            if key[0] in changed:
                state.rule = rules[key[0]]
                state.finding = state.rule.judge(state.finding)
        return over or bool(changed)

    def _is_over(self, state: _LineState, rules: dict[str, KernelLineRule]) -> bool:
        rule = rules.get(state.rule.id)
        if rule is None or self._is_benign(state.line):
            return True
        return rule.pattern != state.rule.pattern and re.search(rule.pattern, state.line) is None

    @property
    def findings(self) -> list[Finding]:
        return [_shown(state) for state in self._states.values()]

    def process(self, line: str, wall: float, now_s: float) -> bool:
        """Process a line that reports no XID."""
        text = line[:MAX_LINE_LENGTH]
        changed = self._clear_by(text)
        selected = sorted({at for known, at in self._texts if known in text})[:MAX_PATTERNS_PER_LINE]
        candidates = sorted(selected + self._without_text) if self._without_text else selected
        matched = 0
        if SXID_MARK in text and (sxid := parse_sxid(text)) is not None:
            if is_sxid_detail(text):
                return changed
            matched = 1
            self._count(SXID_TOTAL)
            changed |= self._add(sxid_rule(sxid.sxid, sxid.word), sxid.bus_id, text, wall, now_s, sxid.link)
        elif candidates and self._is_benign(text):
            return changed
        for rule, pattern in (self._rules[at] for at in candidates):
            if (rule.is_fallback and matched) or (match := pattern.search(text)) is None:
                continue
            matched += 1
            self._count(rule.id)
            subject = (match.groupdict().get("subject") or rule.id).strip()
            if self._happened_often(rule, subject, now_s):
                changed |= self._add(rule, subject, text, wall, now_s)
        return changed

    def note_overflow(self, line: str, wall: float, now_s: float) -> bool:
        """Process a line for which there is no room."""
        self._count(OVERFLOW_RULE.id)
        return self._add_new(OVERFLOW_RULE, OVERFLOW_SUBJECT, line, wall, now_s, None)

    def expire(self, now_s: float) -> bool:
        """Drop findings whose lines were absent for as long as their rule asks."""
        return self._drop(
            key
            for key, state in self._states.items()
            if state.rule.clear_after_s is not None and now_s - state.last_seen_s >= state.rule.clear_after_s
        )

    def apply_boot(self) -> bool:
        """Drop the findings that a boot clears."""
        return self._drop(key for key, state in self._states.items() if ClearEvent.BOOT in state.rule.clear_on)

    def _is_benign(self, text: str) -> bool:
        return any(known in text and (pattern is None or pattern.search(text)) for known, pattern in self._benign)

    def _count(self, name: str) -> None:
        self.totals[name] = self.totals.get(name, 0) + 1

    def _clear_by(self, text: str) -> bool:
        over = []
        for key, state in self._states.items():
            if not state.rule.clear_contains or state.rule.clear_contains not in text:
                continue
            match = re.search(state.rule.clear_pattern, text)
            if match is not None and (match.groupdict().get("subject") or key[1]) == key[1]:
                over.append(key)
        return bool(over) and self._drop(over)

    def _happened_often(self, rule: KernelLineRule, subject: str, now_s: float) -> bool:
        """Return whether this match is one of enough matches within the rule's window."""
        key = (rule.id, subject)
        if rule.times == 1 or key in self._states:
            return True
        if key not in self._pending and len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        times = self._pending.setdefault(key, deque(maxlen=rule.times))
        times.append(now_s)
        if len(times) < rule.times or now_s - times[0] > rule.within_s:
            return False
        del self._pending[key]
        return True

    def _add(
        self, rule: KernelLineRule, subject: str, line: str, wall: float, now_s: float, link: int | None = None
    ) -> bool:
        if (rule.id, subject) in self._states or self._make_room(rule):
            return self._add_new(rule, subject, line, wall, now_s, link)
        return self.note_overflow(line, wall, now_s)

    def _make_room(self, rule: KernelLineRule) -> bool:
        """Return whether one more finding fits; a graver one takes the place of the mildest."""
        if len(self._states) - ((OVERFLOW_RULE.id, OVERFLOW_SUBJECT) in self._states) < MAX_LINE_FINDINGS:
            return True
        if rule.severity is Severity.INFO:
            return False
        kept = [(key, state) for key, state in self._states.items() if state.rule is not OVERFLOW_RULE]
        key, mildest = min(kept, key=lambda each: each[1].rule.severity.gravity)
        if mildest.rule.severity.gravity >= rule.severity.gravity:
            return False
        del self._states[key]
        return True

    def _add_new(
        self, rule: KernelLineRule, subject: str, line: str, wall: float, now_s: float, link: int | None
    ) -> bool:
        """Add a match to its finding, or make one."""
        state = self._states.get((rule.id, subject))
        if state is None:
            shown = {"times": rule.times, "within_s": rule.within_s}
            message = rule.message.format(subject=subject, line=line[:MAX_SHOWN_LENGTH], **shown)
            finding = rule.finding(subject, message, wall)
            state = _LineState(rule, finding, line, now_s, count=0, distinct={}, links=set())
            self._states[rule.id, subject] = state
        state.last_seen_s = now_s
        state.count += 1
        is_news = state.count == 1 or state.count >= 2 * state.reported_count
        if is_news:
            state.reported_count = state.count
        if link is not None and link not in state.links and len(state.links) < MAX_LINKS:
            state.links.add(link)
            is_news = True
        if rule.is_fallback and len(state.distinct) < MAX_DISTINCT_LINES:
            kind = _DIGITS.sub("#", line)
            if kind not in state.distinct:
                state.distinct[kind] = line[:MAX_SHOWN_LENGTH]
                is_news = True
        return is_news

    def _drop(self, keys: Iterable[tuple[str, str]]) -> bool:
        over = list(keys)
        for key in over:
            del self._states[key]
        return bool(over)


def _compiled(benign: BenignLine) -> re.Pattern[str] | None:
    return re.compile(benign.pattern) if benign.pattern else None


def _shown(state: _LineState) -> Finding:
    """Return the finding with its count, its links and, for unknown lines, all different ones."""
    evidence = {"lines": str(state.reported_count)} if state.reported_count > 1 else {}
    if state.links:
        evidence["links"] = ", ".join(map(str, sorted(state.links)))
    if len(state.distinct) > 1:
        evidence |= {f"line {number}": line for number, line in enumerate(state.distinct.values(), 1)}
    return msgspec.structs.replace(state.finding, value=float(state.reported_count), evidence=evidence)
