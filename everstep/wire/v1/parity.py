"""Groups of shards that are kept by parity: told to vaults, which make it and make lost shards from it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import NodeId, Rank
from everstep.wire.v1.base import Message


class ParityGroup(Message, frozen=True, kw_only=True):
    """The shards of ``members``, rank and node, in the order of their coefficients; P and Q of them on two other nodes.

    ``group`` numbers the groups of a job's version, and is the number of the segment that holds its parity.
    """

    group: Rank
    members: Annotated[tuple[tuple[Rank, NodeId], ...], msgspec.Meta(min_length=1, max_length=255)]
    parity: tuple[NodeId, NodeId]
