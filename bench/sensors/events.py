"""Rows of events, and one row's way through the sensors: settle, change, poll, undo, poll until all has cleared."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from bench.sensors.node import MEMORY_FOLDER, BenchNode
from everstep.settings import load_toml
from everstep.vocabulary import Action, Finding, Mode, Severity
from everstep_agent.node_profile.profile import LEARN_S, MAX_STEP_S, SavedProfile
from everstep_agent.policy.rules import FindingPolicy, load_policy
from everstep_agent.virtual.scenario import Scenario, load_scenario

EVENT_FOLDER = Path(__file__).parents[1] / "sensor_events"
MACHINE_FOLDER = EVENT_FOLDER / "machines"

SETTLED_POLLS = 12
"""Polls before a change: every slow value was read once, and again."""
CLEAR_POLLS = 12
"""Polls at 1 Hz after a change was undone."""
CLEARING_POLLS = 130
"""Polls at most after those: 90, since processes and the PCI bus are looked at by every 30th and 60th, and then 40 over
which the longest clearing time passes."""
TIMED_POLLS = 40
EVENT_POLLS = 14
"""Polls after a reset, a boot or an exchange: findings that the next polls clear may take ten seconds."""
EVICTING = frozenset((Action.RESET_GPU, Action.REBOOT_NODE, Action.DRAIN, Action.REPAIR))
"""Actions that take the node from its job."""


class ExpectedFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finding that an event must make."""

    rule: str
    subject: str
    action: Action


class EventRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One event on a node."""

    name: str
    description: str
    fault: bool  # False: a harmless event
    at_start: bool = False  # whether it is in force before the agent's first poll
    machine: str = "dgx"  # file in bench/sensor_events/machines
    change: dict[str, Any] = {}  # patch of the virtual machine, as in --virtual-control; GPU or port "*": all of them
    kernel_lines: tuple[str, ...] = ()
    times: int = 1  # how often the lines appear, once a second
    clock_skew_s: float = 0.0  # of this node's clock from the controller's
    hold_nvml: bool = False  # whether NVML is let go by order
    for_s: int = 15  # seconds that it lasts
    expect: tuple[ExpectedFinding, ...] = ()


class EventFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of rows."""

    event: tuple[EventRow, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a row made. Findings are written as ``rule subject severity action mode``."""

    row: EventRow
    missing: tuple[str, ...] = ()  # expected rules that were not found
    wrong_subject: tuple[str, ...] = ()
    wrong_action: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # findings above info that were not expected
    evicting: tuple[str, ...] = ()  # those of them that would take the node from its job
    lasting: tuple[str, ...] = ()  # findings that did not clear
    polls: int = 0

    @property
    def is_right(self) -> bool:
        return not (self.missing or self.wrong_subject or self.wrong_action or self.others or self.lasting)

    @property
    def problems(self) -> str:
        parts = {
            "missing": self.missing,
            "wrong subject": self.wrong_subject,
            "wrong action": self.wrong_action,
            "also found": self.others,
            "not cleared": self.lasting,
        }
        return "; ".join(f"{name}: {', '.join(found)}" for name, found in parts.items() if found)


def load_rows(folder: Path = EVENT_FOLDER) -> list[EventRow]:
    """Return the rows of all files, by name of the file. Raises ConfigurationError, ValueError for a name used twice.

    Args:
        folder: Folder of the files.
    """
    rows = [row for path in sorted(folder.glob("*.toml")) for row in load_event_file(path).event]
    names = [row.name for row in rows]
    if double := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"events of one name: {', '.join(sorted(double))}")
    return rows


def load_event_file(path: Path) -> EventFile:
    """Return a file's rows. Raises ConfigurationError."""
    return load_toml(path, EventFile, (EventFile, EventRow, ExpectedFinding))


def load_machine(name: str) -> Scenario:
    """Return the machine of a row. Raises ConfigurationError."""
    return load_scenario(str(MACHINE_FOLDER / f"{name}.toml"), "bench")


@lru_cache(maxsize=32)
def _learned_profile(machine: str) -> bytes:
    """Return what an earlier agent has learned of the healthy machine."""
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=MEMORY_FOLDER) as folder,
        BenchNode(load_machine(machine), load_policy(), Path(folder)) as node,
    ):
        _poll(node, SETTLED_POLLS)
        _poll(node, math.ceil(LEARN_S / MAX_STEP_S) + SETTLED_POLLS, MAX_STEP_S)
        return msgspec.json.encode(node.assessor.profile.export())


def run_row(row: EventRow, policy: FindingPolicy) -> Outcome:
    """Run a row on a machine of its own, and compare its findings with those that it expects."""
    # A harmless event that was there before is how the machine was built: no agent knows it otherwise.
    is_new_machine = row.at_start and not row.fault
    profile = None if is_new_machine else msgspec.json.decode(_learned_profile(row.machine), type=SavedProfile)
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=MEMORY_FOLDER) as folder,
        BenchNode(load_machine(row.machine), policy, Path(folder), profile=profile) as node,
    ):
        if not row.at_start:
            _poll(node, SETTLED_POLLS)
        seen = _run_event(node, row)
        lasting = _undo(node, policy)
        return _compare(row, seen, lasting, node.polls)


def _run_event(node: BenchNode, row: EventRow) -> dict[str, Finding]:
    """Let the event happen. Returns the findings that it made, the gravest of each key and rule."""
    before = {finding.key for finding in node.findings}
    seen: dict[str, Finding] = {}
    node.change(row.change, row.hold_nvml)
    node.skew_s = row.clock_skew_s
    for second in range(max(row.for_s, row.times)):
        if second < row.times and row.kernel_lines:
            node.write_lines(row.kernel_lines)
            _note(seen, node)
        node.poll()
        _note(seen, node)
    return {key: finding for key, finding in seen.items() if finding.key not in before}


def _note(seen: dict[str, Finding], node: BenchNode) -> None:
    for finding in node.findings:
        seen[f"{finding.rule} {finding.key}"] = finding


def _undo(node: BenchNode, policy: FindingPolicy) -> tuple[str, ...]:
    """Undo the event, and cure what time does not clear by a reset, a boot and an exchange. Returns what remains."""
    node.change({})
    node.skew_s = 0.0
    _poll(node, CLEAR_POLLS)
    longest_s = max((_clearing_s(finding, policy) for finding in node.findings), default=0.0)
    for _ in range(CLEARING_POLLS):
        if not any(_clearing_s(finding, policy) for finding in node.findings):
            break
        node.poll(max(1.0, 1.05 * longest_s / TIMED_POLLS))
    untimely = {finding.rule for finding in node.findings if _clearing_s(finding, policy)}
    for cure in _cures(node):
        if not node.findings:
            break
        node.change(cure)
        if "boot_id" in cure:
            node.restart_sensors()
        _poll(node, EVENT_POLLS)
    remaining = {finding.rule: _shown(finding) for finding in node.findings}
    return tuple(sorted({*remaining.values(), *(f"{rule} in time" for rule in untimely)}))


def _cures(node: BenchNode) -> list[dict[str, Any]]:
    """Return a reset of all GPUs, a boot, and an exchange of all GPUs."""
    reset = {"gpus": {"*": {"reset_at": node.clock.wall()}}}
    boot = {"boot_id": "virtual-boot-2"}
    exchanged = {"gpus": {str(index): {"uuid": f"GPU-new-{index}"} for index in range(len(node.scenario.gpu))}}
    return [reset, reset | boot, exchanged | boot]


def _clearing_s(finding: Finding, policy: FindingPolicy) -> float:
    """Return the seconds without its cause after which a finding has to clear; 0 if only an event clears it."""
    if finding.rule.startswith("xid-"):
        return policy.xid_clearing[finding.action].clear_after_s or 0.0
    if finding.rule.startswith("sxid-"):
        return 0.0 if finding.severity is Severity.CRITICAL else 600.0
    for rule in policy.rules:
        if rule.id == finding.rule and rule.clear_after_s is not None:
            return max(rule.window_s + rule.clear_after_s, rule.clear_unknown_after_s or 0.0)
    return next((rule.clear_after_s or 0.0 for rule in policy.line_rules if rule.id == finding.rule), 0.0)


def _poll(node: BenchNode, count: int, after_s: float = 1.0) -> None:
    for _ in range(count):
        node.poll(after_s)


def _compare(row: EventRow, seen: Mapping[str, Finding], lasting: tuple[str, ...], polls: int) -> Outcome:
    found: dict[str, list[Finding]] = {}
    for finding in seen.values():
        found.setdefault(finding.rule, []).append(finding)
    missing, wrong_subject, wrong_action = [], [], []
    for expected in row.expect:
        of_rule = found.get(expected.rule, [])
        there = [finding for finding in of_rule if finding.subject == expected.subject]
        if not of_rule:
            missing.append(expected.rule)
        elif not there:
            wrong_subject.append(f"{expected.rule} on {', '.join(finding.subject for finding in of_rule)}")
        elif expected.action not in {finding.action for finding in there}:
            wrong_action.append(f"{expected.rule} {there[0].action}")
    wanted = {(expected.rule, expected.subject) for expected in row.expect}
    others = [
        each for each in seen.values() if (each.rule, each.subject) not in wanted and each.severity is not Severity.INFO
    ]
    return Outcome(
        row=row,
        missing=tuple(missing),
        wrong_subject=tuple(wrong_subject),
        wrong_action=tuple(wrong_action),
        others=_shown_all(others),
        evicting=_shown_all(each for each in others if each.mode is Mode.ENFORCE and each.action in EVICTING),
        lasting=lasting,
        polls=polls,
    )


def _shown_all(findings: Iterable[Finding]) -> tuple[str, ...]:
    return tuple(sorted({_shown(finding) for finding in findings}))


def _shown(finding: Finding) -> str:
    return f"{finding.rule} {finding.subject} ({finding.severity}, {finding.action}, {finding.mode})"
