"""Settings from environment variables: a misspelt one is told, not passed over."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_SERVICE_LINK = re.compile(
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""What Kubernetes puts into every pod beside a service that has the prefix for its name."""


def unknown(names: Iterable[str], prefix: str, known: Collection[str], others: Collection[str] = ()) -> list[str]:
    """The variables that begin with ``prefix`` and are no setting: neither ``known`` nor, under the same prefix, of
    ``others``. All three are whole names."""
    ours = (name for name in names if name.startswith(prefix) and name not in known and name not in others)
    return sorted(name for name in ours if _SERVICE_LINK.fullmatch(name.removeprefix(prefix)) is None)
