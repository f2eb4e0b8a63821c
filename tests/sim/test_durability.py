"""Which directives the checker misses, and which it knows to be void."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from everstep_controller.core.events import ReportArrived
from everstep_controller.core.records import NodeIdentity, NodeRecord
from everstep_controller.store.rows import Batch, OutboxRow

from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingCleared
from tests.sim import facts
from tests.sim.checkers.durability import Durability
from tests.sim.facts import Violation

PROBE = RunProbe(probe="probe-2", nodes=("n1",), store="n1:0")
SEQ = 2_000_000_001


class Records:
    """What a database shows of one node, batch after batch."""

    def __init__(self) -> None:
        self.checker = Durability()
        self._watch = self.checker.watches()
        self._see(facts.Delivered("n1", 2, 1_000_000_001, msgspec.structs.replace(PROBE, probe="probe-1")))

    def _see(self, fact: Any) -> None:
        self._watch[type(fact)](fact)

    def _write(self, **what: Any) -> None:
        self._see(facts.Durable(2, Batch(**what)))

    def lives(self, incarnation: int) -> None:
        record = NodeRecord(node="n1", identity=NodeIdentity(incarnation=incarnation, vault="n1:7000"))
        self._write(nodes={"n1": msgspec.json.encode(record).decode()})

    def ordered(self) -> None:
        body = msgspec.json.encode(PROBE).decode()
        self._write(outbox=[OutboxRow(node="n1", seq=SEQ, body=body)])

    def told(self) -> None:
        self._see(facts.Delivered("n1", 2, SEQ, PROBE))

    def arrives(self, number: int) -> None:
        body = FindingCleared(key="k")
        report = ReportArrived(node="n1", incarnation=2, number=number, body=body, entropy="")
        self._see(facts.Handled("c1", 0, report, [], 0.0))

    def left_out(self, *numbers: int) -> None:
        self._see(facts.LeftOut("n1", 2, frozenset(numbers)))

    def pruned(self) -> None:
        self._write(acknowledged={"n1": SEQ})


@pytest.fixture
def records() -> Records:
    return Records()


def test_undelivered_pruned_directive_is_reported(records: Records) -> None:
    records.lives(2)
    records.ordered()
    records.pruned()
    assert "n1 never had it" in records.checker.complaint()


def test_delivered_directive_is_not_reported(records: Records) -> None:
    records.lives(2)
    records.ordered()
    records.told()
    records.pruned()
    assert not records.checker.complaint()


def test_directive_for_an_ended_life_is_void_at_registration(records: Records) -> None:
    """The node began another life while the database was away: the leader then knew of it, and the next does not."""
    records.lives(1)
    records.ordered()
    records.lives(2)
    records.pruned()
    assert not records.checker.complaint()


def test_missing_report_is_detected(records: Records) -> None:
    records.arrives(1)
    with pytest.raises(Violation, match="report 3 follows 1"):
        records.arrives(3)


def test_seals_omitted_by_their_agent_are_not_missed(records: Records) -> None:
    records.arrives(1)
    records.left_out(2)
    records.arrives(3)
    with pytest.raises(Violation, match="report 5 follows 3"):
        records.arrives(5)
