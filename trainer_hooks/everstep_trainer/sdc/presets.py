"""Define how thoroughly a run audits its own work: presets, the share of a step that each audit may take, intervals."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.vocabulary import AuditKind
from everstep.wire.v1.training import SdcPreset

MAX_INTERVAL = 1024
"""Most steps between two audits of a kind, however little it may cost."""


class AuditOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The switch and the rate of one kind of audit."""

    share: float = 0.0
    """Largest share of the step time that the audit may take; 0 switches it off. The interval follows from it and
    from the measured cost of an audit."""
    interval: int | None = None
    """Fixed number of steps from one audit to the next; None: chosen by ``share``."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"the share of a step is {self.share}: give a number from 0 (off) to 1")
        if self.interval is not None and not 1 <= self.interval <= MAX_INTERVAL:
            raise ValueError(f"the interval of audits is {self.interval}: give 1 to {MAX_INTERVAL} steps")

    @property
    def is_on(self) -> bool:
        return self.share > 0.0 or self.interval is not None


OFF = AuditOptions()

# The shares of a preset add up to the work of its audits: 0.55, 1.4 and 20 % of a step. A step was seen to take about
# as much again, so that the presets cost 1, 3 and 30 % at most (bench/sdc_overhead). GRADIENT_NORM reads the gradients
# once, which its share allows every few steps. CHECKPOINT runs beside training, so it does not count; nor do UPDATE and
# STATE, which are for sharded state alone.
PRESETS: Mapping[SdcPreset, Mapping[AuditKind, AuditOptions]] = {
    "off": {},
    "light": {
        AuditKind.GRADIENT_NORM: AuditOptions(share=0.0015),
        AuditKind.GRADIENT_BUFFER: AuditOptions(share=0.001),
        AuditKind.PEER_REPLAY: AuditOptions(share=0.003),
    },
    "standard": {
        AuditKind.MATMUL: AuditOptions(share=0.003),
        AuditKind.GRADIENT_NORM: AuditOptions(share=0.002),
        AuditKind.GRADIENT_BUFFER: AuditOptions(share=0.002),
        AuditKind.COLLECTIVE: AuditOptions(share=0.001),
        AuditKind.PEER_REPLAY: AuditOptions(share=0.006),
        AuditKind.UPDATE: AuditOptions(share=0.0015),
        AuditKind.STATE: AuditOptions(share=0.001),
        AuditKind.CHECKPOINT: AuditOptions(share=0.001),
    },
    "paranoid": {
        AuditKind.MATMUL: AuditOptions(share=0.05),
        AuditKind.GRADIENT_NORM: AuditOptions(share=0.01),
        AuditKind.GRADIENT_BUFFER: AuditOptions(share=0.02),
        AuditKind.COLLECTIVE: AuditOptions(share=0.01),
        AuditKind.PEER_REPLAY: AuditOptions(share=0.08),
        AuditKind.UPDATE: AuditOptions(share=0.01),
        AuditKind.STATE: AuditOptions(share=0.02),
        AuditKind.CHECKPOINT: AuditOptions(share=0.01),
    },
}


OF_SHARDS = frozenset({AuditKind.UPDATE, AuditKind.STATE})
"""Audits of state that a preset turns on only where no other rank holds the same: replicas are compared in each version
anyhow."""


def audit_options(
    preset: SdcPreset,
    audits: Mapping[str, AuditOptions | Mapping[str, float] | None] | None = None,
    *,
    is_sharded: bool = True,
) -> dict[AuditKind, AuditOptions]:
    """Return the options of each kind of audit that is on.

    Args:
        preset: The preset to begin with.
        audits: Changes to it by the kind's name, such as ``{"peer_replay": {"interval": 10}, "matmul": None}``.
        is_sharded: Some tracked state is held by one rank alone.

    Raises:
        ValueError: There is no such preset or audit, or a value is out of range.
    """
    if preset not in PRESETS:
        raise ValueError(f"sdc is {preset!r}: choose one of {', '.join(PRESETS)}")
    chosen = {kind: options for kind, options in PRESETS[preset].items() if is_sharded or kind not in OF_SHARDS}
    for name, change in (audits or {}).items():
        try:
            kind = AuditKind(name)
        except ValueError:
            raise ValueError(f"there is no audit {name!r}: choose from {', '.join(AuditKind)}") from None
        if isinstance(change, Mapping):
            unknown = set(change) - {"share", "interval"}
            if unknown:
                raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}: give share or interval")
            interval = change.get("interval")
            change = AuditOptions(
                share=float(change.get("share", 0.0)), interval=None if interval is None else int(interval)
            )
        chosen[kind] = change or OFF
    return {kind: options for kind, options in chosen.items() if options.is_on}
