"""Which findings are taken for an outbreak's, against everything that was ever shown, gone through from the start.

The core keeps for each kind of finding a few nodes in the order in which they were seen, looks at the oldest only, and
counts no more than it takes. Here each question begins with the first thing that happened, and looks at every node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from everstep_controller.core.health import outbreaks
from everstep_controller.core.policy import BlameIsolationMethod, VerdictRule
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.vocabulary import Finding, FindingKind
from tests.support.core_fleet import START, CoreFleet, audits
from tests.support.examples import examples
from tests.support.findings import xid

WINDOW_S = 20.0
KINDS = 2
"""That are followed at once, here."""
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
    """``shown``: when each node last showed it; ``on``: an outbreak of it stands; who has ``been`` in it,
    and was not judged since, and who of these did not get well and ``wait`` for its end."""

    shown: dict[str, float] = field(default_factory=dict)
    on: bool = False
    been: set[str] = field(default_factory=set)
    wait: set[str] = field(default_factory=set)

    def lately(self, now: float) -> set[str]:
        return {node for node, at in self.shown.items() if now - at <= WINDOW_S}


@dataclass
class _Oracle:
    rule: VerdictRule
    drivers: dict[str, str]
    past: list[tuple[float, str, str, str]] = field(default_factory=list)

    def stands(self, upto: int, node: str, kind: str) -> bool:
        past = [what for _, what, who, of in self.past[:upto] if (who, of) == (node, kind)]
        words = [what for what in past if what in ("show", "clear")]
        return bool(words) and words[-1] == "show"

    def cause(self, nodes: set[str], node: str) -> bool:
        """Whether so many show it that it is no fault of ``node``'s own, as the rule's docstrings say it."""
        count, known = len(nodes), len(self.drivers)
        alike = {other for other, driver in self.drivers.items() if driver == self.drivers[node]}
        return (
            count >= self.rule.correlated_nodes
            or (count >= 3 and count / known >= self.rule.correlated_share)
            or (
                count >= 2
                and count / known >= max(0.5, self.rule.correlated_share)
                and self.rule.blame_isolation is BlameIsolationMethod.NONE
            )
            or (self.drivers[node] != "" and len(nodes & alike) >= 3 and len(nodes & alike) > len(alike - nodes))
        )

    def there(self, upto: int, node: str) -> bool:
        """Whether the node has not gone, or has come back."""
        words = [what for _, what, who, _ in self.past[:upto] if who == node and what in ("goes", "comes")]
        return not words or words[-1] == "comes"

    def stand(self, upto: int, one: _Kind, kind: str, now: float) -> set[str]:
        """On whom an outbreak stands: who showed it lately, and who waits for its end, is there and shows it still."""
        return one.lately(now) | {node for node in one.wait if self.there(upto, node) and self.stands(upto, node, kind)}

    def told(self) -> Iterator[tuple[dict[str, _Kind], bool, set[str]]]:
        """After each thing that happened: what is known of the kinds that are followed, whether what was shown or
        asked is an outbreak's, and who is found to be in it only now."""
        kinds: dict[str, _Kind] = {}
        for place, (at, what, node, kind) in enumerate(self.past, 1):
            if what == "clear" and kind in kinds:
                kinds[kind].wait.discard(node)
            if what not in ("show", "ask"):
                yield kinds, False, set()
                continue
            one = kinds[kind] = kinds.pop(kind, _Kind())  # what was shown last is forgotten last
            kinds = dict(list(kinds.items())[-KINDS:])
            if what == "show":
                one.shown[node] = at
            lately, new = one.lately(at), set[str]()
            its = self.cause(lately, node)
            if its:
                new = {other for other in lately if self.cause(lately, other)} - one.been
                one.on, one.been, one.wait = True, one.been | new | {node}, one.wait | new | {node}
            elif one.on:
                standing = self.stand(place, one, kind, at)
                its = node in one.wait and self.cause(standing, node)
                one.on = its or any(self.cause(standing, other) for other in standing)
                gone = set() if its else {node}
                one.wait, one.been = (one.wait - gone, one.been - gone) if one.on else (set(), set())
            yield kinds, its, new

    def asked(self, kinds: dict[str, _Kind], node: str, kind: str, now: float) -> bool:
        """Whether the finding on the node is an outbreak's now, when nobody shows anything."""
        one = kinds.get(kind)
        if one is None or not one.on:
            return False
        waits = node in one.wait
        return self.cause(self.stand(len(self.past), one, kind, now) if waits else one.lately(now), node)


def _judge(
    state: FleetState, rule: VerdictRule, now: float, node: str, finding: Finding, *, anew: bool
) -> tuple[bool, set[str], list[str]]:
    turn = Transition(state, now, "t")
    if anew:
        state.nodes[node].health.agent_findings[finding.key] = finding
    why, new = outbreaks.check_correlated(turn, rule, node, finding, is_new=anew)
    effects = turn.finish()
    said = [kind for kind in (BEGAN, OVER) if audits(effects, kind)]
    return bool(why), set(new), said


@pytest.mark.promise("outbreaks")
@settings(max_examples=examples(25))
@given(rules, st.lists(st.sampled_from(["", "1", "1", "2"]), min_size=3, max_size=9), acts)
def test_outbreak_detection_matches_full_history_model(
    rule: VerdictRule, drivers: list[str], history: list[tuple[str, int, int]]
) -> None:
    fleet = CoreFleet()
    named = {f"n{number}": driver for number, driver in enumerate(drivers)}
    for node, driver in named.items():
        fleet.register(node, driver_version=driver)
    state, oracle, now = fleet.state, _Oracle(rule, named), START
    with patch.object(outbreaks, "MAX_SIGNATURES", KINDS):
        for what, number, which in history:
            node, finding = f"n{number % len(named)}", xid(which)
            if what == "wait":
                now += number * WINDOW_S / 8
            else:
                oracle.past.append((now, what, node, finding.key))
            kinds, *expected = [({}, False, set()), *oracle.told()][-1]
            if what == "clear":
                state.nodes[node].health.agent_findings.pop(finding.key, None)
                outbreaks.mark_cleared(state, node, finding)
            elif what in ("goes", "comes"):
                state.nodes[node].liveness.reachable = what == "comes"
            elif what in ("show", "ask"):
                before = outbreaks.signature(finding) in state.outbreaks
                its, new, said = _judge(state, rule, now, node, finding, anew=what == "show")
                assert [its, new] == expected
                after = kinds[finding.key].on
                assert said == ([] if before == after else [BEGAN if after else OVER]), "each is said once"
            assert set(state.outbreaks) == {
                outbreaks.signature(xid(n)) for n in XIDS if kinds.get(xid(n).key, _Kind()).on
            }
            for other in named:
                for one in map(xid, XIDS):
                    asked = outbreaks.belongs_to_outbreak(state, rule, other, one, now)
                    assert asked == oracle.asked(kinds, other, one.key, now)
