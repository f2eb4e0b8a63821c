"""Whatever has happened: what a record says is written the moment it changes, so that who takes over knows it."""

from __future__ import annotations

import msgspec
from everstep_controller.core.effects import Effect, PutFleet, PutJob, PutNode, RequestRemediation
from everstep_controller.core.events import Event, RemediationFinished
from hypothesis import HealthCheck, given, settings

from everstep.errors import EverstepError
from everstep.vocabulary import Action, Mode
from tests.support.core_fleet import CoreFleet
from tests.support.examples import examples
from tests.unit.controller.core.health.test_remediation_ladder import RESET_ME
from tests.unit.controller.core.test_core_random import NODES, Act, histories, quick_policy

Name = tuple[str, str]


class _Watched(CoreFleet):
    """A fleet that compares, event by event, what its records say with what it was asked to write."""

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

    def _pass_solos(self, effects: list[Effect]) -> None:
        """Not inside of ``feed``, which looks at one event."""


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


def test_failed_ladder_step_is_written_while_next_step_waits() -> None:
    fleet = _Watched(msgspec.structs.replace(quick_policy(), remediation_mode=Mode.ENFORCE))
    fleet.register(*NODES[:5])
    fleet.join(*NODES[:4], job="a", min_nodes=2, max_nodes=4, join_wait_s=1.0)
    fleet.raise_finding(NODES[0], RESET_ME)
    for _ in range(2):
        fleet.advance(5.0, *NODES[:5])
        cures = [
            e.remediation for e in fleet.effects if isinstance(e, RequestRemediation) and e.remediation.kind != "cordon"
        ]
        fleet.feed(RemediationFinished(remediation_id=cures[-1].id, node=NODES[0], succeeded=True, trace=fleet.trace()))
    fleet.advance(60.0, *NODES[:5])
    course = fleet.state.nodes[NODES[0]].quarantine.plan
    assert course is not None
    assert course.ladder[course.ladder_step] is Action.REPAIR, "which waits for an outbreak that may be behind it"


def test_outbreak_that_ended_while_down_is_removed_from_records() -> None:
    fleet = _Watched(quick_policy())
    fleet.register(*NODES[:2])
    fleet.state.fleet.outbreaks = {"gpu.xid/79": 1.0}
    fleet.restart()
    assert fleet.state.fleet.outbreaks == {}
