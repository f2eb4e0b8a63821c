"""Replicate a sealed share to other nodes and report it to the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for

import msgspec

from everstep.clock import Clock
from everstep.ids import Version
from everstep.wire.v1.local import Replicated
from everstep.wire.v1.training import GenerationSpec, Member, VersionSealed
from everstep_trainer.memory_tier.vault_client import VaultClient

log = logging.getLogger(__name__)

REPLICATION_WAIT_S = 1.0
"""Longest wait of a copy for the replication of the version before, so that nodes hold versions one step apart
as well."""


class SealedShare(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's share of a version in a slot.

    Attributes:
        nbytes: Size of the payload.
        exclusive_bytes: Size of its first part, which is on too few nodes.
        kept: Whether it is kept until a later version is committed.
        digests: Digests in hex by replica group.
        partial_copies: Nodes that store the rest again.
    """

    version: Version
    slot: int
    nbytes: int
    exclusive_bytes: int
    is_candidate: bool
    digests: dict[str, str]
    partial_copies: tuple[str, ...] = ()


class SealReporter:
    """Reports of one rank in one generation. ``on_sealed`` receives them, from another thread; it must not block."""

    def __init__(
        self,
        vault: VaultClient,
        spec: GenerationSpec,
        member: Member,
        on_sealed: Callable[[VersionSealed], None],
        clock: Clock,
    ) -> None:
        self._vault = vault
        self._spec = spec
        self._member = member
        self._on_sealed = on_sealed
        self._clock = clock
        self._log_fields = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._replicating: Future[Replicated] | None = None
        self._is_replication_failing = False
        self._is_over = False

    @property
    def is_copying(self) -> bool:
        """True if ``await_copies`` would wait now."""
        return self._replicating is not None and not self._is_replication_failing and not self._replicating.done()

    def await_copies(self) -> None:
        """Wait until the last share has its copies; after a slow or failed replication, not again until it works."""
        if self._replicating is None or self._is_replication_failing:
            return
        _, late = wait_for([self._replicating], timeout=REPLICATION_WAIT_S)
        if late:
            self._log_replication_state(f"no answer within {REPLICATION_WAIT_S:.0f} s")

    def replicate_and_report(self, share: SealedShare, keep_versions: Iterable[Version]) -> None:
        """Copy the share to the nodes that need it, then report it. Copies of ``keep_versions`` stay there."""
        to = self._spec.replica_nodes.get(self._member.node, ()) if share.exclusive_bytes else ()
        if not to:  # the slot's header tells the vault all that it needs
            self._report(share, safe=True, nodes=())
            return
        future = self._replicating = self._vault.report_sealed(
            job=self._spec.job,
            generation=self._spec.number,
            rank=self._member.rank,
            local_rank=self._member.local_rank,
            slot=share.slot,
            version=share.version,
            replicate=((0, share.exclusive_bytes),),
            replica_nodes=to,
            keep=tuple(sorted(keep_versions)),
            commit_candidate=share.is_candidate,
        )
        wanted = min(self._spec.spec.replicas - 1, len(to))
        future.add_done_callback(lambda answered: self._replicated(answered, share, wanted))

    def close(self) -> None:
        """End the generation: refused copies of its last share are expected from now on."""
        self._is_over = True

    def _replicated(self, answered: Future[Replicated], share: SealedShare, required_copies: int) -> None:
        """Report the share; it is safe with as many copies as the job asks for, or as there are nodes."""
        error = answered.exception()
        trouble = error or answered.result().failed
        self._log_replication_state(f"version {share.version}: {trouble}" if trouble else "")
        nodes = () if error else answered.result().nodes
        self._report(share, safe=len(nodes) >= required_copies, nodes=nodes)

    def _report(self, share: SealedShare, *, safe: bool, nodes: tuple[str, ...]) -> None:
        """Report a share that can be committed or whose digests can be compared."""
        if not share.is_candidate and not share.digests:
            return
        self._on_sealed(
            VersionSealed(
                job=self._spec.job,
                at=self._clock.wall(),
                generation=self._spec.number,
                rank=self._member.rank,
                version=share.version,
                bytes=share.nbytes,
                durable=safe,
                commit_candidate=share.is_candidate,
                full_copies=nodes,
                digests=share.digests,
                partial_copies=share.partial_copies,
            )
        )

    def _log_replication_state(self, error: str) -> None:
        """Warn when replication begins to fail and when it works again, not at every step between."""
        if self._is_over or bool(error) == self._is_replication_failing:
            return
        self._is_replication_failing = bool(error)
        if error:
            log.warning("what this rank alone holds is not replicated: %s", error, extra=self._log_fields)
        else:
            log.info("what this rank alone holds is replicated again", extra=self._log_fields)
