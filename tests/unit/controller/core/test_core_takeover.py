"""Cases found by simulated clusters: takeovers at awkward moments, and nodes that return while they train."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from everstep.errors import EverstepError
from everstep.ids import Version
from everstep.vocabulary import JobState, Severity
from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import FindingCleared, FindingRaised, RankLost
from everstep_controller.core.effects import Effect, PutFleet, PutJob, PutNode, PutVersion
from everstep_controller.core.engine import can_defer_findings, can_defer_reports
from everstep_controller.core.events import ControllerStarted, DatabaseAvailabilityChanged, Event
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from tests.support.fleet.core_fleet import CoreFleet, sent
from tests.support.fleet.findings import xid
from tests.support.plugins.example_counts import examples
from tests.unit.controller.core.test_core_random import NODES, Act, histories, quick_policy


def test_takeover_sees_a_generation_step_without_acks() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.restart()
    for step in (7, 8, 9):
        fleet.progress(step)
        fleet.advance(1.5, "n1", "n2", "n3")
        assert fleet.job().progress.resumed_at is None
    fleet.progress(10)
    fleet.advance(1.5, "n1", "n2", "n3")
    assert fleet.job().progress.resumed_at is not None


def test_takeover_commits_no_unannounced_version_after_a_commit() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.progress(7)
    assert _committed(fleet.seal(7)) == [Version(2, 7)]
    fleet.restart()
    assert _committed(fleet.seal(8)) == [], "the previous controller may have announced another version to the ranks"


def _committed(effects: list[Effect]) -> list[Version]:
    return [effect.doc.version for effect in effects if isinstance(effect, PutVersion)]


def test_unwritten_boundary_is_withheld_during_outage() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    fleet.seal(5)
    fleet.raise_finding("n2", xid())
    assert (fleet.spec().number, fleet.running().number) == (2, 1)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="the disk is full", unsent_jobs=("job",)))
    before = len(fleet.effects)
    fleet.join("n1", again=True)
    assert sent(fleet.effects[before:], NewGeneration)["n1"].spec.number == 1
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=False))
    before = len(fleet.effects)
    fleet.join("n1", again=True)
    assert sent(fleet.effects[before:], NewGeneration)["n1"].spec.number == 2


def test_launcher_joining_finished_job_in_outage_is_stopped() -> None:
    """The end of the job is not stored yet, so the launcher is stopped like the others, and starts no new run."""
    fleet = CoreFleet()
    fleet.start(2)
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="full", trace=fleet.trace()))
    fleet.finish(0, 1)
    fleet.advance(5.0, "n1", "n2")
    before = len(fleet.effects)
    fleet.launchers["job", "n2"] = int(1000 * fleet.now)
    fleet.join("n2")
    assert fleet.job_state() is JobState.FINISHED
    assert sent(fleet.effects[before:], StopJob)["n2"].ok


def _running() -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(nodes=3, spares=1, min_nodes=1)
    fleet.resume()
    fleet.feed(ControllerStarted(epoch=7))
    return fleet


@pytest.mark.promise("database-outage")
def test_unsent_generation_is_reissued_with_epoch_number() -> None:
    fleet = _running()
    fleet.lose_rank(0)
    untold = fleet.spec()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full", unsent_jobs=("job",)))
    spec = fleet.spec()
    assert spec.number == 7 * NUMBERS_PER_EPOCH + 1
    assert spec.seated_nodes == untold.seated_nodes
    assert spec.reason is untold.reason
    assert spec.trace == untold.trace
    assert f"generation {untold.number} was decided but never announced" in spec.sentence


def test_first_generation_of_job_waits_for_database() -> None:
    fleet = CoreFleet()
    fleet.start(nodes=2)
    formed = fleet.spec()
    fleet.feed(DatabaseAvailabilityChanged(is_unavailable=True, reason="disk full", unsent_jobs=("job", "another")))
    assert fleet.spec() is formed


Name = tuple[str, str]


class _Watched(CoreFleet):
    """A fleet that compares its records with its writes after each event."""

    def feed(self, event: Event) -> list[Effect]:
        before = self._records()
        effects = super().feed(event)
        written = {_name(effect) for effect in effects}
        changed = {name for name, record in self._records().items() if record != before.get(name)}
        assert changed <= written, f"{changed - written} changed unwritten by {event}"
        return effects

    def _records(self) -> dict[Name, bytes]:
        state = self.state
        nodes = {("node", name): msgspec.json.encode(record) for name, record in state.nodes.items()}
        jobs = {("job", name): msgspec.json.encode(record) for name, record in state.jobs.items()}
        return nodes | jobs | {("fleet", ""): msgspec.json.encode(state.fleet)}


def _name(effect: Effect) -> Name:
    match effect:
        case PutNode():
            return "node", effect.node
        case PutJob():
            return "job", effect.job
        case PutFleet():
            return "fleet", ""
        case _:
            return "", ""


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_record_changes_are_written_with_their_event(history: list[Act]) -> None:
    fleet = _Watched(quick_policy())
    fleet.register(*NODES[:5])
    fleet.join(*NODES[:4], job="a", min_nodes=2, max_nodes=4, nproc_per_node=2, join_wait_s=1.0)
    for act in history:
        try:
            act(fleet)
        except EverstepError:
            continue


CRITICAL = FindingRaised(finding=xid(79))
MILD = FindingRaised(finding=msgspec.structs.replace(xid(31), severity=Severity.WARNING))
LOST = RankLost(job="job", at=0.0, generation=1, rank=0, local_rank=0, detail="")


@pytest.fixture
def fleet() -> CoreFleet:
    """A fleet of one node that has registered and sent a first heartbeat."""
    fleet = CoreFleet()
    fleet.register("n1")
    fleet.beat("n1")
    return fleet


@pytest.mark.parametrize(
    ("reports", "deferrable"),
    [([MILD], True), ([FindingCleared(key="x")], True), ([CRITICAL], False), ([MILD, LOST], False)],
    ids=["mild", "cleared", "critical", "a loss behind it"],
)
def test_only_mild_reports_are_deferrable(fleet: CoreFleet, reports: list[Any], deferrable: bool) -> None:
    assert can_defer_reports(fleet.state, "n1", reports) is deferrable


def test_repeated_critical_finding_is_deferrable_worsened_is_not(
    fleet: CoreFleet,
) -> None:
    fleet.report("n1", MILD)
    graver = FindingRaised(finding=msgspec.structs.replace(MILD.finding, severity=Severity.CRITICAL))
    assert graver.finding.key == MILD.finding.key
    assert not can_defer_reports(fleet.state, "n1", [graver])
    assert not can_defer_findings(fleet.state, "n1", [graver.finding])
    fleet.report("n1", graver)
    assert can_defer_reports(fleet.state, "n1", [graver])
    assert can_defer_findings(fleet.state, "n1", [graver.finding])
