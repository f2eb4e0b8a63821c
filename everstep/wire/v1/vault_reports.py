"""Define groups of shards that are kept by parity, and reports on orders to vaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from everstep.ids import NodeId, NonNegativeInt, Rank, ShortText, Version
from everstep.wire.v1.base import Message, Report


class ParityGroup(Message, frozen=True, kw_only=True):
    """The shards of ``members``, rank and node, in the order of their coefficients; two other nodes hold P and Q.

    ``group`` numbers the groups of a job's version, and the segments that hold their parity.
    """

    group: Rank
    members: Annotated[tuple[tuple[Rank, NodeId], ...], msgspec.Meta(min_length=1, max_length=255)]
    parity: tuple[NodeId, NodeId]


class NodeGroup(Message, frozen=True, kw_only=True):
    """Nodes whose shards are protected together.

    Attributes:
        members: The nodes, in the order of their coefficients.
        parity: The nodes that hold P and Q of their shards.
    """

    members: tuple[NodeId, ...]
    parity: tuple[NodeId, NodeId]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (*self.members, *self.parity)


class Protection(Message, frozen=True, kw_only=True):
    """A version that is kept by parity.

    Attributes:
        seats: The nodes whose ranks stored it, in order, with ``nproc_per_node`` ranks each.
        groups: The groups of these nodes that parity protects.
    """

    version: Version
    seats: tuple[NodeId, ...]
    nproc_per_node: int
    groups: tuple[NodeGroup, ...]

    def shards(self) -> Iterator[ParityGroup]:
        """Yield the groups for vaults: one group of shards for each local rank of each group of nodes."""
        first = {node: place * self.nproc_per_node for place, node in enumerate(self.seats)}
        for number, group in enumerate(self.groups):
            for local_rank in range(self.nproc_per_node):
                yield ParityGroup(
                    group=number * self.nproc_per_node + local_rank,
                    members=tuple((first[node] + local_rank, node) for node in group.members),
                    parity=group.parity,
                )


_NUMBERED = msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"}})
"""For a dictionary with number keys: JSON makes them text, and msgspec's schema does not say which."""


class VersionSpilled(Report, frozen=True, kw_only=True, tag=True):
    """The outcome of a node's part of ``SpillVersion``, with the order's ``attempt``.

    Attributes:
        url: The folder on storage.
        complete: All other parts are there, and the checkpoint can be loaded.
        removed: Names of older folders that were removed.
        remaining: Names of all complete folders, if only some are kept (the report of a removal may be lost).
        code: Code of the error because of which it was not written; ``message`` has the reason.
    """

    version: Version
    attempt: NonNegativeInt
    url: Annotated[str, msgspec.Meta(max_length=2048)] = ""
    bytes: NonNegativeInt = 0
    complete: bool = False
    removed: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ()
    remaining: tuple[Annotated[str, msgspec.Meta(max_length=64)], ...] = ()
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: ShortText = ""


class VersionProtected(Report, frozen=True, kw_only=True, tag=True):
    """The outcome of ``ProtectVersion`` on a parity node.

    Attributes:
        members_digests: For each group, the digest of its members' sealed digests when P or Q was made.
        code: Code of the error because of which not all groups of the order are there; ``message`` has the reason.
    """

    version: Version
    members_digests: Annotated[dict[Rank, Annotated[str, msgspec.Meta(max_length=64)]], _NUMBERED] = {}
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: ShortText = ""
