"""Groups of shards that are kept by parity: told to vaults, which make it and make lost shards from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

from everstep.ids import NodeId, NonNegativeInt, Rank, Version
from everstep.wire.v1.base import Message, Report, ShortText


class ParityGroup(Message, frozen=True, kw_only=True):
    """The shards of ``members``, rank and node, in the order of their coefficients; P and Q of them on two other nodes.

    ``group`` numbers the groups of a job's version, and is the number of the segment that holds its parity.
    """

    group: Rank
    members: Annotated[tuple[tuple[Rank, NodeId], ...], msgspec.Meta(min_length=1, max_length=255)]
    parity: tuple[NodeId, NodeId]


class NodeGroup(Message, frozen=True, kw_only=True):
    """Nodes whose shards are kept together. ``members`` in the order of their coefficients; ``parity``: where P and
    where Q of their shards is kept."""

    members: tuple[NodeId, ...]
    parity: tuple[NodeId, NodeId]

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return (*self.members, *self.parity)


class Protection(Message, frozen=True, kw_only=True):
    """A version that is kept by parity: ``seats`` are the nodes whose ranks stored it, in their order, with
    ``nproc_per_node`` ranks each; ``groups`` those of them that parity keeps."""

    version: Version
    seats: tuple[NodeId, ...]
    nproc_per_node: int
    groups: tuple[NodeGroup, ...]

    def shards(self) -> Iterator[ParityGroup]:
        """What is told to vaults: a group of shards for each local rank of each group of nodes."""
        first = {node: place * self.nproc_per_node for place, node in enumerate(self.seats)}
        for number, group in enumerate(self.groups):
            for local_rank in range(self.nproc_per_node):
                yield ParityGroup(
                    group=number * self.nproc_per_node + local_rank,
                    members=tuple((first[node] + local_rank, node) for node in group.members),
                    parity=group.parity,
                )


# ---- vault reports
# What became of the controller's orders to a node's vault: versions to storage, parity of versions.

_NUMBERED = msgspec.Meta(extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,5})$"}})
"""Of a dictionary whose keys are numbers: JSON has text for them, and msgspec's schema does not say which."""


class VersionSpilled(Report, frozen=True, kw_only=True, tag=True):
    """What became of a node's part of ``SpillVersion``, the order's ``attempt`` said again.

    With an error's ``code`` it was not written, for the reason in ``message``. Else it is on storage in the folder at
    ``url``; ``whole``: so is all the rest, and the checkpoint can be loaded; ``removed``: names of older folders;
    ``left``: of all that are whole, where only so many stay (who removed one may be lost with the word of it).
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
    """What became of ``ProtectVersion`` on a home of parity.

    ``made``: by group, as what its members were sealed when P or Q was made of them; with an error's ``code``, for the
    reason in ``message``, not all groups of the order are there.
    """

    version: Version
    members_digests: Annotated[dict[Rank, Annotated[str, msgspec.Meta(max_length=64)]], _NUMBERED] = {}
    code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: ShortText = ""
