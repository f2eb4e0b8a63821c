"""Name nodes that are slow over many windows, and replace them by spares if there are any.

In lock step all ranks take equally long, so the comparison uses the time in which a rank did not wait for others. It
compares with the job's own median: a slow model, or a network that is slow for all, blames no node.
"""

from __future__ import annotations

from everstep.vocabulary import FindingKind, GenerationReason, Severity
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.jobs.generations import RegroupCause, boundary_step, regroup
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.membership import next_seats
from everstep_controller.core.state import JobRuntime
from everstep_controller.core.transition import Stragglers, Transition

STRAGGLER_SUBJECT = "ranks"
STRAGGLER_KEY = f"{FindingKind.RANK_STRAGGLER}/{STRAGGLER_SUBJECT}"


def start_straggler_windows(transition: Transition, job: JobRecord) -> None:
    """Begin to compare the ranks of a generation that steps."""
    live = transition.state.job_runtime[job.job]
    if not live.stragglers.window_due:
        _next_window(transition, job, live)


def _next_window(transition: Transition, job: JobRecord, live: JobRuntime) -> None:
    live.stragglers.window_due = transition.now + transition.policy.stragglers.window_s
    transition.schedule_job(live.stragglers.window_due, job.job)


def update_stragglers(transition: Transition, job: JobRecord) -> None:
    """At the end of a window, record slow nodes and act on those that are slow often enough."""
    live, policy = transition.state.job_runtime[job.job], transition.policy
    spec = job.generation
    if not live.stragglers.window_due or transition.now < live.stragglers.window_due:
        return
    # Windows advance even in a paused job, so that findings from before an interruption age.
    live.stragglers.window += 1 + int((transition.now - live.stragglers.window_due) / policy.stragglers.window_s)
    _next_window(transition, job, live)
    if spec is None or job.progress.resumed_at is None or job.outgoing_generation is not None or not job.is_running:
        return
    lag = transition.read_stragglers(job.job, policy.stragglers.factor)
    slow = slow_nodes(spec, lag, policy.stragglers.share)
    oldest = live.stragglers.window - policy.stragglers.windows
    before = live.stragglers.slow_windows.items()
    kept = {node: [w for w in seen if w > oldest] for node, seen in before if node in spec.seated_nodes}
    for node in slow:
        kept.setdefault(node, []).append(live.stragglers.window)
    live.stragglers.slow_windows = {node: seen for node, seen in kept.items() if seen}
    for node in spec.seats:
        if len(live.stragglers.slow_windows.get(node, ())) >= policy.stragglers.count:
            _raise_straggler(transition, job, node, slow.get(node, 0.0), lag)
    _replace_one(transition, job, spec)


def slow_nodes(spec: GenerationSpec, stragglers: Stragglers, share: float) -> dict[str, float]:
    """Return the slowest rank's busy time by slow node; {} if the nodes are not at fault."""
    # two ranks do not show which of them is slow, and many slow nodes have a common cause
    if stragglers.measured_ranks < 3 or 2 * stragglers.measured_ranks < spec.world_size:
        return {}
    slow: dict[str, float] = {}
    for rank, busy_s in sorted(stragglers.slow.items()):
        if rank < spec.world_size:
            node = spec.node_of(rank)
            slow[node] = max(slow.get(node, 0.0), busy_s)
    return slow if len(slow) <= max(1.0, share * len(spec.seats)) else {}


def _raise_straggler(transition: Transition, job: JobRecord, node: str, busy_s: float, stragglers: Stragglers) -> None:
    """Raise a finding once; it lasts until the node was not named in as many windows as count."""
    record, policy = transition.state.nodes[node], transition.policy
    lasts_s = policy.stragglers.windows * policy.stragglers.window_s
    if STRAGGLER_KEY in record.health.controller_findings:
        transition.extend_finding(node, STRAGGLER_KEY, lasts_s)
        return
    sentence = (
        f"{node} needs {busy_s:.3f} s for a step of {job.job} and half of the ranks {stragglers.median_s:.3f} s or "
        f"less: slow by more than {policy.stragglers.factor:g} times in {policy.stragglers.count} of "
        f"{policy.stragglers.windows} windows of {policy.stragglers.window_s:g} s"
    )
    how = "a spare takes its place where one is able; " if policy.stragglers.replace else ""
    message, limit_s = f"{sentence}; {how}look for what slows it down", policy.stragglers.factor * stragglers.median_s
    finding = transition.make_finding(
        FindingKind.RANK_STRAGGLER, STRAGGLER_SUBJECT, Severity.WARNING, message, value=busy_s, threshold=limit_s
    )
    transition.raise_finding(node, finding, lasts_s)


def _replace_one(transition: Transition, job: JobRecord, spec: GenerationSpec) -> None:
    """Replace one straggler at a time at a boundary, if the policy allows and a spare is available."""
    live, policy = transition.state.job_runtime[job.job], transition.policy
    named = [n for n in spec.seats if len(live.stragglers.slow_windows.get(n, ())) >= policy.stragglers.count]
    if not named or not policy.stragglers.replace or transition.state.database.outage:
        return
    if transition.now < job.progress.opened_at + policy.jobs.growth_interval_s:
        return

    def can_be_replaced(node: str) -> bool:
        """Return whether the job keeps as many seats without the node, including those of all other nodes."""
        seats = next_seats(transition.state, job, {node})
        return len(seats) >= len(spec.seats) and spec.seated_nodes - {node} <= set(seats)

    node = next(filter(can_be_replaced, named), None)
    if node is None or boundary_step(transition, job, live) is None:
        return
    sentence = f"{node} is slow, and a spare takes its place"
    job.membership.replaced_stragglers[node] = f"{node} was replaced because it was slow"
    del live.stragglers.slow_windows[node]
    cause = RegroupCause(
        GenerationReason.STRAGGLER, sentence, transition.trace, at_boundary=True, nodes_to_exclude=frozenset({node})
    )
    regroup(transition, job, cause)
