"""Compare straggler findings with a model that keeps all windows and compares every rank with all others.

A window holds the last step time that each rank reported, or None if the rank does not measure it. For each node the
model counts the latest windows in which it was slow, and how long that counts.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.vocabulary import Decision
from everstep.wire.v1.training import RankProgress
from everstep_controller.core.jobs.stragglers import STRAGGLER_KEY
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.core_fleet import CoreFleet, decisions
from tests.support.plugins.example_counts import examples

WINDOW_S, WINDOWS, FACTOR = 2.0, 4, 1.5
TIMES = (None, 1.0, 1.25, 1.5, 1.75, 4.0)
"""Seconds of a rank's own work in a step. With a median of 1.0, 1.5 is exactly the factor and not yet slow."""
POLICY = CorePolicy.lab_preset().with_values(
    stragglers={"factor": FACTOR, "window_s": WINDOW_S, "windows": WINDOWS, "replace": False}
)
Window = list[float | None]
"""Step time of each rank."""


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[Window]]:
    """Draw a number of nodes, ranks per node, and windows in which a slow rank stays slow for a while."""
    nodes, ranks = draw(st.integers(2, 6)), draw(st.integers(1, 2))
    often = draw(st.lists(st.sampled_from((1.0, 1.0, 1.0, *TIMES)), min_size=nodes * ranks, max_size=nodes * ranks))
    odd = st.dictionaries(st.integers(0, nodes * ranks - 1), st.sampled_from(TIMES), max_size=2)
    windows = draw(st.lists(odd, min_size=6, max_size=16))
    return nodes, ranks, [[window.get(rank, usual) for rank, usual in enumerate(often)] for window in windows]


def _slow(window: Window, ranks: int, share: float) -> set[int]:
    """Return the nodes that are slow in a window, unless too many others are slow too."""
    known = [busy for busy in window if busy is not None]
    if len(known) < 3 or len(known) < len(window) / 2:
        return set()
    half_need = min(busy for busy in known if sum(other <= busy for other in known) >= len(known) / 2)
    slow = {rank // ranks for rank, busy in enumerate(window) if busy is not None and busy / half_need > FACTOR}
    return slow if len(slow) == 1 or len(slow) / (len(window) // ranks) <= share else set()


@pytest.mark.promise("slow-node-fair")
@settings(max_examples=examples(25))
@given(histories(), st.integers(1, WINDOWS), st.sampled_from([0.1, 0.4]))
def test_straggler_detection_matches_all_windows(
    history: tuple[int, int, list[Window]], count: int, share: float
) -> None:
    nodes, ranks, windows = history
    fleet = CoreFleet(POLICY.with_values(stragglers={"count": count, "share": share}))
    fleet.start(nodes, nproc_per_node=ranks)
    named: list[set[int]] = []
    for number, window in enumerate(windows):
        spec = fleet.running()
        for rank, busy_s in enumerate(window):
            progress = RankProgress(job="job", generation=1, rank=rank, step=number + 2, step_s=0.05, busy_s=busy_s)
            fleet.touch(spec.node_of(rank), progress)
        fleet.advance(WINDOW_S, *fleet.state.nodes)
        latest = [_slow(recent, ranks, share) for recent in windows[: number + 1][-WINDOWS:]]
        named.append({node for node in range(nodes) if sum(node in slow for slow in latest) >= count})
        stands = {f"n{at + 1}" for at in set().union(*named[-WINDOWS:])}
        assert {
            node for node, record in fleet.state.nodes.items() if STRAGGLER_KEY in record.health.controller_findings
        } == stands
    assert {decision for _, decision in decisions(fleet.effects)} <= {Decision.RECOMMEND, Decision.CORRELATED}
    assert fleet.spec().number == 1, "slowness alone takes no node out of the job"
