"""What every message of version 1 shares."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message: immutable, by keyword only, and refused when it has a field we do not know."""
