"""Recognise correlated silence: many nodes silent at once suggest a fault of the network or of this controller.

The module counts reachable and silent nodes of the fleet and of each group: rack, switch, power domain, driver version,
agent version. While a group is silent, none of its nodes is lost for silence alone until ``correlated_silence.max_s``
has passed. Jobs whose own ranks report a missing member still continue without silent nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import FLEET, CorrelatedSilence, DeadlineKind, FleetState, SilenceCount
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_node_count

ANNOUNCE_DELAY_S = 0.5
"""Seconds until a correlated silence is announced, so that one log line covers all of it."""
COMMON_SHARE = 0.9
"""Share of the silent nodes that must have a group in common for the group to be named."""


def groups_of(record: NodeRecord) -> Iterator[str]:
    """Yield the groups of a node as ``kind:name``."""
    yield FLEET
    domain = record.identity.domain
    for kind, name in (
        ("rack", domain.rack),
        ("switch", domain.switch),
        ("power domain", domain.power),
        ("driver", record.identity.driver_version),
        ("agent", record.identity.agent_version),
    ):
        if name:
            yield f"{kind}:{name}"


def add_expected(state: FleetState, node: str) -> None:
    """Expect messages of the node from now on. Call ``update_correlated_silence`` afterwards."""
    state.liveness.reachable_nodes.add(node)
    count_node(state, node, 1)


def remove_expected(transition: Transition, node: str) -> None:
    """Expect no messages of the node any more."""
    count_node(transition.state, node, -1)
    transition.state.liveness.reachable_nodes.discard(node)
    transition.state.liveness.silent_nodes.discard(node)
    update_correlated_silence(transition, confirmed=True)


def set_silent(transition: Transition, node: str, silent: bool) -> None:
    """Count the node as silent (over its deadline, or with a closed connection) or as heard."""
    liveness = transition.state.liveness
    nodes = liveness.silent_nodes
    assert not silent or node in liveness.reachable_nodes, f"{node} is out of reach, and not silent"
    if silent != (node in nodes):
        (nodes.add if silent else nodes.discard)(node)
        _add_to_groups(transition.state, node, 0, 1 if silent else -1)
        update_correlated_silence(transition)


def count_node(state: FleetState, node: str, delta: int) -> None:
    """Add (``delta`` = 1) or remove (-1) the node in the counts, before and after a change of its groups."""
    is_reachable, is_silent = node in state.liveness.reachable_nodes, node in state.liveness.silent_nodes
    _add_to_groups(state, node, delta * is_reachable, delta * is_silent)


def _add_to_groups(state: FleetState, node: str, expected: int, silent: int) -> None:
    liveness = state.liveness
    for name in groups_of(state.nodes[node]):
        silence_count = liveness.silence_counts.setdefault(name, SilenceCount())
        silence_count.expected += expected
        silence_count.silent += silent
        if is_over_threshold(state, name, silence_count):
            liveness.silent_groups.add(name)
        else:
            liveness.silent_groups.discard(name)
        if not silence_count.expected:
            del liveness.silence_counts[name]


def is_over_threshold(state: FleetState, name: str, silence_count: SilenceCount) -> bool:
    """Return whether so many nodes of the group are silent that the silence is not their own."""
    policy, fleet = state.policy, state.liveness.silence_counts.get(FLEET)
    if name == FLEET and silence_count.silent == silence_count.expected >= 2:
        return True
    if name != FLEET and (fleet is None or silence_count.expected == fleet.expected):
        return False
    share = policy.correlated_silence.share if name == FLEET else policy.correlated_silence.group_share
    return silence_count.silent >= max(policy.correlated_silence.min_nodes, share * silence_count.expected)


def is_silence_excused(transition: Transition, node: str, since: float) -> bool:
    """Return whether a silence since ``since`` is probably the fault of the network or of this controller."""
    state = transition.state
    if transition.now >= since + transition.policy.correlated_silence.max_s:
        return False
    if since < state.liveness.correlated_silence_ended_at and transition.now < _grace_ends_at(transition):
        return True
    silent_groups = state.liveness.silent_groups
    return bool(silent_groups) and any(name in silent_groups for name in groups_of(state.nodes[node]))


def excused_until(transition: Transition, since: float) -> float:
    """Return the time until which a silence since ``since`` is excused, unless the correlated silence ends sooner."""
    patience = since + transition.policy.correlated_silence.max_s
    return min(patience, _grace_ends_at(transition)) if not transition.state.liveness.silent_groups else patience


def _grace_ends_at(transition: Transition) -> float:
    return transition.state.liveness.correlated_silence_ended_at + transition.policy.liveness.lost_after_s


def update_correlated_silence(transition: Transition, *, confirmed: bool = False) -> None:
    """After counting, begin or end a correlated silence. ``confirmed`` means that the silent nodes count as lost."""
    liveness = transition.state.liveness
    if liveness.silent_groups:
        if liveness.correlated_silence is None:
            liveness.correlated_silence = CorrelatedSilence(since=transition.now)
            transition.schedule(transition.now + ANNOUNCE_DELAY_S, DeadlineKind.CORRELATED_SILENCE, FLEET)
        episode = liveness.correlated_silence
        episode.max_silent = max(episode.max_silent, len(liveness.silent_nodes))
    elif liveness.correlated_silence is not None:
        _end_correlated_silence(transition, liveness.correlated_silence, confirmed)


def _end_correlated_silence(transition: Transition, correlated_silence: CorrelatedSilence, confirmed: bool) -> None:
    """End the correlated silence; nodes that do not return soon are silent on their own."""
    liveness = transition.state.liveness
    liveness.correlated_silence, liveness.correlated_silence_ended_at = None, transition.now
    for node in sorted(liveness.silent_nodes):
        transition.schedule_node(_grace_ends_at(transition), node)
    if not correlated_silence.announced:
        return
    lasted_s = f"{transition.now - correlated_silence.since:.0f} s"
    count = format_node_count(correlated_silence.max_silent)
    if confirmed:
        sentence = f"{count} were silent at once for {lasted_s} and are lost now"
    else:
        sentence = (
            f"the simultaneous silence of {count} ended after {lasted_s}: {len(liveness.silent_nodes)} still silent, "
            f"to be lost in {transition.policy.liveness.lost_after_s:g} s"
        )
    transition.log_event("fleet.correlated_silence_ended", sentence)


def log_unless_correlated(transition: Transition, kind: str, node: str, sentence: str) -> None:
    """Log a change of one node; during a correlated silence its own log entries cover all nodes."""
    if transition.state.liveness.correlated_silence is None:
        transition.log_event(kind, sentence, node=node)


def announce_correlated_silence(transition: Transition) -> None:
    """Log once how many nodes are silent and what they have in common."""
    state, liveness = transition.state, transition.state.liveness
    episode = liveness.correlated_silence
    if episode is None or episode.announced or transition.now < episode.since + ANNOUNCE_DELAY_S:
        return
    episode.announced = True
    parts = [name for name in sorted(liveness.silent_groups) if name != FLEET]
    common = _common_groups(state)
    sentence = (
        f"{len(liveness.silent_nodes)} of {format_node_count(len(liveness.reachable_nodes))} are silent at "
        f"once{_describe_common(state, parts, common)}; "
        f"the network or this controller is suspected, and no node is declared lost for silence alone within "
        f"{transition.policy.correlated_silence.max_s:g} s"
    )
    data = {"silent": str(len(liveness.silent_nodes)), "expected": str(len(liveness.reachable_nodes))}
    transition.log_event("fleet.correlated_silence", sentence, data=data | {"common": ",".join(common)})


def _common_groups(state: FleetState) -> list[str]:
    """Return the groups that nearly all silent nodes share but the whole fleet does not, smallest first."""
    fleet = state.liveness.silence_counts[FLEET]
    found = [
        (silence_count.expected, name)
        for name, silence_count in state.liveness.silence_counts.items()
        if silence_count.silent >= COMMON_SHARE * fleet.silent and silence_count.expected < fleet.expected
    ]
    return [name for _, name in sorted(found)]


def _describe_common(state: FleetState, parts: list[str], common: list[str]) -> str:
    if common:
        return f", and have in common: {', '.join(_describe_group(state, name) for name in common)}"
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        return f", among them {', '.join(_describe_group(state, name) for name in parts[:3])}{more}"
    return ", with nothing in common"


def _describe_group(state: FleetState, name: str) -> str:
    kind, _, which = name.partition(":")
    silence_count = state.liveness.silence_counts[name]
    return f"{kind} {which} ({silence_count.silent} of {silence_count.expected})"
