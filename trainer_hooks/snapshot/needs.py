"""What a node's vault will be asked for, known as soon as all ranks' shares are: slots of its ranks, copies of others'.

The parity of other ranks' shards is not among it: the controller chooses its homes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from everstep.segment_header import PAGE
from everstep.wire.v1.local import SegmentNeed
from everstep.wire.v1.training import GenerationSpec
from trainer_hooks.snapshot.plan import Share


def needs_of(
    node: str, spec: GenerationSpec, shares: Sequence[Share], slots: int, slot_bytes: Callable[[int], int]
) -> Iterator[SegmentNeed]:
    """The segments that ranks open on ``node``, and those that its vault makes for what other nodes' ranks send it.

    ``slots``: that each rank has besides those for pinned versions. ``slot_bytes``: that a rank asks for.
    """
    pinned = spec.spec.pinned_slots

    def need(rank: int, number: int, replica: bool) -> SegmentNeed:
        each = -(-slot_bytes(rank) // PAGE) * PAGE
        return SegmentNeed(replica=replica, number=number, slot_bytes=each, slots=slots, pinned=pinned)

    for member in spec.on(node):
        yield need(member.rank, member.local_rank, False)
    for sender in spec.seats:
        if node in spec.replica_nodes.get(sender, ()) and sender != node:
            for rank in spec.ranks_on(sender):
                if any(piece.exclusive for piece in shares[rank].pieces):
                    yield need(rank, rank, True)
