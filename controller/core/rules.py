"""The shape of a rule on findings: when it judges, how strictly, what cures, and when it is over.

The agent's own policy turns samples into findings. A rule here is about findings across time and nodes: how often
before it counts, on how many nodes before it is somebody else's fault, which cure after which.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.vocabulary import Action, Finding, FindingKind, Mode, ProbeKind, Severity

RUNGS = (Action.RESTART_RANK, Action.DRAIN, Action.RESET_GPU, Action.REBOOT_NODE, Action.REPAIR)
"""What a ladder may be made of, weakest first. DRAIN: out of service until it clears by itself."""

REMEMBERED = 16
"""Most reports of one finding, and most steps of one ladder, that are remembered of a node."""

Reports = list[tuple[float, bool]]
"""When, and whether it was bad; oldest first."""

Steps = list[tuple[float, Action]]
"""When which cure was chosen; oldest first."""


class Scope(StrEnum):
    """What reports are counted together: those of one part of a node, or all of the kind on it."""

    SUBJECT = "subject"
    NODE = "node"


class SecondPass(StrEnum):
    """How it is found out whose fault it is. PAIR: each suspect with a node known to be good. COMPUTE: each suspect
    does work whose result is known."""

    NONE = "none"
    PAIR = "pair"
    COMPUTE = "compute"


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How findings of one kind are judged."""

    kind: FindingKind
    """What it judges. Exactly one rule of a kind has no ``name``: it judges whatever the named ones leave."""
    source: str
    """Where the numbers come from; "judgement" where nobody has measured."""
    name: str = ""
    """Tells this rule from others of its kind; what sentences call it is ``kind`` and ``name``."""
    xids: tuple[int, ...] = ()
    """Only findings with these XIDs. Empty: all."""
    minimum: Severity = Severity.CRITICAL
    """Least severity that counts against the node. Milder ones are shown and judge nobody."""
    actions: tuple[Action, ...] = ()
    """Only findings that name one of these cures count. Empty: whatever they name."""
    mode: Mode = Mode.ENFORCE
    """What may follow by itself. The weaker of this and of the finding's own mode holds; where reports are counted
    (``n_of``), this one, since repetition is what the agent's rule does not see."""
    n_of: tuple[int, int] = (1, 1)
    """[n, m]: counts once n of the last m reports were bad. A report that raises the finding is bad, one that clears it
    good; a finding that flaps is one bad and one good report in each cycle."""
    window_s: float = 0.0
    """Seconds that reports are remembered for ``n_of``."""
    scope: Scope = Scope.SUBJECT
    """Whether ``n_of`` counts reports of each part (GPU, port) apart, or of the whole node."""
    boot_grace_s: float = 0.0
    """Seconds after a node's boot, or after it was first seen, in which it is not judged. What still stands then is."""
    ladder: tuple[Action, ...] = (Action.DRAIN, Action.REPAIR)
    """Cures, weakest first. It begins with the finding's own cure where that is a later one; a repeat within
    ``repeat_s`` takes the next. ``restart_rank`` ends the process of the GPU's rank (of all the node's ranks, where no
    GPU is named) and costs no eviction, ``drain`` waits until the finding clears."""
    repeat_s: float = 7 * 86400.0
    """Seconds that a step of the ladder is remembered for: longer escalates what comes back now and then. Of digests
    that differ, a tie as well."""
    same_s: float = 60.0
    """Seconds within which another report belongs to the step that was taken: all GPUs of a node tell of one crash."""
    clear_s: float = 0.0
    """Seconds for which it must have been clear before a quarantined node may return, beyond the agent's own rule."""
    diagnostics: tuple[ProbeKind, ...] = (ProbeKind.ALL_REDUCE,)
    """What the node has to pass on its way back, in this order."""
    passes: int = 1
    """How often it has to pass all of them in a row."""
    second_pass: SecondPass = SecondPass.NONE
    """How blame is settled that needs two to tell, before anybody is convicted."""
    correlated_nodes: int = 4
    """The same kind (and XID) on so many nodes within ``correlated_s`` is no fault of theirs, whatever the fleet's
    size. Smaller protects more, and evicts fewer in a real mass failure, which the budget would stop soon after."""
    correlated_share: float = 0.25
    """The same as a share of the known nodes, and never fewer than three, or two where they are half of all. Most nodes
    of one driver version are correlated too."""
    correlated_s: float = 120.0
    """Seconds within which they must show it, and in which an eviction for it is taken back where they do. Afterwards
    those on which it still stands are looked at again; it lasts while they are as many."""
    heals: str = ""
    """What has been done where it was found, for findings that need no more: said, and not held against the node. Where
    reports are counted (``n_of``), as long as there are fewer; each finding then counts once, however often it is told.
    """

    @property
    def id(self) -> str:
        """What sentences and overrides call it."""
        return f"{self.kind}.{self.name}" if self.name else str(self.kind)

    def meant(self, finding: Finding) -> bool:
        """Whether the rule is about this finding at all."""
        return finding.kind is self.kind and (not self.xids or finding.xid in self.xids)

    def applies(self, finding: Finding) -> bool:
        """Whether the finding is one that counts against its node."""
        grave = _GRAVITY[finding.severity] >= _GRAVITY[self.minimum]
        return grave and (not self.actions or finding.action in self.actions)

    def mode_of(self, finding: Finding) -> Mode:
        """What may follow from the finding."""
        return self.mode if self.n_of[0] > 1 else Mode.weakest(self.mode, finding.mode)


_GRAVITY = {severity: gravity for gravity, severity in enumerate(Severity)}

CORRELATED_LEAST = 3
"""Fewest nodes that can be called correlated by ``correlated_share``: two of a fleet are two faults, which its budget
bounds."""
CORRELATED_PAIR_SHARE = 0.5
"""Share of the known nodes from which on two are correlated: no budget would let half of a fleet go."""


class Rulebook(msgspec.Struct, frozen=True):
    """All rules, by kind; in each kind the one without a name is last."""

    kinds: dict[FindingKind, tuple[Rule, ...]] = {}

    def rule(self, finding: Finding) -> Rule:
        """The rule that judges the finding. AssertionError for a kind without one: the shell checks that there is."""
        for rule in self.kinds.get(finding.kind, ()):
            if rule.meant(finding):
                return rule
        raise AssertionError(f"no rule for {finding.kind}: the core's policy needs a rulebook (controller.rulebook)")

    def judges(self, kind: FindingKind) -> bool:
        """Whether there is a rule for the kind: rules that a journal recorded know none that came later."""
        return bool(self.kinds.get(kind))

    def of_kind(self, kind: FindingKind) -> Rule:
        """The rule of the kind that has no name."""
        return self.kinds[kind][-1]

    def called(self, name: str) -> Rule | None:
        """The rule of that id; None where a site has none of it any more."""
        return next((rule for rules in self.kinds.values() for rule in rules if rule.id == name), None)

    def missing(self) -> list[str]:
        """Kinds that nothing judges."""
        return [str(kind) for kind in FindingKind if not self.kinds.get(kind)]


# --- counting ----------------------------------------------------------------------------------------------------


def remember(reports: Reports, rule: Rule, now: float, *, bad: bool) -> Reports:
    """The reports that count now, with one more."""
    recent = [entry for entry in reports if entry[0] > now - rule.window_s]
    return [*recent, (now, bad)][-min(rule.n_of[1], REMEMBERED) :]


def bad_reports(reports: Reports) -> int:
    """How many of them were bad."""
    return sum(bad for _, bad in reports)


# --- ladders -----------------------------------------------------------------------------------------------------


def next_rung(rule: Rule, finding: Finding, steps: Steps, now: float) -> int:
    """Which place of the ladder is due: the finding's own cure, or the one after what was chosen lately, or just now
    that one again."""
    due = [_entry(rule, finding.action)]
    for at, rung in steps:
        if at > now - rule.repeat_s and rung in rule.ladder:
            due.append(rule.ladder.index(rung) + (at <= now - rule.same_s))
    return min(max(due), len(rule.ladder) - 1)


def _entry(rule: Rule, cure: Action) -> int:
    """Where the ladder begins for a finding that names ``cure``. A power cycle that the agent calls ``drain`` is a
    reboot where the ladder has no waiting."""
    if cure is Action.DRAIN and cure not in rule.ladder:
        cure = Action.REBOOT_NODE
    if cure in rule.ladder:
        return rule.ladder.index(cure)
    if cure not in RUNGS:
        return 0
    stronger = [place for place, rung in enumerate(rule.ladder) if RUNGS.index(rung) >= RUNGS.index(cure)]
    return stronger[0] if stronger else len(rule.ladder) - 1


def is_taken(steps: Steps, rule: Rule, rung: Action, now: float) -> bool:
    """Whether this very step has been taken just now."""
    return any(taken is rung and at > now - rule.same_s for at, taken in steps)


def remember_step(steps: Steps, rule: Rule, rung: Action, now: float) -> Steps:
    """The steps that count now, with one more unless it has just been taken."""
    lately = [step for step in steps if step[0] > now - rule.repeat_s]
    return lately if is_taken(steps, rule, rung, now) else [*lately, (now, rung)][-REMEMBERED:]


def in_words(rung: Action) -> str:
    """A cure as sentences say it."""
    return "drain until it clears" if rung is Action.DRAIN else rung.replace("_", " ")
