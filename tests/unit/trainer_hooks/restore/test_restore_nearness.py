"""Of holders of the same bytes the nearest is read: this node, its rack, the roster, nodes outside it, parity."""

from __future__ import annotations

import random

import msgspec
from everstep_trainer.restore.restorer import slot_distance

from everstep.ids import Version
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import Holder
from everstep.wire.v1.vault_reports import ParityGroup
from tests.support.core_fleet import CoreFleet
from tests.support.generations import generation

RACKS = {"n1": "r1", "n2": "r2", "n3": "r1", "n4": "r2", "n5": ""}


def _slot(node: str, rank: int, *, replica: bool = False, group: ParityGroup | None = None) -> SlotInfo:
    return SlotInfo(
        node=node,
        rank=rank,
        version=Version(1, 1),
        path="p",
        slot=0,
        replica=replica,
        manifest_digest="d",
        parity_group=group,
    )


def test_the_nearest_holder_comes_first() -> None:
    spec = generation(1, ranks=[(node, 0) for node in ("n1", "n2", "n3", "n4")])
    holders = tuple(Holder(node=node, vault="127.0.0.1:1", rack=rack) for node, rack in RACKS.items())
    spec = msgspec.structs.replace(spec, holders=holders)
    group = ParityGroup(group=0, members=((0, "n1"), (1, "n2")), parity=("n4", "n5"))
    wanted = [
        _slot("n1", 0),
        _slot("n1", 2, replica=True),
        _slot("n3", 2),
        _slot("n3", 0, replica=True),
        _slot("n2", 1),
        _slot("n4", 3),
        _slot("n4", 0, replica=True),
        _slot("n5", 0),
        _slot("n4", 0, group=group),
    ]
    shuffled = random.Random(3).sample(wanted, len(wanted))
    assert sorted(shuffled, key=lambda slot: slot_distance(spec, spec.roster[0], slot)) == wanted


def test_unknown_racks_make_holders_equally_near() -> None:
    spec = generation(1, ranks=[(node, 0) for node in ("n1", "n2", "n3")])
    found = sorted([_slot("n3", 2), _slot("n2", 1)], key=lambda slot: slot_distance(spec, spec.roster[0], slot))
    assert [slot.node for slot in found] == ["n2", "n3"]


def test_ranks_receive_the_racks_of_all_holders() -> None:
    fleet = CoreFleet()
    fleet.register("n1", domain=Domain(rack="r1"))
    fleet.register("n2", domain=Domain(rack="r2"))
    for node in ("n1", "n2"):
        fleet.beat(node)
    fleet.join("n1", "n2", min_nodes=1, max_nodes=2)
    assert fleet.spec().racks == {"n1": "r1", "n2": "r2"}
