"""How long parity is. Apart from the arithmetic, so that a vault loads numpy only once it makes parity or reads it."""

from __future__ import annotations

STRIPE_BYTES = 256 << 10
"""Part of the format of parity: where a byte lies in its stripe is which bit of which element it is."""

MOST_MEMBERS = 255
"""g has order 255; the 256th member's coefficient would be the first one's again."""


def parity_bytes(longest: int) -> int:
    """Bytes of P, and of Q, for members of at most ``longest`` bytes: a whole number of stripes."""
    return -(-longest // STRIPE_BYTES) * STRIPE_BYTES
