"""Describe each recovery as spans, from the first signal to the last rank's first step, out of the event log alone.

Times of the signal and the decision are the log's. The phases come from the slowest rank and are laid end to end before
the moment at which all ranks had resumed; what is left after the decision is the time that directives took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import msgspec

from everstep.vocabulary import RECOVERY_STAGES, GenerationReason
from everstep_controller.store.rows import EventLogRow

MAX_TRACES = 512  # remembered until their recovery ends; the oldest are forgotten
MAX_ROWS = 32  # first rows of the event log that are remembered of a trace; of an outbreak, the first say enough


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a recovery. Times are wall seconds."""

    name: str
    start: float
    end: float
    attributes: dict[str, str | int | float]


class RecoverySpans(msgspec.Struct, frozen=True, kw_only=True):
    """A whole recovery and its parts, in order and without gaps."""

    trace: str
    whole: Span
    parts: tuple[Span, ...]


class RecoverySpanBuilder:
    """Follows the event log, and calls ``emit`` once for each recovery that ends.

    A recovery whose beginning an earlier controller recorded begins with the decision.
    """

    def __init__(self, emit: Callable[[RecoverySpans], None]) -> None:
        self._emit = emit
        self._rows: dict[str, list[EventLogRow]] = {}

    def record(self, rows: Iterable[EventLogRow]) -> None:
        """Record committed rows, in order."""
        for row in rows:
            if not row.trace:
                continue
            before = self._rows.setdefault(row.trace, [])
            if row.kind == "resumed":
                recovery = build_spans(before, row)
                if recovery is not None:
                    self._emit(recovery)
            elif len(before) < MAX_ROWS or row.kind == "generation":
                before.append(row)
            while len(self._rows) > MAX_TRACES:
                del self._rows[next(iter(self._rows))]


def build_spans(before: list[EventLogRow], resumed: EventLogRow) -> RecoverySpans | None:
    """Return the recovery that the row ``resumed`` ends, or None if that was a run's first start.

    ``before``: earlier rows of the same trace, in order.
    """
    detail, place = _detail(resumed), (resumed.job, resumed.generation)
    decisions = (row for row in reversed(before) if row.kind == "generation" and (row.job, row.generation) == place)
    decision = next(decisions, None)
    reason = "" if decision is None else _detail(decision).get("reason", "")
    if reason == GenerationReason.FORMED or (resumed.generation or 0) <= 1 or "took_s" not in detail:
        return None
    decided_at = decision.at if decision is not None else resumed.at - float(detail["took_s"])
    signals = [row for row in before if row.kind != "generation" and row.at <= decided_at]
    heard_at = min((row.at for row in signals), default=decided_at)
    seen = (float(_detail(row).get("seen_at", row.at)) for row in signals)
    began_at = min([heard_at, *seen])
    attributes = _attributes(resumed, reason, signals, detail)
    edges = [
        ("signal", began_at),
        ("decision", heard_at),
        ("directives", decided_at),
        *_stages(detail, decided_at, resumed.at),
        ("", resumed.at),
    ]
    parts = tuple(
        Span(name=name, start=start, end=end, attributes=attributes | _own_attributes(name, decision, detail))
        for (name, start), (_, end) in pairwise(edges)
    )
    whole = Span(name="recovery", start=began_at, end=resumed.at, attributes=attributes)
    return RecoverySpans(trace=resumed.trace, whole=whole, parts=parts)


def _stages(detail: dict[str, str], decided_at: float, resumed_at: float) -> Iterator[tuple[str, float]]:
    """Yield the start of each stage. Phases that are longer than the recovery, by other clocks, are shortened."""
    seconds = {
        name: sum(float(detail.get(f"{phase}_s", 0.0)) for phase in phases) for name, phases in RECOVERY_STAGES.items()
    }
    total, room = sum(seconds.values()), max(0.0, resumed_at - decided_at)
    scale = min(1.0, room / total) if total else 0.0
    start = resumed_at - scale * total
    for name, spent in seconds.items():
        yield name, start
        start += scale * spent


def _attributes(
    resumed: EventLogRow, reason: str, signals: list[EventLogRow], detail: dict[str, str]
) -> dict[str, str | int | float]:
    details = [_detail(row) for row in signals]
    found: dict[str, str | int | float] = {
        "everstep.trace": resumed.trace,
        "everstep.run": resumed.job,
        "everstep.generation": resumed.generation or 0,
        "everstep.reason": reason,
        "everstep.node": next((row.node for row in signals if row.node), ""),
        "everstep.rule": next((verdict_detail["rule"] for verdict_detail in details if verdict_detail.get("rule")), ""),
        "everstep.verdict": next(
            (verdict_detail["verdict"] for verdict_detail in details if verdict_detail.get("verdict")), ""
        ),
        "everstep.version": detail.get("restored", ""),
    }
    return {name: value for name, value in found.items() if value != ""}


def _own_attributes(name: str, decision: EventLogRow | None, detail: dict[str, str]) -> dict[str, str | int | float]:
    if name == "decision" and decision is not None:
        return {"everstep.sentence": decision.sentence}
    slowest = {"everstep.slowest_rank": detail.get("slowest_rank", "")} if name in RECOVERY_STAGES else {}
    phases = {
        f"everstep.phase.{phase}_s": float(detail.get(f"{phase}_s", 0.0)) for phase in RECOVERY_STAGES.get(name, ())
    }
    return {**slowest, **phases}


def _detail(row: EventLogRow) -> dict[str, str]:
    return msgspec.json.decode(row.detail, type=dict[str, str])
