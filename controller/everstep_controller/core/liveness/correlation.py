"""Many silent at once: first a suspicion against what they have in common, the network or this controller.

What is counted are nodes that are expected to be heard and nodes that are silent (over their deadline, or with a closed
connection), of the whole fleet and of everything that nodes can have in common: rack, switch, power domain, driver
version, agent version. Each change counts once under each of a node's few names, so that nothing ever scans the fleet.
While a part of the fleet is silent at once, none of its nodes is lost on silence alone until patience is over; jobs
whose own ranks say that somebody is missing go on without the silent ones all the same, which is cheap and accuses
nobody.
"""

from __future__ import annotations

from collections.abc import Iterator

from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import Episode, FleetState, Tally
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import nodes

FLEET = "fleet"
GATHER_S = 0.5
"""Seconds until a correlated silence is put into words, so that one line names all of it."""
ALIKE = 0.9
"""Share of the silent ones that have something in common, for it to be named as theirs."""


def names(record: NodeRecord) -> Iterator[str]:
    """Under what a node is counted, as ``kind:name``."""
    yield FLEET
    domain = record.domain
    for kind, name in (
        ("rack", domain.rack),
        ("switch", domain.switch),
        ("power domain", domain.power),
        ("driver", record.driver_version),
        ("agent", record.agent_version),
    ):
        if name:
            yield f"{kind}:{name}"


# --- counting ----------------------------------------------------------------------------------------------------


def expect(state: FleetState, node: str) -> None:
    """The node is to be heard from now on. Call ``mind`` after it."""
    state.reachable.add(node)
    count(state, node, 1)


def give_up(turn: Turn, node: str) -> None:
    """The node is not expected to be heard any more."""
    count(turn.state, node, -1)
    turn.state.reachable.discard(node)
    turn.state.silent.discard(node)
    mind(turn, believed=True)


def fall_silent(turn: Turn, node: str) -> None:
    """The node is over its deadline, or its connection closed."""
    if node not in turn.state.silent:
        _move(turn, node, silent=True)


def speak(turn: Turn, node: str) -> None:
    """The node said something."""
    if node in turn.state.silent:
        _move(turn, node, silent=False)


def _move(turn: Turn, node: str, *, silent: bool) -> None:
    (turn.state.silent.add if silent else turn.state.silent.discard)(node)
    _add(turn.state, node, 0, 1 if silent else -1)
    mind(turn)


def count(state: FleetState, node: str, by: int) -> None:
    """Counts a node as it stands (``by`` = 1), or no longer (-1): before and after something of it changes, and then
    call ``mind``."""
    _add(state, node, by * (node in state.reachable), by * (node in state.silent))


def _add(state: FleetState, node: str, expected: int, silent: int) -> None:
    for name in names(state.nodes[node]):
        tally = state.tallies.setdefault(name, Tally())
        tally.expected += expected
        tally.silent += silent
        if is_crossed(state, name, tally):
            state.crossed.add(name)
        else:
            state.crossed.discard(name)
        if not tally.expected:
            del state.tallies[name]


def is_crossed(state: FleetState, name: str, tally: Tally) -> bool:
    """Whether so many of those are silent at once that it is not taken for their own doing.

    All nodes of a fleet count as many, however few they are. What is true of the whole fleet is no part of it.
    """
    policy, fleet = state.policy, state.tallies.get(FLEET)
    if name == FLEET and tally.silent == tally.expected >= 2:
        return True
    if name != FLEET and (fleet is None or tally.expected == fleet.expected):
        return False
    share = policy.correlated_share if name == FLEET else policy.correlated_part_share
    return tally.silent >= max(policy.correlated_minimum, share * tally.expected)


# --- believing ---------------------------------------------------------------------------------------------------


def is_doubted(turn: Turn, node: str, since: float) -> bool:
    """Whether a silence since ``since`` is rather the network's or ours than the node's own.

    When a network comes back, not everybody is heard in the same moment: a silence that began before the end of an
    episode is doubted a while longer.
    """
    state = turn.state
    if turn.now >= since + turn.policy.correlated_patience_s:
        return False
    if since < state.calm_since and turn.now < _aftermath_over_at(turn):
        return True
    return bool(state.crossed) and any(name in state.crossed for name in names(state.nodes[node]))


def look_again_at(turn: Turn, since: float) -> float:
    """When a doubted silence that began at ``since`` may be believed. The end of an episode asks sooner."""
    patience = since + turn.policy.correlated_patience_s
    return min(patience, _aftermath_over_at(turn)) if not turn.state.crossed else patience


def _aftermath_over_at(turn: Turn) -> float:
    return turn.state.calm_since + turn.policy.dead_after_s


# --- episodes ----------------------------------------------------------------------------------------------------


def mind(turn: Turn, *, believed: bool = False) -> None:
    """After counting: an episode begins where many are silent at once, and ends where they are no more, or where that
    is ``believed``."""
    state = turn.state
    if state.crossed:
        if state.episode is None:
            state.episode = Episode(since=turn.now)
            turn.wake(turn.now + GATHER_S, "correlation", FLEET)
        state.episode.most = max(state.episode.most, len(state.silent))
    elif state.episode is not None:
        _over(turn, state.episode, believed)


def _over(turn: Turn, episode: Episode, believed: bool) -> None:
    """Whoever does not follow soon is silent by itself."""
    state = turn.state
    state.episode, state.calm_since = None, turn.now
    for node in sorted(state.silent):
        turn.wake(_aftermath_over_at(turn), "node", node)
    if not episode.said:
        return
    lasted, many = f"after {turn.now - episode.since:.0f} s", nodes(episode.most)
    still = f"{len(state.silent)} still are and have {turn.policy.dead_after_s:g} s more"
    over = f"the correlated silence is over {lasted}: of {many} that were silent at once, {still}"
    sentence = f"the correlated silence of {many} is believed {lasted}: they are lost" if believed else over
    turn.audit("fleet.correlated_over", sentence)


def announce(turn: Turn) -> None:
    """Says once, in one line, how many are silent and what they have in common."""
    state, episode = turn.state, turn.state.episode
    if episode is None or episode.said or turn.now < episode.since + GATHER_S:
        return
    episode.said = True
    parts = [name for name in sorted(state.crossed) if name != FLEET]
    common = _common(state)
    sentence = (
        f"{len(state.silent)} of {nodes(len(state.reachable))} are silent at once{_in_words(state, parts, common)}; "
        f"the network or this controller is suspected, and no node is lost on silence alone for "
        f"{turn.policy.correlated_patience_s:g} s"
    )
    data = {"silent": str(len(state.silent)), "expected": str(len(state.reachable)), "common": ",".join(common)}
    turn.audit("fleet.correlated_silence", sentence, data=data)


def _common(state: FleetState) -> list[str]:
    """What nearly all silent nodes share and not the whole fleet does, the narrowest first."""
    fleet = state.tallies[FLEET]
    found = [
        (tally.expected, name)
        for name, tally in state.tallies.items()
        if tally.silent >= ALIKE * fleet.silent and tally.expected < fleet.expected
    ]
    return [name for _, name in sorted(found)]


def _in_words(state: FleetState, parts: list[str], common: list[str]) -> str:
    if common:
        return f", and have in common: {', '.join(_name(state, name) for name in common)}"
    if parts:
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        return f", among them {', '.join(_name(state, name) for name in parts[:3])}{more}"
    return ", with nothing in common"


def _name(state: FleetState, name: str) -> str:
    kind, _, which = name.partition(":")
    tally = state.tallies[name]
    return f"{kind} {which} ({tally.silent} of {tally.expected})"
