"""Define the controller's orders to a node. Delivered in order, at least once; a node skips those it has
already seen."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import (
    Address,
    GenerationNumber,
    Incarnation,
    JobId,
    NodeId,
    NonNegativeInt,
    Rank,
    ShortText,
    TraceId,
    Version,
)
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.base import Message
from everstep.wire.v1.training import GenerationSpec
from everstep.wire.v1.vault_reports import ParityGroup


class NewGeneration(Message, frozen=True, kw_only=True, tag=True):
    """Enter this generation; processes of the node that are not in its roster park as spares."""

    spec: GenerationSpec


class KillRank(Message, frozen=True, kw_only=True, tag=True):
    """End a rank's process with SIGKILL: it hangs, or must not go on.

    Attributes:
        has_grace: The rank only has to leave, so it gets SIGTERM first, and SIGKILL after the launcher's ``--grace-s``.
    """

    job: JobId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    reason: ShortText
    trace: TraceId = ""
    has_grace: bool = False


class StopJob(Message, frozen=True, kw_only=True, tag=True):
    """The job is over, or a signal to its launchers has ended its ranks and it waits for a new launcher.

    Attributes:
        ok: Determines the exit status of ranks and launchers.
        reason: Printed by launchers.
        launcher: The launcher that is meant; a later one of the node begins the job anew. 0: any.
        keeps_checkpoints: The job may continue, so its slots stay.
    """

    job: JobId
    ok: bool
    reason: ShortText
    launcher: Incarnation = 0
    keeps_checkpoints: bool = False

    def applies_to(self, launcher: int) -> bool:
        """Return whether the order is meant for that launcher."""
        return not self.launcher or launcher <= self.launcher


class VersionNotice(Message, frozen=True, kw_only=True, tag=True):
    """The versions that a job's ranks must keep.

    Attributes:
        committed: The newest committed version.
        candidate: A step of ``generation`` that no rank has finished yet, whose version may be committed next. Every
            rank that receives it in time keeps the version and says so in ``VersionSealed.commit_candidate``. A version
            that all of them keep is committed.
        pinned: Further versions to keep if there is a slot for them: they are still being read.
        compared_ranks: Ranks that compare their parameters with each other at the candidate, since their digests
            differ; the lowest one names those that differ in ``VersionSealed.differing_parameters``.
    """

    job: JobId
    generation: GenerationNumber
    committed: Version | None
    candidate: int | None
    pinned: tuple[Version, ...] = ()
    compared_ranks: tuple[Rank, ...] = ()


class SpillVersion(Message, frozen=True, kw_only=True, tag=True):
    """Have the node's vault write its part of ``version`` to storage; the answer is ``VersionSpilled``.

    ``writers``, ``keep_last`` and ``earlier`` are as in ``local.Spill``. The order is repeated until it is answered; a
    vault ignores repetitions while it works. ``url`` has no credentials; the vault has its own.
    """

    job: JobId
    generation: GenerationNumber
    version: Version
    url: Annotated[str, msgspec.Meta(max_length=2048)]
    writers: dict[NodeId, tuple[Rank, ...]]
    keep_last: Annotated[int, msgspec.Meta(ge=0)] = 0
    attempt: NonNegativeInt = 0
    earlier: Version | None = None


class ProtectVersion(Message, frozen=True, kw_only=True, tag=True):
    """Have the node's vault make P or Q of ``version`` for these groups; the answer is ``VersionProtected``. ``keep``:
    versions whose parity stays. Repeated until it is answered, as ``SpillVersion``."""

    job: JobId
    generation: GenerationNumber
    version: Version
    groups: tuple[ParityGroup, ...]
    keep: tuple[Version, ...] = ()


class RunProbe(Message, frozen=True, kw_only=True, tag=True):
    """Take part in a probe.

    A probe of kind all_reduce has two or more ``nodes``, other kinds one: the node itself. The first of ``nodes`` hosts
    the store at ``store``; with port 0 the host chooses the port and announces it. ``sizes``: bytes of an all-reduce.
    An all_reduce of one node is a compute probe, as before kinds existed.
    """

    probe: str
    nodes: tuple[NodeId, ...]
    store: Address
    backend: str = "gloo"
    sizes: tuple[int, ...] = (8, 4096, 65536, 1 << 20, 16 << 20, 64 << 20)
    repeats: int = 5
    timeout_s: float = 30.0
    trace: TraceId = ""
    kind: ProbeKind = ProbeKind.ALL_REDUCE


MAX_NVML_PAUSE_S = 3600.0
"""Longest time in seconds for which an agent closes NVML: a lost controller must not blind a node."""


class PauseNvml(Message, frozen=True, kw_only=True, tag=True):
    """Close NVML for ``seconds`` from now, since an open handle blocks the reset of a GPU; 0 opens it again. Sent only
    to agents whose ``Register`` says that they take it: earlier ones cannot read it."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=MAX_NVML_PAUSE_S)]


AnyDirective = NewGeneration | KillRank | StopJob | VersionNotice | SpillVersion | ProtectVersion | RunProbe | PauseNvml


class Directive(Message, frozen=True, kw_only=True):
    """A directive with its place in the node's queue."""

    seq: int
    body: AnyDirective
