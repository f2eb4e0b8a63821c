"""What becomes of a share once it is sealed: copies on other nodes, and the word to the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import msgspec

from everstep.clock import Clock
from everstep.ids import Version
from everstep.wire.v1.local import Replicated
from everstep.wire.v1.training import GenerationSpec, Member, Sealed
from everstep_trainer.memory_tier.vault_client import VaultClient

log = logging.getLogger(__name__)

REPLICATION_PATIENCE_S = 1.0
"""How long a copy waits until the version before it is replicated, so that nodes too hold versions one step apart."""


class SealedShare(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's share of a version in ``slot``: ``nbytes`` of payload, of which the first ``exclusive`` lie on too few
    nodes; ``alike`` store the rest again. ``kept``: until a later version is committed. ``digests`` in hex by replica
    group."""

    version: Version
    slot: int
    nbytes: int
    exclusive: int
    kept: bool
    digests: dict[str, str]
    alike: tuple[str, ...] = ()


class Reports:
    """Of one rank in one generation. ``on_sealed`` takes each report, from a thread of ours; it must not block."""

    def __init__(
        self,
        vault: VaultClient,
        spec: GenerationSpec,
        member: Member,
        on_sealed: Callable[[Sealed], None],
        clock: Clock,
    ) -> None:
        self._vault = vault
        self._spec = spec
        self._member = member
        self._on_sealed = on_sealed
        self._clock = clock
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._replicating: Future[Replicated] | None = None
        self._in_trouble = False
        self._over = False

    @property
    def copying(self) -> bool:
        """Whether ``await_copies`` would wait now."""
        return self._replicating is not None and not self._in_trouble and not self._replicating.done()

    def await_copies(self) -> None:
        """Waits until the last share has its copies; where that takes long or fails, not again until it works."""
        if self._replicating is None or self._in_trouble:
            return
        _, late = wait_for([self._replicating], timeout=REPLICATION_PATIENCE_S)
        if late:
            self._tell_trouble(f"no answer within {REPLICATION_PATIENCE_S:.0f} s")

    def sealed(self, share: SealedShare, keep: Iterable[Version]) -> None:
        """Has the share copied where it must be, and reports it then. Copies of the versions ``keep`` stay."""
        to = self._spec.replica_nodes.get(self._member.node, ()) if share.exclusive else ()
        if not to:  # the slot's header says all that the vault needs to know
            self._report(share, safe=True, nodes=())
            return
        future = self._replicating = self._vault.sealed(
            job=self._spec.job,
            generation=self._spec.number,
            rank=self._member.rank,
            local_rank=self._member.local_rank,
            slot=share.slot,
            version=share.version,
            replicate=((0, share.exclusive),),
            to=to,
            keep=tuple(sorted(keep)),
            kept=share.kept,
        )
        wanted = min(self._spec.spec.replicas - 1, len(to))
        future.add_done_callback(lambda answered: self._replicated(answered, share, wanted))

    def close(self) -> None:
        """The generation is over: that copies of its last share are refused now is no trouble."""
        self._over = True

    def _replicated(self, answered: Future[Replicated], share: SealedShare, wanted: int) -> None:
        """Safe are as many copies as the job asks for, or as there are nodes for."""
        error = answered.exception()
        trouble = error or answered.result().failed
        self._tell_trouble(f"version {share.version}: {trouble}" if trouble else "")
        nodes = () if error else answered.result().nodes
        self._report(share, safe=len(nodes) >= wanted, nodes=nodes)

    def _report(self, share: SealedShare, *, safe: bool, nodes: tuple[str, ...]) -> None:
        """Tells of what the controller can do something with: commit it, or compare its digests."""
        if not share.kept and not share.digests:
            return
        self._on_sealed(
            Sealed(
                job=self._spec.job,
                at=self._clock.wall(),
                generation=self._spec.number,
                rank=self._member.rank,
                version=share.version,
                bytes=share.nbytes,
                safe=safe,
                kept=share.kept,
                replicas=nodes,
                digests=share.digests,
                alike=share.alike,
            )
        )

    def _tell_trouble(self, trouble: str) -> None:
        """Warns when replication begins to fail and when it works again, not at every step between."""
        if self._over or bool(trouble) == self._in_trouble:
            return
        self._in_trouble = bool(trouble)
        if trouble:
            log.warning("what this rank alone holds is not replicated: %s", trouble, extra=self._where)
        else:
            log.info("what this rank alone holds is replicated again", extra=self._where)
