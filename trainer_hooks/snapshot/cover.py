"""What another rank of this node should have stored of a step, and died over, stored by one that holds the same.

On one node each byte that ranks hold alike is stored by one of them at every step. When a generation ends, those that
could have stored it as well look at whether it was; only for the rank that was killed while it copied it was not.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from everstep.errors import DigestMismatch
from everstep.ids import Version
from everstep.slots import SegmentView, segment_name
from everstep.wire.v1.training import Member
from trainer_hooks.restore.local import map_readable
from trainer_hooks.snapshot.copy import Sources, write_blob
from trainer_hooks.snapshot.planned import Planned


def all_stored(directory: str, members: Iterable[Member], version: Version) -> bool:
    """Whether all of these ranks, whose segments are in ``directory``, have copied their shares of ``version``."""
    return all(_has_stored(Path(directory, segment_name("own", m.local_rank)), m.rank, version) for m in members)


def _has_stored(path: Path, rank: int, version: Version) -> bool:
    try:
        view = SegmentView(map_readable(str(path)))
    except (OSError, ValueError, DigestMismatch):
        return False
    return any(header.rank == rank and header.version == version for _, header in view.whole())


def store_with_covers(wide: Planned, slot: int, rank: int, version: Version, blob: bytes, sources: Sources) -> None:
    """Fills ``slot`` with this rank's share and what it covers; a narrower slot of the version is given up for it.

    The live state must stand as it was after the version's step.
    """
    view = wide.segment.view
    narrower = [other for other, header in view.sealed() if header.version == version]
    payload = view.begin(slot, rank, version, wide.manifest_bytes, wide.manifest.payload_bytes)
    write_blob(payload, wide.manifest, blob)
    copied = sources.copy(wide.share, wide.targets(slot), digest=False)
    sources.mover.finish()
    view.seal(slot, wide.slot_digests(copied.chunks))
    for other in narrower:
        view.discard(other)
