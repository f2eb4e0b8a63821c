"""Classify a node's silence by its longest recent pause.

A healthy node has a steady heartbeat and, now and then, a pause: its agent was starved, swapped or stopped by a
debugger. Such pauses are rare and long, and do not follow a bell curve; mean and deviation forget them in between. If
pauses are alike over time, the next of n is longer than all before with probability 1/(n + 1), whatever their
distribution. A node is therefore suspected after twice its longest recent pause, within the policy's bounds.

The end of a TCP connection is the fast signal of a death. Silence only has to reveal a cut power line or network, so
the deadline may be slow, and must not be wrong. The observer applies the same measure to itself: if no node at all
was heard for longer than any node is allowed, the observer was deaf, and all silences restart.
"""

from __future__ import annotations

from enum import Enum

from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.state import HeartbeatState, ObserverState

PAUSE_MARGIN = 2.0
"""Multiple of the longest pause that makes a silence suspect. The next pause may be the longest yet, but hardly by that
much."""
PAUSE_MARGIN_AFTER_PEER_LOSS = 1.5
"""The same multiple for a node that other nodes have lost."""
PAUSE_DECAY_S = 600.0
"""Time constant in seconds for the decay of pauses; a job that pauses its agents does so again within minutes."""


class Liveness(Enum):
    """Meaning of a silence."""

    PRESENT = "present"
    SUSPECT = "suspect"
    LOST = "lost"


def record_message(policy: CorePolicy, observer: ObserverState, heartbeats: HeartbeatState, now: float) -> None:
    """Record a message: the node's silence ends, and the pause before it is learned. Runs for every heartbeat."""
    if now - observer.last_received_at > observer_stall_s(policy):
        observer.receiving_since = now
    observer.last_received_at = now
    began = heartbeats.last_seen_at if heartbeats.last_seen_at > observer.receiving_since else observer.receiving_since
    if now > began:
        pause_s = min(now - began, policy.liveness.suspect_after_max_s / PAUSE_MARGIN)
        heartbeats.longest_pause_s = decayed_longest_pause_s(heartbeats.longest_pause_s, pause_s)
    heartbeats.last_seen_at = now


def decayed_longest_pause_s(longest_s: float, pause_s: float) -> float:
    """Return the longest recent pause after one more; earlier ones decay with ``PAUSE_DECAY_S``."""
    return max(pause_s, longest_s * (1.0 - pause_s / PAUSE_DECAY_S))


def observer_stall_s(policy: CorePolicy) -> float:
    """Return half the minimum suspicion timeout: longer than any heartbeat interval (the settings ensure it)."""
    return policy.liveness.suspect_after_s / 2


def suspect_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the seconds of silence after which a node is suspected."""
    liveness = policy.liveness
    return min(max(PAUSE_MARGIN * longest_pause_s, liveness.suspect_after_s), liveness.suspect_after_max_s)


def suspect_timeout_after_peer_loss_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the same seconds for a node that others have lost, whose next heartbeat is overdue."""
    timeout_s = max(PAUSE_MARGIN_AFTER_PEER_LOSS * longest_pause_s, policy.liveness.suspect_after_peer_loss_s)
    return min(timeout_s, suspect_timeout_s(policy, longest_pause_s))


def loss_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the seconds of silence after which a node is lost."""
    return suspect_timeout_s(policy, longest_pause_s) + policy.liveness.lost_after_s - policy.liveness.suspect_after_s


def classify_silence(policy: CorePolicy, longest_pause_s: float, silent_s: float) -> Liveness:
    """Return the meaning of ``silent_s`` seconds of silence for a node with the given longest recent pause."""
    if silent_s < suspect_timeout_s(policy, longest_pause_s):
        return Liveness.PRESENT
    return Liveness.SUSPECT if silent_s < loss_timeout_s(policy, longest_pause_s) else Liveness.LOST
