"""Compare the core's detection of outbreaks with a model that goes through the whole history.

For each kind of finding the core keeps a few nodes in the order of their findings, looks at the oldest only, and
counts no more than it needs. The model starts at the first event for each question, and looks at every node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.vocabulary import Finding, FindingKind
from everstep_controller.core.health import outbreaks
from everstep_controller.core.policy import BlameIsolationMethod, VerdictRule
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from tests.support.fleet.core_fleet import START, CoreFleet, logged_sentences
from tests.support.fleet.findings import xid
from tests.support.plugins.example_counts import examples

WINDOW_S = 20.0
KINDS = 2
"""The number of kinds that are tracked at once."""
XIDS = (1, 2, 3)
BEGAN, OVER = "fleet.correlated_finding", "fleet.correlated_finding_ended"
numbers = st.integers(0, 8)
acts = st.lists(
    st.tuples(
        st.sampled_from(["show"] * 5 + ["clear", "wait", "wait", "ask", "ask", "goes", "comes"]),
        numbers,
        st.sampled_from((1, *XIDS)),
    ),
    min_size=20,
    max_size=60,
)
rules = st.builds(
    lambda nodes, share, two: VerdictRule(
        kind=FindingKind.GPU_XID,
        source="a test",
        correlated_nodes=nodes,
        correlated_share=share,
        correlated_s=WINDOW_S,
        blame_isolation=two,
    ),
    st.sampled_from([3, 5, 9]),
    st.sampled_from([0.2, 0.5, 0.95]),
    st.sampled_from([BlameIsolationMethod.NONE, BlameIsolationMethod.NONE, BlameIsolationMethod.PAIR]),
)


@dataclass
class _Kind:
    """The model's record of one kind of finding.

    ``shown``: when each node last showed the finding; ``on``: whether an outbreak is in progress; ``affected``: nodes
    that were part of it and were not judged since; ``waiting``: those of them that wait for its end.
    """

    shown: dict[str, float] = field(default_factory=dict)
    on: bool = False
    affected: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)

    def recent(self, now: float) -> set[str]:
        return {node for node, at in self.shown.items() if now - at <= WINDOW_S}


@dataclass
class _Oracle:
    rule: VerdictRule
    driver_versions: dict[str, str]
    past: list[tuple[float, str, str, str]] = field(default_factory=list)

    def has_finding(self, event_count: int, node: str, kind: str) -> bool:
        past = [act for _, act, subject, of in self.past[:event_count] if (subject, of) == (node, kind)]
        states = [act for act in past if act in ("show", "clear")]
        return bool(states) and states[-1] == "show"

    def is_correlated(self, nodes: set[str], node: str) -> bool:
        """Tell if enough nodes show the finding to clear ``node``, by the docstrings of the rule."""
        count, known = len(nodes), len(self.driver_versions)
        alike = {other for other, driver in self.driver_versions.items() if driver == self.driver_versions[node]}
        return (
            count >= self.rule.correlated_nodes
            or (count >= 3 and count / known >= self.rule.correlated_share)
            or (
                count >= 2
                and count / known >= max(0.5, self.rule.correlated_share)
                and self.rule.blame_isolation is BlameIsolationMethod.NONE
            )
            or (
                self.driver_versions[node] != "" and len(nodes & alike) >= 3 and len(nodes & alike) > len(alike - nodes)
            )
        )

    def is_reachable(self, event_count: int, node: str) -> bool:
        """Tell if the node never left, or has returned."""
        states = [act for _, act, subject, _ in self.past[:event_count] if subject == node and act in ("goes", "comes")]
        return not states or states[-1] == "comes"

    def nodes_in_outbreak(self, event_count: int, record: _Kind, kind: str, now: float) -> set[str]:
        """The nodes of an outbreak: those with a recent finding, and the reachable ones that wait and still have it."""
        return record.recent(now) | {
            node
            for node in record.waiting
            if self.is_reachable(event_count, node) and self.has_finding(event_count, node, kind)
        }

    def replay(self) -> Iterator[tuple[dict[str, _Kind], bool, set[str]]]:
        """Yield after each event the tracked kinds, whether the event belongs to an outbreak, and newly found nodes."""
        kinds: dict[str, _Kind] = {}
        for place, (at, act, node, kind) in enumerate(self.past, 1):
            if act == "clear" and kind in kinds:
                kinds[kind].waiting.discard(node)
            if act not in ("show", "ask"):
                yield kinds, False, set()
                continue
            record = kinds[kind] = kinds.pop(kind, _Kind())  # the kind of the newest finding is dropped last
            kinds = dict(list(kinds.items())[-KINDS:])
            if act == "show":
                record.shown[node] = at
            recent, new = record.recent(at), set[str]()
            correlated = self.is_correlated(recent, node)
            if correlated:
                new = {other for other in recent if self.is_correlated(recent, other)} - record.affected
                record.on, record.affected, record.waiting = (
                    True,
                    record.affected | new | {node},
                    record.waiting | new | {node},
                )
            elif record.on:
                outbreak_nodes = self.nodes_in_outbreak(place, record, kind, at)
                correlated = node in record.waiting and self.is_correlated(outbreak_nodes, node)
                record.on = correlated or any(self.is_correlated(outbreak_nodes, other) for other in outbreak_nodes)
                gone = set() if correlated else {node}
                record.waiting, record.affected = (
                    (record.waiting - gone, record.affected - gone) if record.on else (set(), set())
                )
            yield kinds, correlated, new

    def belongs(self, kinds: dict[str, _Kind], node: str, kind: str, now: float) -> bool:
        """Tell if the finding on the node belongs to an outbreak, without a new event."""
        record = kinds.get(kind)
        if record is None or not record.on:
            return False
        waits = node in record.waiting
        return self.is_correlated(
            self.nodes_in_outbreak(len(self.past), record, kind, now) if waits else record.recent(now), node
        )


def _judge(
    state: FleetState, rule: VerdictRule, now: float, node: str, finding: Finding, *, anew: bool
) -> tuple[bool, set[str], list[str]]:
    turn = Transition(state, now, "t")
    if anew:
        state.nodes[node].health.agent_findings[finding.key] = finding
    reason, new = outbreaks.record_sighting(turn, rule, node, finding, is_new=anew)
    effects = turn.finish()
    logged = [kind for kind in (BEGAN, OVER) if logged_sentences(effects, kind)]
    return bool(reason), set(new), logged


@pytest.mark.promise("outbreaks")
@settings(max_examples=examples(25))
@given(rules, st.lists(st.sampled_from(["", "1", "1", "2"]), min_size=3, max_size=9), acts)
def test_outbreak_detection_matches_full_history_model(
    rule: VerdictRule, driver_versions: list[str], history: list[tuple[str, int, int]]
) -> None:
    fleet = CoreFleet()
    named = {f"n{number}": driver for number, driver in enumerate(driver_versions)}
    for node, driver in named.items():
        fleet.register(node, driver_version=driver)
    state, oracle, now = fleet.state, _Oracle(rule, named), START
    with patch.object(outbreaks, "MAX_SIGNATURES", KINDS):
        for act, number, which in history:
            node, finding = f"n{number % len(named)}", xid(which)
            if act == "wait":
                now += number * WINDOW_S / 8
            else:
                oracle.past.append((now, act, node, finding.key))
            kinds, *expected = [({}, False, set()), *oracle.replay()][-1]
            if act == "clear":
                state.nodes[node].health.agent_findings.pop(finding.key, None)
                outbreaks.mark_cleared(state, node, finding)
            elif act in ("goes", "comes"):
                state.nodes[node].liveness.reachable = act == "comes"
            elif act in ("show", "ask"):
                before = outbreaks.signature(finding) in state.shared_findings.outbreaks
                correlated, new, logged = _judge(state, rule, now, node, finding, anew=act == "show")
                assert [correlated, new] == expected
                after = kinds[finding.key].on
                assert logged == ([] if before == after else [BEGAN if after else OVER]), (
                    "begin and end are recorded once"
                )
            assert set(state.shared_findings.outbreaks) == {
                outbreaks.signature(xid(n)) for n in XIDS if kinds.get(xid(n).key, _Kind()).on
            }
            for other in named:
                for shown in map(xid, XIDS):
                    belongs = outbreaks.belongs_to_outbreak(state, rule, other, shown, now)
                    assert belongs == oracle.belongs(kinds, other, shown.key, now)
