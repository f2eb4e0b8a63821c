"""What vaults can make again from parity: the shares of a protected version that nobody holds any more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.vault_reports import ParityGroup, Protection
from tests.sim.vault_memory import Parity, Slot

if TYPE_CHECKING:
    from tests.sim.machine import Machine


def made_again(
    job: str, protection: Protection, there: Collection[int], vault_of: Callable[[str], Machine | None]
) -> Iterator[tuple[SlotInfo, Slot]]:
    """Shares of ranks that are not ``there``. ``vault_of``: a node's machine, where its vault answers."""
    for group in protection.shards():
        lost, parity = _lost(job, protection, group, vault_of)
        if parity is None or len(lost) > _count(job, protection, group, vault_of, parity.digest):
            continue
        for (rank, node), (_, slot) in zip(group.members, parity.members, strict=True):
            if rank in lost and rank not in there:
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


def _parities(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None]
) -> list[Parity]:
    """P and Q of the version, as far as their homes answer."""
    homes = [vault_of(node) for node in group.parity]
    held = [one for home in homes if home is not None for one in home.vault.parity.get((job, group.group), ())]
    return [one for one in held if one.version == protection.version]


def _count(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None], digest: str
) -> int:
    """How many parities of these very shares there are: P twice is P."""
    return len({one.letter for one in _parities(job, protection, group, vault_of) if one.digest == digest})


def _lost(
    job: str, protection: Protection, group: ParityGroup, vault_of: Callable[[str], Machine | None]
) -> tuple[set[int], Parity | None]:
    """Ranks whose shares are not where parity was made of them, and what parity says of them."""
    parity = next(iter(_parities(job, protection, group, vault_of)), None)
    lost = set()
    for place, (rank, node) in enumerate(group.members):
        machine = vault_of(node)
        slot = machine.vault.held(job, rank, protection.version) if machine is not None else None
        good = slot is not None and not slot.rotten
        if parity is not None and slot is not None:
            good = good and slot.state.digest == parity.members[place][1].state.digest
        if not good:
            lost.add(rank)
    return lost, parity
