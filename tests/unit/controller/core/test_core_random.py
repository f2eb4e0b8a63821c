"""Whatever happens in whatever order: the invariants hold after every event, and history stays consistent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.errors import EverstepError
from everstep.vocabulary import Action, JobState, Mode, Severity
from everstep_controller.core.effects import Effect, PutGeneration, PutVerdict, PutVersion, RequestRemediation
from everstep_controller.core.engine import run_transition
from everstep_controller.core.events import Event, OperatorAction, RemediationFinished, SchedulerStateChanged
from everstep_controller.core.health.eviction import fleet_scope
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.startup import restore_state
from everstep_controller.core.transition import RecordedRead
from everstep_controller.policy.rulebook import with_rules
from tests.support.fleet import invariants
from tests.support.fleet.core_fleet import CoreFleet, generations
from tests.support.fleet.findings import slow_link, xid
from tests.support.plugins.example_counts import examples

NODES = [f"n{i + 1}" for i in range(6)]
JOBS = ["a", "b"]
HUNG = xid(119, Action.RESET_GPU)
SLOW = slow_link(severity=Severity.CRITICAL)
Act = Callable[[CoreFleet], object]

node = st.sampled_from(NODES)
job = st.sampled_from(JOBS)
rank = st.integers(0, 7)
step = st.integers(1, 6)


def _with_rank(do: Callable[[CoreFleet, str, int], object], name: str, number: int) -> Act:
    """Acts for a rank that the running roster has; a job that never formed has none."""

    def act(fleet: CoreFleet) -> None:
        record = fleet.state.jobs.get(name)
        if record is not None and record.generation is not None and number < len(fleet.running(name).roster):
            do(fleet, name, number)

    return act


def _known(do: Callable[[CoreFleet, str], object], name: str) -> Act:
    return lambda fleet: do(fleet, name) if name in fleet.state.nodes else None


def _formed(do: Callable[[CoreFleet, str], object], name: str) -> Act:
    def act(fleet: CoreFleet) -> None:
        record = fleet.state.jobs.get(name)
        if record is not None and record.generation is not None:
            do(fleet, name)

    return act


def _join(fleet: CoreFleet, name: str, of: str) -> None:
    if name in fleet.state.nodes:
        fleet.join(name, job=of, min_nodes=2, max_nodes=4, nproc_per_node=2, join_wait_s=1.0)


def _leave(fleet: CoreFleet, name: str, of: str) -> None:
    if (of, name) in fleet.launchers and of in fleet.state.jobs:
        fleet.leave(name, job=of)


def _order(fleet: CoreFleet, kind: OperatorAction, name: str, of: str, size: int) -> None:
    subject: dict[str, object] = {"node": name}
    if kind in (OperatorAction.STOP_JOB, OperatorAction.RESIZE_JOB):
        subject = {"job": of, "node_limit": size}
    fleet.order(kind, **subject)


def _maintain(fleet: CoreFleet, name: str, seconds: float) -> None:
    fleet.order(OperatorAction.MAINTENANCE, node=name, until=fleet.now + seconds)


def _observe(fleet: CoreFleet, name: str, by: str) -> None:
    fleet.feed(SchedulerStateChanged(node=name, cordoned_by=by, trace=fleet.trace()))


def _action(fleet: CoreFleet, name: str, ok: bool) -> None:
    """The newest remediation of the node has ended."""
    asked = [e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.node == name]
    if asked:
        fleet.feed(
            RemediationFinished(
                remediation_id=asked[-1].id, node=name, succeeded=ok, detail="tried", trace=fleet.trace()
            )
        )


def _probe(fleet: CoreFleet, name: str, ok: bool) -> None:
    if any(name in probe.nodes for probe in fleet.state.diagnostics.probes.values()):
        fleet.probe_result(name, ok)


stale = st.sampled_from([None, None, None, 1, 2, 99])
acts: st.SearchStrategy[Act] = st.one_of(
    st.builds(lambda n: lambda f: f.register(n), node),
    st.builds(lambda n: lambda f: f.register(n, boot_id="other"), node),
    st.builds(lambda n, j: lambda f: _join(f, n, j), node, job),
    st.builds(lambda n, j: lambda f: _join(f, n, j), node, job),
    st.builds(lambda n, j: lambda f: _leave(f, n, j), node, job),
    st.builds(lambda j: _formed(lambda f, name: f.resume(name), j), job),
    st.builds(lambda j, s: _formed(lambda f, name: f.progress(s, job=name), j), job, step),
    st.builds(lambda j, s: _formed(lambda f, name: f.seal(s, job=name), j), job, step),
    st.builds(lambda j, s, r: _formed(lambda f, name: f.seal(s, job=name, digests={r: "x"}), j), job, step, rank),
    st.builds(lambda j, s: _formed(lambda f, name: f.seal(s, job=name, digests={0: "x", 1: "x"}), j), job, step),
    st.builds(lambda j, r, s: _with_rank(lambda f, name, n: f.seal(s, n, job=name), j, r), job, rank, step),
    st.builds(
        lambda j, r, g, ok: _with_rank(lambda f, name, n: f.lose_rank(n, job=name, generation=g, replacement=ok), j, r),
        job,
        rank,
        stale,
        st.booleans(),
    ),
    st.builds(lambda j, r, g: _with_rank(lambda f, name, n: f.fail_collective(n, name, g), j, r), job, rank, stale),
    st.builds(lambda j, r, s: _with_rank(lambda f, name, n: f.stall(n, s, job=name), j, r), job, rank, step),
    st.builds(lambda j, r, g: _with_rank(lambda f, name, n: f.unresponsive(n, name, g), j, r), job, rank, stale),
    st.builds(lambda j, r: _with_rank(lambda f, name, n: f.finish(n, job=name), j, r), job, rank),
    st.builds(lambda n: _known(lambda f, name: f.disconnect(name), n), node),
    st.builds(lambda n: _known(lambda f, name: f.mark_seen(name), n), node),
    st.builds(lambda n: _known(lambda f, name: f.beat(name), n), node),
    st.builds(lambda n: _known(lambda f, name: f.raise_finding(name, xid()), n), node),
    st.builds(lambda n: _known(lambda f, name: f.raise_finding(name, HUNG), n), node),
    st.builds(lambda n: _known(lambda f, name: f.clear_finding(name, xid().key), n), node),
    st.builds(lambda n: _known(lambda f, name: f.clear_finding(name, HUNG.key), n), node),
    st.builds(lambda n, ok: lambda f: _probe(f, n, ok), node, st.booleans()),
    st.builds(lambda n: _known(lambda f, name: f.raise_finding(name, SLOW), n), node),
    st.builds(lambda n, s: _known(lambda f, name: _maintain(f, name, s), n), node, st.sampled_from([1.0, 5.0])),
    st.builds(lambda n, by: _known(lambda f, name: _observe(f, name, by), n), node, st.sampled_from(["maria", ""])),
    st.builds(lambda n, ok: _known(lambda f, name: _action(f, name, ok), n), node, st.booleans()),
    st.builds(
        lambda k, n, j, s: lambda f: _order(f, k, n, j, s),
        st.sampled_from(OperatorAction),
        node,
        job,
        st.integers(1, 5),
    ),
    st.builds(
        lambda s, beating: lambda f: f.advance(s, *[n for n in beating if n in f.state.nodes]),
        st.sampled_from([0.01, 0.06, 0.2, 1.1, 3.0, 9.0]),
        st.lists(node, unique=True, max_size=6),
    ),
    st.just(lambda f: f.restart()),
)


histories = st.integers(1, 60).flatmap(lambda count: st.lists(acts, min_size=count, max_size=count))
"""Any length is as likely as any other: lists that are only bounded have five acts on average, and nothing happens."""


def quick_policy() -> CorePolicy:
    """Return a policy with short periods and small limits."""
    quick: dict[str, dict[str, object]] = {
        "budget": {"share": 0.5, "window_s": 20.0},
        "regroups": {"rank_flap_count": 4},
        "jobs": {"growth_interval_s": 0.5},
    }
    return with_rules(CorePolicy.lab_preset().with_values(remediation={"mode": Mode.ENFORCE}).with_values(**quick))


@pytest.mark.promise("eviction-evidence", "generations-increase")
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_invariants_hold_after_every_event(history: list[Act]) -> None:
    fleet = CoreFleet(quick_policy())
    fleet.register(*NODES[:5])
    fleet.join(*NODES[:4], job="a", min_nodes=2, max_nodes=4, nproc_per_node=2, join_wait_s=1.0)
    for act in history:
        try:
            act(fleet)
        except EverstepError:
            continue
        _check_budget(fleet)
    _check_history(fleet)


def _check_budget(fleet: CoreFleet) -> None:
    scope = fleet_scope(fleet.state, fleet.now)
    assert scope.used <= scope.limit


def _check_history(fleet: CoreFleet) -> None:
    for name in JOBS:
        numbers = [spec.number for spec in generations(fleet.effects) if spec.job == name]
        assert numbers == sorted(set(numbers)), f"generations of {name} do not increase: {numbers}"
        committed = [e.doc.version for e in fleet.effects if isinstance(e, PutVersion) and e.doc.job == name]
        assert committed == sorted(set(committed)), f"commits of {name} go back: {committed}"
    verdicts = [e.verdict for e in fleet.effects if isinstance(e, PutVerdict)]
    assert len({verdict.id for verdict in verdicts}) == len(verdicts)
    assert all(verdict.sentence for verdict in verdicts)
    ids = [e.spec.trace for e in fleet.effects if isinstance(e, PutGeneration)]
    assert all(ids), "a generation without the trace of its stimulus"


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_running_jobs_resume_after_faults_end(history: list[Act]) -> None:
    """When all nodes beat, probes pass and ranks do what they are told, every running job resumes."""
    fleet = CoreFleet(quick_policy())
    fleet.register(*NODES)
    fleet.join(*NODES[:4], job="a", min_nodes=2, max_nodes=4, nproc_per_node=2, join_wait_s=1.0)
    for act in history:
        try:
            act(fleet)
        except EverstepError:
            continue
    for _ in range(12):
        fleet.advance(3.0, *NODES)
        for name in JOBS:
            record = fleet.state.jobs.get(name)
            if record is not None and record.status.state is JobState.RUNNING:
                fleet.resume(name)
    for name in JOBS:
        record = fleet.state.jobs.get(name)
        if record is not None and record.status.state is JobState.RUNNING:
            assert record.progress.resumed_at is not None
            assert record.outgoing_generation is None
            assert fleet.state.job_runtime[name].regroup.pending is None


@pytest.mark.promise("replay")
@settings(max_examples=examples(20))
@given(histories)
def test_replayed_log_gives_the_same_effects_without_heartbeats(history: list[Act]) -> None:
    fleet = _Recorder(quick_policy())
    for act in history:
        try:
            act(fleet)
        except EverstepError:
            continue
    _assert_replayed(fleet)


def _assert_replayed(fleet: _Recorder) -> None:
    """Check that the log without heartbeats leads to the same effects."""
    again, effects = restore_state(quick_policy()), b""
    for event, at, reads in fleet.log:
        turn = run_transition(again, _rewired(event), at, msgspec.json.decode(reads, type=list[RecordedRead]))
        found = turn.finish()
        effects += msgspec.json.encode(found) if found else b""
    assert effects == fleet.encoded


class _Recorder(CoreFleet):
    """A fleet that keeps its log of events, what they read of beats, and its effects as they were written.

    It never restarts."""

    def __init__(self, policy: CorePolicy) -> None:
        self.log: list[tuple[Event, float, bytes]] = []
        self.encoded = b""
        super().__init__(policy)

    def feed(self, event: Event) -> list[Effect]:
        turn = run_transition(self.state, event, self.now)
        effects = turn.finish()
        invariants.check(self.state)
        self.effects += effects
        if not turn.is_uneventful or effects:
            self.log.append((event, self.now, msgspec.json.encode(turn.reads)))
        self.encoded += msgspec.json.encode(effects) if effects else b""
        return effects

    def restart(self) -> list[Effect]:
        return []


def _rewired(event: Event) -> Event:
    """The event as it comes back from a log."""
    decoded: Event = msgspec.json.decode(msgspec.json.encode(event), type=Event)
    return decoded
