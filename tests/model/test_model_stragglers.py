"""Who is named as slow, against all windows there ever were: in each, every rank beside all others.

A window is what each rank said last of its own time for a step, or that it does not measure it. The model keeps them
all, and asks of each node in how many of the latest it was slow, and for how long that is held against it.
"""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.jobs.stragglers import STRAGGLER_KEY
from everstep_controller.core.policy import CorePolicy
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.vocabulary import Decision
from everstep.wire.v1.training import RankProgress
from tests.support.core_fleet import CoreFleet, decisions
from tests.support.examples import examples

WINDOW_S, WINDOWS, FACTOR = 2.0, 4, 1.5
TIMES = (None, 1.0, 1.25, 1.5, 1.75, 4.0)
"""Seconds that a rank needs for a step of its own; 1.5 is slow by no more than the factor, where 1.0 is the median."""
POLICY = msgspec.structs.replace(
    CorePolicy.lab_preset(),
    straggler_factor=FACTOR,
    straggler_window_s=WINDOW_S,
    straggler_windows=WINDOWS,
    straggler_replace=False,
)
Window = list[float | None]
"""By rank."""


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[Window]]:
    """Nodes, ranks on each, and windows. Who is slow is so for a while."""
    nodes, ranks = draw(st.integers(2, 6)), draw(st.integers(1, 2))
    often = draw(st.lists(st.sampled_from((1.0, 1.0, 1.0, *TIMES)), min_size=nodes * ranks, max_size=nodes * ranks))
    odd = st.dictionaries(st.integers(0, nodes * ranks - 1), st.sampled_from(TIMES), max_size=2)
    windows = draw(st.lists(odd, min_size=6, max_size=16))
    return nodes, ranks, [[window.get(rank, usual) for rank, usual in enumerate(often)] for window in windows]


def _slow(window: Window, ranks: int, share: float) -> set[int]:
    """Nodes that are slow in a window and not at one with too many others."""
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
    fleet = CoreFleet(msgspec.structs.replace(POLICY, straggler_count=count, straggler_share=share))
    fleet.start(nodes, nproc_per_node=ranks)
    named: list[set[int]] = []
    for number, window in enumerate(windows):
        spec = fleet.running()
        for rank, busy_s in enumerate(window):
            words = RankProgress(job="job", generation=1, rank=rank, step=number + 2, step_s=0.05, busy_s=busy_s)
            fleet.touch(spec.node_of(rank), words)
        fleet.advance(WINDOW_S, *fleet.state.nodes)
        latest = [_slow(one, ranks, share) for one in windows[: number + 1][-WINDOWS:]]
        named.append({node for node in range(nodes) if sum(node in slow for slow in latest) >= count})
        stands = {f"n{at + 1}" for at in set().union(*named[-WINDOWS:])}
        assert {
            node for node, record in fleet.state.nodes.items() if STRAGGLER_KEY in record.health.controller_findings
        } == stands
    assert {decision for _, decision in decisions(fleet.effects)} <= {Decision.RECOMMEND, Decision.CORRELATED}
    assert fleet.spec().number == 1, "slowness alone takes nobody out"
