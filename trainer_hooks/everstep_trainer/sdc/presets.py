"""Define how thoroughly a run audits its own work: presets, the share of a step that each link may take, intervals."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everstep.vocabulary import AuditLink
from everstep.wire.v1.training import SdcPreset

MAX_INTERVAL = 1024
"""Most steps between two audits of a link, however little it may cost."""


class LinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The switch and the rate of one link."""

    share: float = 0.0
    """Largest share of the step time that the link may take; 0 switches the link off. The interval follows from it and
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


OFF = LinkOptions()

# The shares of a preset add up to the work of its audits: 0.55, 1.4 and 20 % of a step. A step was seen to take about
# as much again, so that the presets cost 1, 3 and 30 % at most (bench/sdc_overhead). GRADIENT_NORM reads the gradients
# once, which its share allows every few steps. CHECKPOINT runs beside training, so it does not count; nor do UPDATE and
# STATE, which are for sharded state alone.
PRESETS: Mapping[SdcPreset, Mapping[AuditLink, LinkOptions]] = {
    "off": {},
    "light": {
        AuditLink.GRADIENT_NORM: LinkOptions(share=0.0015),
        AuditLink.GRADIENT_BUFFER: LinkOptions(share=0.001),
        AuditLink.PEER_REPLAY: LinkOptions(share=0.003),
    },
    "standard": {
        AuditLink.MATMUL: LinkOptions(share=0.003),
        AuditLink.GRADIENT_NORM: LinkOptions(share=0.002),
        AuditLink.GRADIENT_BUFFER: LinkOptions(share=0.002),
        AuditLink.COLLECTIVE: LinkOptions(share=0.001),
        AuditLink.PEER_REPLAY: LinkOptions(share=0.006),
        AuditLink.UPDATE: LinkOptions(share=0.0015),
        AuditLink.STATE: LinkOptions(share=0.001),
        AuditLink.CHECKPOINT: LinkOptions(share=0.001),
    },
    "paranoid": {
        AuditLink.MATMUL: LinkOptions(share=0.05),
        AuditLink.GRADIENT_NORM: LinkOptions(share=0.01),
        AuditLink.GRADIENT_BUFFER: LinkOptions(share=0.02),
        AuditLink.COLLECTIVE: LinkOptions(share=0.01),
        AuditLink.PEER_REPLAY: LinkOptions(share=0.08),
        AuditLink.UPDATE: LinkOptions(share=0.01),
        AuditLink.STATE: LinkOptions(share=0.02),
        AuditLink.CHECKPOINT: LinkOptions(share=0.01),
    },
}


OF_SHARDS = frozenset({AuditLink.UPDATE, AuditLink.STATE})
"""Audits of state that a preset turns on only where no other rank holds the same: replicas are compared in each version
anyhow."""


KNOWN = tuple(link for link in AuditLink if link is not AuditLink.RECOMPUTE)
"""The audits that there are."""


def link_options(
    preset: SdcPreset,
    links: Mapping[str, LinkOptions | Mapping[str, float] | None] | None = None,
    *,
    is_sharded: bool = True,
) -> dict[AuditLink, LinkOptions]:
    """Return the options of each link that is on.

    Args:
        preset: The preset to begin with.
        links: Changes to it by the link's name, such as ``{"peer_replay": {"interval": 10}, "matmul": None}``.
        is_sharded: Some tracked state is held by one rank alone.

    Raises:
        ValueError: There is no such preset or link, or a value is out of range.
    """
    if preset not in PRESETS:
        raise ValueError(f"sdc is {preset!r}: choose one of {', '.join(PRESETS)}")
    chosen = {link: one for link, one in PRESETS[preset].items() if is_sharded or link not in OF_SHARDS}
    for name, change in (links or {}).items():
        try:
            link = AuditLink(name)
        except ValueError:
            raise ValueError(f"there is no audit link {name!r}: choose from {', '.join(KNOWN)}") from None
        if link is AuditLink.RECOMPUTE:
            if change is not None:
                raise ValueError(
                    "the audit recompute is no more, since it found nothing that others missed: leave it out"
                )
            continue
        if isinstance(change, Mapping):
            unknown = set(change) - {"share", "interval"}
            if unknown:
                raise ValueError(f"{name} has no option {', '.join(sorted(unknown))}: give share or interval")
            interval = change.get("interval")
            change = LinkOptions(
                share=float(change.get("share", 0.0)), interval=None if interval is None else int(interval)
            )
        chosen[link] = change or OFF
    return {link: options for link, options in chosen.items() if options.is_on}
