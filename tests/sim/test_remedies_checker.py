"""What a leader knows, as the checker of remedies sees it, of the orders that its predecessor wrote."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from everstep_controller.core.effects import PutNode
from everstep_controller.core.events import Tick
from everstep_controller.core.records import NodeIdentity, NodeRecord, NodeScheduling
from everstep_controller.store.rows import Batch

from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import Domain
from tests.sim import facts
from tests.sim.checkers.remedies import Remedies
from tests.sim.facts import Violation

HELD = NodeScheduling(hold_reason="held by alice: a fan is loud")
CORDONED = NodeScheduling(external_cordon_by="bob")


def record(state: NodeState, scheduling: NodeScheduling) -> NodeRecord:
    return NodeRecord(
        node="n1", state=state, identity=NodeIdentity(incarnation=1, vault="n1:7000"), scheduling=scheduling
    )


@pytest.mark.parametrize(("scheduling", "who"), [(HELD, "a person"), (CORDONED, "a cordon")])
def test_successor_keeps_out_nodes_by_stored_orders(scheduling: NodeScheduling, who: str) -> None:
    checker = Remedies()
    checker.world = SimpleNamespace(machines={"n1": SimpleNamespace(domain=Domain())})  # type: ignore[assignment]
    watch = checker.watches()
    document = msgspec.json.encode(record(NodeState.HELD, scheduling)).decode()
    watch[facts.Durable](facts.Durable(1, Batch(nodes={"n1": document})))
    watch[facts.TookOver](facts.TookOver("c2", 2, {}))
    served = PutNode("n1", record(NodeState.HEALTHY, scheduling))
    with pytest.raises(Violation, match=f"n1 is healthy, although {who} keeps it out"):
        watch[facts.Decided](facts.Decided("c2", 2, Tick(), [served], 0.0))
