"""Numbers and states as people say them."""

from __future__ import annotations

from rich.text import Text

from everstep.vocabulary import Decision, JobState, NodeState, Severity

STYLES: dict[str, str] = {
    NodeState.HEALTHY: "green",
    NodeState.SUSPECT: "yellow",
    NodeState.LOST: "bold red",
    NodeState.QUARANTINED: "red",
    NodeState.PROBATION: "cyan",
    NodeState.HELD: "magenta",
    NodeState.REPAIR: "red",
    "outbreak": "bold red",
    JobState.FORMING: "cyan",
    JobState.RUNNING: "green",
    JobState.PAUSED: "yellow",
    JobState.FINISHED: "blue",
    JobState.FAILED: "bold red",
    Severity.INFO: "dim",
    Severity.WARNING: "yellow",
    Severity.CRITICAL: "bold red",
    Decision.EVICT: "bold red",
    Decision.HOLD_BY_BUDGET: "yellow",
    Decision.RESTART: "yellow",
    Decision.READMIT: "green",
}


def state(value: str) -> Text:
    """A state in its colour."""
    return Text(str(value), style=STYLES.get(value, ""))


def age(seconds: float) -> str:
    """How long ago, in the two largest units: ``8 s``, ``3 min``, ``2 h 10 min``, ``5 d 3 h``."""
    total = max(0, int(seconds))
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min"
    if total < 86400:
        return f"{total // 3600} h {total % 3600 // 60} min"
    return f"{total // 86400} d {total % 86400 // 3600} h"


def duration(seconds: float) -> str:
    """A span: ``830 us``, ``12.3 ms``, ``1.24 s``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
