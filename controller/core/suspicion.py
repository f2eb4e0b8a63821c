"""Is a node there? Three answers from one number: the longest pause that it took lately and came back from.

The intuition first. Beats travel over TCP, so a lost packet is not a lost beat: it comes a fifth of a second later.
What is left of a healthy node is a steady beat and, now and then, a pause: its agent was starved, swapped, stopped by a
debugger, or dials anew for every beat and had to wait in a queue. Such pauses are rare, long, and nothing like a bell
curve around the mean, so a deadline of mean and deviation forgets them between two of them and fits the time when
nothing happens. The longest of them is what matters. If pauses are alike over time, the chance that the next of n is
longer than all before it is 1/(n + 1) (each order of n + 1 alike things is as likely as any other), whatever their
distribution. A node is therefore suspected when it has been silent for twice its longest pause of lately, never before
a floor that the policy gives and never after a ceiling.

The end of a TCP connection is the fast signal of a death and is handled elsewhere; silence has to tell only what leaves
no such word: a cut power line, a cut network. So the deadline may be slow, and must not be wrong.

The observer doubts itself by the same measure: when nobody at all was heard for longer than any node is allowed, it
was deaf, and all silences begin anew.
"""

from __future__ import annotations

from enum import Enum

from controller.core.policy import CorePolicy
from controller.core.state import Hearing, Pulse

MARGIN = 2.0
"""A silence of so many times the longest pause is a doubt: the next may be the longest yet, hardly by that much."""
MARGIN_WHEN_ACCUSED = 1.5
"""The same for a node that others say is gone."""
FORGET_S = 600.0
"""Time constant in which a pause is forgotten: a job that pauses its agents does so within minutes again."""


class Answer(Enum):
    """What a silence means."""

    PRESENT = "present"
    SUSPECT = "suspect"
    LOST = "lost"


def take_word(policy: CorePolicy, hearing: Hearing, pulse: Pulse, now: float) -> None:
    """A word of a node: its silence is over, and the pause before it is learned. Runs for every heartbeat.

    Where nobody was heard for long before it, it was the observer that did not listen, and nothing is learned. Of a
    pause beyond the ceiling no more than that is.
    """
    if now - hearing.last_at > deaf_after_s(policy):
        hearing.since = now
    hearing.last_at = now
    began = pulse.heard_at if pulse.heard_at > hearing.since else hearing.since
    if now > began:
        pulse.longest_s = longest(pulse.longest_s, min(now - began, policy.suspect_at_most_s / MARGIN))
    pulse.heard_at = now


def longest(before_s: float, pause_s: float) -> float:
    """The longest pause of lately, after one more. What was longest fades with ``FORGET_S``."""
    return max(pause_s, before_s * (1.0 - pause_s / FORGET_S))


def deaf_after_s(policy: CorePolicy) -> float:
    """Half the floor: longer than any interval between beats (settings hold that), and short enough that what was sent
    meanwhile is read before the floor is reached."""
    return policy.suspect_after_s / 2


def patience_s(policy: CorePolicy, longest_s: float) -> float:
    """Seconds of silence after which a node is suspected."""
    return min(max(MARGIN * longest_s, policy.suspect_after_s), policy.suspect_at_most_s)


def patience_when_accused_s(policy: CorePolicy, longest_s: float) -> float:
    """The same for a node that others say is gone: its next beat is overdue."""
    return min(max(MARGIN_WHEN_ACCUSED * longest_s, policy.accused_after_s), patience_s(policy, longest_s))


def loss_s(policy: CorePolicy, longest_s: float) -> float:
    """Seconds of silence after which it is lost: the policy's time between doubt and loss, after the doubt."""
    return patience_s(policy, longest_s) + policy.dead_after_s - policy.suspect_after_s


def judge(policy: CorePolicy, longest_s: float, silent_s: float) -> Answer:
    """What a silence of ``silent_s`` means for a node whose longest pause lately was ``longest_s``."""
    if silent_s < patience_s(policy, longest_s):
        return Answer.PRESENT
    return Answer.SUSPECT if silent_s < loss_s(policy, longest_s) else Answer.LOST
