"""How many slots ranks have is what every node has room for, and the same on all."""

from __future__ import annotations

from contextlib import nullcontext as _nothing

import pytest
from everstep_trainer.snapshot.slot_negotiation import EVERY_STEP, LEAN, Agreed, Choices, Provision, Quartermaster

from everstep.errors import OutOfSlotMemory
from tests.support.generations import generation

SPARE, EXACT = EVERY_STEP
SPEC = generation(1, ranks=[("n1", 0), ("n2", 0), ("n3", 0)])


class Node:
    """One rank's quartermaster on a node that has room for what is no better than ``best``."""

    def __init__(self, rank: int, store: dict[str, bytes], best: Provision | None, choices: Choices) -> None:
        self.best = best
        self.asked: list[tuple[Provision, bool]] = []
        member = SPEC.roster[rank]
        self.name = member.node
        self.quartermaster = Quartermaster(
            SPEC, member, choices, store.__setitem__, lambda keys: [store[key] for key in keys]
        )

    def ask(self, provision: Provision, tentative: bool) -> None:
        self.asked.append((provision, tentative))
        order = [SPARE, EXACT, LEAN]
        if self.best is None or order.index(provision) < order.index(self.best):
            raise OutOfSlotMemory(f"{provision.slots} slots are too many")


def agree(choices: Choices, *best: Provision | None) -> list[Agreed]:
    store: dict[str, bytes] = {}
    nodes = [Node(rank, store, each, choices) for rank, each in enumerate(best)]
    for node in nodes:  # what is said first stands: the second time everything is there
        with pytest.raises(KeyError) if node is not nodes[-1] else _nothing():
            node.quartermaster.agree("start", node.ask)
    for node in nodes:
        node.best = SPARE
    return [node.quartermaster.agree("start", node.ask) for node in nodes]


@pytest.mark.promise("memory-fits")
@pytest.mark.parametrize(
    ("choices", "best", "taken", "why"),
    [
        (Choices(), (SPARE, SPARE, SPARE), SPARE, ""),
        (Choices(), (SPARE, EXACT, SPARE), EXACT, "n2: 5 slots"),
        (Choices(), (EXACT, SPARE, LEAN), LEAN, "n3: 5 slots"),
        (Choices(slots=5), (SPARE, EXACT, SPARE), EXACT, "n2: 5 slots"),
        (Choices(slots=2), (SPARE, SPARE, LEAN), LEAN, ""),
    ],
)
def test_all_take_the_best_that_every_node_has_room_for(
    choices: Choices, best: tuple[Provision, ...], taken: Provision, why: str
) -> None:
    agreed = agree(choices, *best)
    assert {each.provision for each in agreed} == {taken}
    assert all(each == agreed[0] and each.why.startswith(why) and not each.lacking for each in agreed)
    assert bool(agreed[0].why) == bool(why)


@pytest.mark.parametrize(("choices", "taken"), [(Choices(), LEAN), (Choices(slots=5), EXACT), (Choices(slots=2), LEAN)])
def test_a_node_without_room_for_any_is_named_to_all(choices: Choices, taken: Provision) -> None:
    best = EXACT if choices.slots == 5 else LEAN
    agreed = agree(choices, best, None, SPARE)
    assert {(each.provision, each.lacking) for each in agreed} == {(taken, "n2")}
    assert f"n2: {taken.slots} slots are too many" in agreed[0].why


def test_only_the_last_choice_may_take_all_that_is_left() -> None:
    node = Node(0, {}, LEAN, Choices())
    with pytest.raises(KeyError):
        node.quartermaster.agree("start", node.ask)
    assert node.asked == [(SPARE, True), (EXACT, True), (LEAN, False)]
