"""Nodes that are slow, window after window: named, and replaced by a spare where there is one.

In lock step all ranks take equally long, so what is compared is the time in which a rank did not wait for others. It
is compared with the job's own median: a slow model, or a slow network for all, is nobody's fault.
"""

from __future__ import annotations

from everstep.vocabulary import Finding, FindingKind, GenerationReason, JobState, Severity
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.health.evidence import raise_own, see_again
from everstep_controller.core.jobs.generations import Cause, boundary_step, regroup
from everstep_controller.core.jobs.membership import next_seats, seats_of
from everstep_controller.core.jobs.progress import Laggards
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import JobLive
from everstep_controller.core.transition import Turn

SUBJECT = "ranks"
KEY = f"{FindingKind.RANK_STRAGGLER}/{SUBJECT}"


def watch_pace(turn: Turn, job: JobRecord) -> None:
    """A generation steps: its ranks are compared from now on."""
    live = turn.state.live_jobs[job.job]
    if not live.window_due:
        _next_window(turn, job, live)


def _next_window(turn: Turn, job: JobRecord, live: JobLive) -> None:
    live.window_due = turn.now + turn.policy.straggler_window_s
    turn.wake(live.window_due, "job", job.job)


def check_pace(turn: Turn, job: JobRecord) -> None:
    """At the end of a window: who was slow in it, and who is slow so often that something is to be done."""
    live, policy = turn.state.live_jobs[job.job], turn.policy
    spec = job.generation
    if not live.window_due or turn.now < live.window_due:
        return
    # Also where nobody can be compared (a paused job has nobody): what was before an interruption is of then.
    live.window += 1 + int((turn.now - live.window_due) / policy.straggler_window_s)
    _next_window(turn, job, live)
    if spec is None or job.resumed_at is None or job.leaving is not None or job.state is not JobState.RUNNING:
        return
    lag = turn.laggards(job.job, policy.straggler_factor)
    slow = slow_nodes(spec, lag, policy.straggler_share)
    oldest = live.window - policy.straggler_windows
    kept = {node: [w for w in seen if w > oldest] for node, seen in live.slow.items() if node in spec.seated}
    for node in slow:
        kept.setdefault(node, []).append(live.window)
    live.slow = {node: seen for node, seen in kept.items() if seen}
    for node in seats_of(spec):
        if len(live.slow.get(node, ())) >= policy.straggler_count:
            _name(turn, job, node, slow.get(node, 0.0), lag)
    _replace_one(turn, job, spec)


def slow_nodes(spec: GenerationSpec, lag: Laggards, share: float) -> dict[str, float]:
    """By node, the busy time of its slowest rank; nothing where it is not the nodes.

    Two ranks cannot tell which of them is slow, and where more than ``share`` of the nodes are it is something that
    they have in common: data, a network, a phase of the model. One node may always be slow.
    """
    if lag.known < 3 or 2 * lag.known < spec.world_size:
        return {}
    slow: dict[str, float] = {}
    for rank, busy_s in sorted(lag.slow.items()):
        if rank < spec.world_size:
            node = spec.node_of(rank)
            slow[node] = max(slow.get(node, 0.0), busy_s)
    return slow if len(slow) <= max(1.0, share * len(spec.seats)) else {}


def _name(turn: Turn, job: JobRecord, node: str, busy_s: float, lag: Laggards) -> None:
    """Once for as long as it lasts: until it was not named in as many windows as count."""
    record, policy = turn.state.nodes[node], turn.policy
    lasts_s = policy.straggler_windows * policy.straggler_window_s
    if KEY in record.own:
        see_again(turn, node, KEY, lasts_s)
        return
    sentence = (
        f"{node} needs {busy_s:.3f} s for a step of {job.job} and half of the ranks {lag.median_s:.3f} s or less: "
        f"slow by more than {policy.straggler_factor:g} times in {policy.straggler_count} of "
        f"{policy.straggler_windows} windows of {policy.straggler_window_s:g} s"
    )
    how = "a spare takes its place where one is able; " if policy.straggler_replace else ""
    finding = Finding(
        kind=FindingKind.RANK_STRAGGLER,
        subject=SUBJECT,
        severity=Severity.WARNING,
        message=f"{sentence}; {how}look for what slows it down",
        value=busy_s,
        threshold=policy.straggler_factor * lag.median_s,
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, node, finding, lasts_s)


def _replace_one(turn: Turn, job: JobRecord, spec: GenerationSpec) -> None:
    """One straggler at a time leaves at a boundary, where policy allows and a spare takes its place."""
    live, policy = turn.state.live_jobs[job.job], turn.policy
    named = [n for n in seats_of(spec) if len(live.slow.get(n, ())) >= policy.straggler_count]
    if not named or not policy.straggler_replace or turn.state.store_away:
        return
    if turn.now < job.opened_at + policy.growth_interval_s:
        return
    node = next((one for one in named if _can_be_replaced(turn, job, spec, one)), None)
    if node is None or boundary_step(turn, job, live) is None:
        return
    sentence = f"{node} is slow and a spare is not"
    job.slow[node] = f"{node} was replaced because it was slow"
    del live.slow[node]
    cause = Cause(
        reason=GenerationReason.STRAGGLER, sentence=sentence, trace=turn.trace, boundary=True, without=frozenset({node})
    )
    regroup(turn, job, cause)


def _can_be_replaced(turn: Turn, job: JobRecord, spec: GenerationSpec, node: str) -> bool:
    """Whether the job has as many seats without the node, those of all others among them."""
    seats = next_seats(turn.state, job, {node})
    return len(seats) >= len(spec.seats) and spec.seated - {node} <= set(seats)
