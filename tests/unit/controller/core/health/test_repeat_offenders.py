"""Repeated offences lengthen the quarantine and lead to repair in the end; old offences are forgiven."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.errors import NotFound
from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.operator_history import Evidence
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.health.offences import collect_evidence, offender_score
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import NodeIdentity, NodeRecord
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid

EVERYONE = [f"n{i}" for i in range(1, 6)]


def _fleet(**knobs: Any) -> CoreFleet:
    quick = CorePolicy.lab_preset().with_values(
        offenders={"half_life_s": 1000.0, "repair_score": 4.0}, budget={"count": 50}
    )
    fleet = CoreFleet(quick.with_values(**knobs))
    fleet.start(4, 1)
    return fleet


def _score(fleet: CoreFleet, node: str = "n2") -> float:
    return offender_score(fleet.state.nodes[node], fleet.now, fleet.policy.offenders.half_life_s)


def _evict_and_return(fleet: CoreFleet) -> float:
    """Evict the node, and readmit it by an operator's order; return the seconds of its quarantine."""
    fleet.raise_finding("n2", xid())
    wait = fleet.state.nodes["n2"].quarantine.earliest_end - fleet.now
    fleet.clear_finding("n2", xid().key)
    fleet.order(OperatorAction.READMIT, node="n2")
    for node in ("n1", "n2"):
        fleet.probe_result(node)
    fleet.advance(4.0, *EVERYONE)
    assert fleet.node_state("n2") is NodeState.HEALTHY
    return wait


def test_offender_score_halves_per_half_life() -> None:
    record = NodeRecord(node="n", identity=NodeIdentity(incarnation=1, vault="n:1"))
    assert offender_score(record, 100.0, 50.0) == 0.0
    record.history.offence_score, record.history.offence_score_at = 4.0, 100.0
    assert offender_score(record, 100.0, 50.0) == 4.0
    assert offender_score(record, 150.0, 50.0) == 2.0
    assert offender_score(record, 90.0, 50.0) == 4.0


def test_quarantine_doubles_with_each_offence() -> None:
    fleet = _fleet(offenders={"wait_max_s": 1000.0})
    waits = [_evict_and_return(fleet) for _ in range(3)]
    assert waits[0] == fleet.policy.readmission.quarantine_min_s
    assert waits[1] >= 4.9
    assert waits[2] > 1.9 * waits[1]


DAY_S = 400.0
HALF_LIFE_S = 7 * DAY_S
"""A week of short days, in the proportions of the production policy."""


def _repaired_at(times: list[float]) -> int | None:
    """The number of the eviction, counted from 1, that sends the node to repair; None if none does."""
    policy = CorePolicy().with_values(
        offenders={"half_life_s": HALF_LIFE_S},
        budget={"count": 50, "share": 1.0},
        probes={"required": False},
        readmission={"probation_heartbeats": 1, "quarantine_min_s": 0.0},
    )
    assert policy.offenders.repair_score == 5.0
    fleet = CoreFleet(policy)
    names = [f"n{number}" for number in range(1, 9)]
    fleet.register(*names)
    begin = fleet.now
    for count, at in enumerate(times, 1):
        fleet.advance(begin + at - fleet.now, *names)
        fleet.raise_finding("n2", xid())
        fleet.clear_finding("n2", xid().key)
        fleet.advance(130.0, *names)  # until the outbreak window has passed
        if fleet.node_state("n2") is NodeState.REPAIR:
            return count
        if fleet.node_state("n2") is NodeState.QUARANTINED:
            fleet.order(OperatorAction.READMIT, node="n2")
            fleet.advance(10.0, *names)
        assert fleet.node_state("n2") is NodeState.HEALTHY
    return None


@pytest.mark.parametrize(
    "times",
    [
        pytest.param([number * DAY_S for number in range(6)], id="one a day"),
        pytest.param([number * 150.0 for number in range(6)], id="in a row"),
        pytest.param([number * HALF_LIFE_S / 4 for number in range(6)], id="over the half-life"),
    ],
)
def test_fifth_offence_within_half_life_leads_to_repair(times: list[float]) -> None:
    assert _repaired_at(times) == 5


def test_node_from_repair_starts_with_clean_score() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", xid())
    fleet.order(OperatorAction.REPAIR, node="n2")
    fleet.order(OperatorAction.READMIT, node="n2")
    assert (_score(fleet), fleet.state.nodes["n2"].history.recent_offences) == (0.0, [])


def test_evidence_contains_vendor_details() -> None:
    fleet = CoreFleet()
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{i}-uuid", name="H100", pci_bus_id=f"0000:{i}b:00.0", memory_bytes=80, serial=f"S{i}")
        for i in range(2)
    )
    fleet.register("n1", "n2", gpus=gpus, driver_version="570.133", domain=Domain(rack="R7"))
    found = msgspec.structs.replace(xid(), subject="0000:1b:00.0", evidence={"line": "NVRM: Xid 79"})
    fleet.raise_finding("n1", found)
    evidence = collect_evidence(fleet.state, "n1", fleet.now)
    assert [(gpu.serial, gpu.uuid) for gpu in evidence.suspect_gpus] == [("S1", "GPU-1-uuid")]
    assert (evidence.driver_version, evidence.domain.rack, evidence.rule) == ("570.133", "R7", "gpu.xid")
    assert evidence.findings == (found,)
    assert len(evidence.eviction_times) == 1
    assert [note.kind for note in evidence.history] == ["finding", "action", "verdict"]
    assert evidence.history[0].detail["line"] == "NVRM: Xid 79"
    assert msgspec.json.decode(msgspec.json.encode(evidence), type=Evidence) == evidence


def test_evidence_survives_restart_and_refuses_unknown_node() -> None:
    fleet = _fleet()
    fleet.raise_finding("n2", xid())
    before = collect_evidence(fleet.state, "n2", fleet.now)
    fleet.restart()
    assert collect_evidence(fleet.state, "n2", fleet.now) == before
    with pytest.raises(NotFound):
        collect_evidence(fleet.state, "n9", fleet.now)
