"""Replicate a sealed share to other nodes and report it to the controller."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass

import msgspec

from everstep.clock import Clock
from everstep.ids import Version
from everstep.wire.v1.local import Replicated, SlotSealed
from everstep.wire.v1.training import GenerationSpec, Member, VersionSealed
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.job import FilledSlot, SnapshotJob

log = logging.getLogger(__name__)

MAX_NAMES_CHARS = 4096
"""Longest text of a report."""
REPLICATION_WAIT_S = 1.0
"""Longest wait of a copy for the replication of the version before, so that nodes hold versions one step apart."""


@dataclass(eq=False)
class SealReporter:
    """Reports of one rank in one generation. ``on_sealed`` receives them, from another thread; it must not block."""

    _vault: VaultClient
    _spec: GenerationSpec
    _member: Member
    _on_sealed: Callable[[VersionSealed], None]
    _clock: Clock
    _kind: str = ""

    def __post_init__(self) -> None:
        self._log_fields = {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}
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

    def replicate_and_report(
        self, job: SnapshotJob, filled: FilledSlot, keep_versions: Iterable[Version], differing_parameters: str = ""
    ) -> None:
        """Copy the sealed share to the nodes that need it, then report it. Copies of ``keep_versions`` stay there."""
        manifest, digests = filled.planned.manifest, filled.hex_digests()
        report = VersionSealed(
            job=self._spec.job,
            at=self._clock.wall(),
            generation=self._spec.number,
            rank=self._member.rank,
            version=job.version,
            bytes=manifest.payload_bytes,
            durable=True,
            commit_candidate=job.is_candidate,
            digests=digests,
            partial_copies=filled.planned.share.partial_copies,
            kind=self._kind if digests else "",
            differing_parameters=differing_parameters[:MAX_NAMES_CHARS],
        )
        to = self._spec.replica_nodes.get(self._member.node, ()) if manifest.exclusive_bytes else ()
        if not to:  # the slot's header tells the vault all that it needs
            self._report(report)
            return
        self._replicating = self._vault.report_sealed(
            SlotSealed(
                request=0,
                job=self._spec.job,
                generation=self._spec.number,
                rank=self._member.rank,
                local_rank=self._member.local_rank,
                slot=filled.slot,
                version=job.version,
                replicate_ranges=((0, manifest.exclusive_bytes),),
                replica_nodes=to,
                keep=tuple(sorted(keep_versions)),
                commit_candidate=job.is_candidate,
            )
        )
        wanted = min(self._spec.spec.replicas - 1, len(to))
        self._replicating.add_done_callback(lambda answered: self._replicated(answered, report, wanted))

    def close(self) -> None:
        """End the generation: refused copies of its last share are expected from now on."""
        self._is_over = True

    def _replicated(self, answered: Future[Replicated], report: VersionSealed, required_copies: int) -> None:
        """Report the share; it is safe with as many copies as the job asks for, or as there are nodes."""
        error = answered.exception()
        trouble = error or answered.result().failed
        self._log_replication_state(f"version {report.version}: {trouble}" if trouble else "")
        nodes = () if error else answered.result().nodes
        durable = len(nodes) >= required_copies
        self._report(msgspec.structs.replace(report, at=self._clock.wall(), durable=durable, full_copies=nodes))

    def _report(self, report: VersionSealed) -> None:
        """Report a share that can be committed or whose digests can be compared."""
        if report.commit_candidate or report.digests:
            self._on_sealed(report)

    def _log_replication_state(self, error: str) -> None:
        """Warn when replication begins to fail and when it works again, not at every step between."""
        if self._is_over or bool(error) == self._is_replication_failing:
            return
        self._is_replication_failing = bool(error)
        if error:
            log.warning("state that only this rank holds is not replicated: %s", error, extra=self._log_fields)
        else:
            log.info("state that only this rank holds is replicated again", extra=self._log_fields)
