"""The number of slots per rank is the largest for which every node has room, and equal on all."""

from __future__ import annotations

from contextlib import nullcontext as _nothing

import pytest

from everstep.errors import OutOfSlotMemory
from everstep_trainer.snapshot.slot_negotiation import (
    CANDIDATES_ONLY,
    EVERY_STEP,
    AgreedProvision,
    SlotNegotiation,
    SlotProvision,
    SnapshotOptions,
)
from tests.support.fleet.generations import generation

SPARE, EXACT = EVERY_STEP
SPEC = generation(1, ranks=[("n1", 0), ("n2", 0), ("n3", 0)])


class Node:
    """The slot negotiation of one rank, on a node that has room for at most the provision ``best``."""

    def __init__(
        self, rank: int, store: dict[str, bytes], best: SlotProvision | None, choices: SnapshotOptions
    ) -> None:
        self.best = best
        self.asked: list[tuple[SlotProvision, bool]] = []
        member = SPEC.roster[rank]
        self.name = member.node
        self.negotiation = SlotNegotiation(
            SPEC, member, choices, store.__setitem__, lambda keys: [store[key] for key in keys]
        )

    def ask(self, provision: SlotProvision, tentative: bool) -> None:
        self.asked.append((provision, tentative))
        order = [SPARE, EXACT, CANDIDATES_ONLY]
        if self.best is None or order.index(provision) < order.index(self.best):
            raise OutOfSlotMemory(f"{provision.slots} slots are too many")


def agree(choices: SnapshotOptions, *best: SlotProvision | None) -> list[AgreedProvision]:
    store: dict[str, bytes] = {}
    nodes = [Node(rank, store, each, choices) for rank, each in enumerate(best)]
    for node in nodes:  # what is said first stands: the second time everything is there
        with pytest.raises(KeyError) if node is not nodes[-1] else _nothing():
            node.negotiation.agree("start", node.ask)
    for node in nodes:
        node.best = SPARE
    return [node.negotiation.agree("start", node.ask) for node in nodes]


@pytest.mark.promise("memory-fits")
@pytest.mark.parametrize(
    ("choices", "best", "taken", "why"),
    [
        (SnapshotOptions(), (SPARE, SPARE, SPARE), SPARE, ""),
        (SnapshotOptions(), (SPARE, EXACT, SPARE), EXACT, "n2: 5 slots"),
        (SnapshotOptions(), (EXACT, SPARE, CANDIDATES_ONLY), CANDIDATES_ONLY, "n3: 5 slots"),
        (SnapshotOptions(slots=5), (SPARE, EXACT, SPARE), EXACT, "n2: 5 slots"),
        (SnapshotOptions(slots=2), (SPARE, SPARE, CANDIDATES_ONLY), CANDIDATES_ONLY, ""),
    ],
)
def test_nodes_agree_on_the_best_choice_with_room_everywhere(
    choices: SnapshotOptions, best: tuple[SlotProvision, ...], taken: SlotProvision, why: str
) -> None:
    agreed = agree(choices, *best)
    assert {each.provision for each in agreed} == {taken}
    assert all(each == agreed[0] and each.reason.startswith(why) and not each.short_node for each in agreed)
    assert bool(agreed[0].reason) == bool(why)


@pytest.mark.parametrize(
    ("choices", "taken"),
    [
        (SnapshotOptions(), CANDIDATES_ONLY),
        (SnapshotOptions(slots=5), EXACT),
        (SnapshotOptions(slots=2), CANDIDATES_ONLY),
    ],
)
def test_a_node_without_room_for_any_is_named_to_all(choices: SnapshotOptions, taken: SlotProvision) -> None:
    best = EXACT if choices.slots == 5 else CANDIDATES_ONLY
    agreed = agree(choices, best, None, SPARE)
    assert {(each.provision, each.short_node) for each in agreed} == {(taken, "n2")}
    assert f"n2: {taken.slots} slots are too many" in agreed[0].reason
