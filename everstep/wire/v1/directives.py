"""What the controller asks of a node. Delivered in order, at least once; a node skips what it has already seen."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import Address, GenerationNumber, Incarnation, JobId, NodeId, NonNegativeInt, Rank, TraceId, Version
from everstep.vocabulary import ProbeKind
from everstep.wire.v1.base import Message, ShortText
from everstep.wire.v1.training import GenerationSpec
from everstep.wire.v1.vault_orders import ParityGroup


class NewGeneration(Message, frozen=True, kw_only=True, tag=True):
    """Enter this generation; whoever of the node is not in its roster parks as a spare."""

    spec: GenerationSpec


class KillRank(Message, frozen=True, kw_only=True, tag=True):
    """End a rank's process with SIGKILL: it hangs, or must not go on."""

    job: JobId
    generation: GenerationNumber
    rank: Rank
    local_rank: int
    reason: ShortText
    trace: TraceId = ""


class StopJob(Message, frozen=True, kw_only=True, tag=True):
    """The job is over. ``ok`` is what launchers exit by; ``reason`` what they print.

    ``launcher``: the one that is meant. A later one of the node begins the job anew; 0: whichever is there.
    """

    job: JobId
    ok: bool
    reason: ShortText
    launcher: Incarnation = 0

    def applies_to(self, launcher: int) -> bool:
        """Whether it is said to that launcher."""
        return not self.launcher or launcher <= self.launcher


class VersionNotice(Message, frozen=True, kw_only=True, tag=True):
    """What a job's ranks keep: the newest committed version, and the one to come that may be committed next.

    ``candidate`` is a step of ``generation`` that no rank has finished yet. Its version is kept by every rank that
    hears of it in time, and so told in ``Sealed.kept``; a version that all of them keep is committed. ``pinned``:
    versions to be kept besides, where there is a slot for them: somebody is still reading them.
    """

    job: JobId
    generation: GenerationNumber
    committed: Version | None
    candidate: int | None
    pinned: tuple[Version, ...] = ()


class SpillVersion(Message, frozen=True, kw_only=True, tag=True):
    """Have the node's vault write its part of ``version`` to storage; the answer is ``VersionSpilled``.

    ``writers``, ``keep`` as in ``local.Spill``. Said again until it is answered: the same order while it is carried out
    is passed over. ``url`` has no credentials; the vault has its own.
    """

    job: JobId
    generation: GenerationNumber
    version: Version
    url: Annotated[str, msgspec.Meta(max_length=2048)]
    writers: dict[NodeId, tuple[Rank, ...]]
    keep_last: Annotated[int, msgspec.Meta(ge=0)] = 0
    attempt: NonNegativeInt = 0


class ProtectVersion(Message, frozen=True, kw_only=True, tag=True):
    """Have the node's vault make P or Q of ``version`` for these groups; the answer is ``VersionProtected``.

    ``keep``: versions whose parity stays. Said again until it is answered, as ``SpillVersion``.
    """

    job: JobId
    generation: GenerationNumber
    version: Version
    groups: tuple[ParityGroup, ...]
    keep: tuple[Version, ...] = ()


class RunProbe(Message, frozen=True, kw_only=True, tag=True):
    """Take part in a probe. ``kind`` all_reduce has two or more ``nodes``, the other kinds one: the node itself.

    The first of ``nodes`` hosts the store at ``store``, which names its host with port 0 when the host is to choose
    and announce it. ``sizes`` in bytes, of an all-reduce. An all_reduce of one node is a compute probe, as it was
    before there were kinds.
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


AnyDirective = NewGeneration | KillRank | StopJob | VersionNotice | SpillVersion | ProtectVersion | RunProbe


class Directive(Message, frozen=True, kw_only=True):
    """A directive with its place in the node's queue."""

    seq: int
    body: AnyDirective
