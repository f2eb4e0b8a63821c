"""Rebuild from parity the shares of a protected version that no vault holds any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.vault_reports import ParityGroup, Protection
from tests.sim.processes.vault_memory import Parity, Slot

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine


def rebuild_shares(
    job: str, protection: Protection, found_ranks: Collection[int], vault_of: Callable[[str], Machine | None]
) -> Iterator[tuple[SlotInfo, Slot]]:
    """Yield the rebuilt shares.

    Args:
        job: The job's name.
        protection: The protected version and its parity groups.
        found_ranks: The ranks whose shares vaults hold; these are not rebuilt.
        vault_of: Returns a node's machine if its vault answers.
    """
    for group in protection.shards():
        lost_ranks, parity = _lost_ranks(job, protection, group, vault_of)
        if parity is None or len(lost_ranks) > _count_matching(job, protection, group, vault_of, parity.digest):
            continue
        for (rank, node), (_, slot) in zip(group.members, parity.members, strict=True):
            if rank in lost_ranks and rank not in found_ranks:
                info = SlotInfo(
                    node=node,
                    rank=rank,
                    version=protection.version,
                    path="",
                    slot=0,
                    replica=False,
                    manifest_digest="/".join(map(str, slot.layout)),
                    parity_group=group,
                )
                yield info, Slot(slot.version, slot.layout, slot.state, sealed=True)


def _held_parities(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None]
) -> list[Parity]:
    """Return P and Q of the version from the vaults that hold them and answer."""
    homes = [vault_of(node) for node in group.parity]
    held = [
        parity for home in homes if home is not None for parity in home.vault_memory.parity.get((job, group.group), ())
    ]
    return [parity for parity in held if parity.version == protection.version]


def _count_matching(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None], digest: str
) -> int:
    """Return how many of P and Q were made from exactly the shares with that digest."""
    found = _held_parities(job, protection, group, vault_of)
    return len({parity.letter for parity in found if parity.digest == digest})


def _lost_ranks(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None]
) -> tuple[set[int], Parity | None]:
    """Return the ranks whose shares were lost since parity was made, and P or Q."""
    parity = next(iter(_held_parities(job, protection, group, vault_of)), None)
    lost_ranks = set()
    for index, (rank, node) in enumerate(group.members):
        machine = vault_of(node)
        slot = machine.vault_memory.find_share(job, rank, protection.version) if machine is not None else None
        is_good = slot is not None and not slot.corrupt
        if parity is not None and slot is not None:
            is_good = is_good and slot.state.digest == parity.members[index][1].state.digest
        if not is_good:
            lost_ranks.add(rank)
    return lost_ranks, parity
