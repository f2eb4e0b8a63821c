"""What is gathered from reports for people to read; no decision rests on it.

The core counts who resumed and who passed a probe. Here the rest of what those reports say is kept: the phases of a
recovery, the figures of a probe.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from controller.core.records import JobRecord
from controller.cursors import cursor_at, place_of
from everstep.errors import NotFound
from everstep.ids import Version
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.operator import ProbeRow, ProbeStatus, Recovery
from everstep.wire.v1.training import AnyReport, ProbeFinished, Resumed

PROBES_KEPT = 256


class _Resuming(msgspec.Struct):
    """What the ranks of a generation said of their way back."""

    restored: Version | None = None
    ranks: set[int] = msgspec.field(default_factory=set)
    phases_s: dict[str, float] = msgspec.field(default_factory=dict)


class Recoveries:
    """How each generation came to step.

    Args:
        jobs: as they were stored: what came to step in an earlier life is not told again.
    """

    def __init__(self, jobs: Iterable[JobRecord] = ()) -> None:
        self._resuming: dict[tuple[str, int], _Resuming] = {}
        self._told: dict[str, int] = {
            job.job: job.generation.number for job in jobs if job.generation is not None and job.resumed_at is not None
        }

    def resumed(self, report: Resumed) -> None:
        """A rank's first step in a generation."""
        heard = self._resuming.setdefault((report.job, report.generation), _Resuming())
        heard.ranks.add(report.rank)
        heard.restored = report.restored if heard.restored is None else heard.restored
        for phase, seconds in report.phases_s.items():
            heard.phases_s[phase] = max(seconds, heard.phases_s.get(phase, 0.0))

    def forget(self, job: str) -> None:
        """The job is known no more."""
        self._told.pop(job, None)
        self._resuming = {key: heard for key, heard in self._resuming.items() if key[0] != job}

    def current(self, job: JobRecord) -> Recovery | None:
        """The newest generation's recovery, as far as it has come."""
        spec = job.generation
        if spec is None:
            return None
        heard = self._resuming.get((job.job, spec.number), _Resuming())
        return Recovery(
            generation=spec.number,
            reason=spec.reason,
            sentence=spec.sentence,
            trace=spec.trace,
            decided_at=job.opened_at,
            seconds=None if job.resumed_at is None else max(0.0, job.resumed_at - job.opened_at),
            restored=heard.restored,
            resumed=len(heard.ranks),
            world_size=spec.world_size,
            phases_s=dict(heard.phases_s),
        )

    def finished(self, job: JobRecord) -> Recovery | None:
        """The recovery that has just ended with this change of the job; each is returned once."""
        spec = job.generation
        if spec is None or job.resumed_at is None or self._told.get(job.job) == spec.number:
            return None
        recovery = self.current(job)
        self._told[job.job] = spec.number
        self._resuming = {key: heard for key, heard in self._resuming.items() if key[0] != job.job}
        return recovery


class Probes:
    """The newest probes and what their members measured; forgotten at a restart."""

    def __init__(self) -> None:
        self._probes: dict[str, ProbeStatus] = {}
        self._answers: dict[str, dict[str, ProbeFinished]] = {}

    def started(self, probe: RunProbe, now: float) -> None:
        """A node was told to take part."""
        if probe.probe in self._probes:
            return
        self._probes[probe.probe] = ProbeStatus(probe=probe.probe, nodes=probe.nodes, started_at=now, trace=probe.trace)
        self._answers[probe.probe] = {}
        while len(self._probes) > PROBES_KEPT:
            oldest = next(iter(self._probes))
            del self._probes[oldest], self._answers[oldest]

    def answered(self, node: str, report: ProbeFinished) -> None:
        """A member's result."""
        status = self._probes.get(report.probe)
        if status is None or node not in status.nodes:  # a node speaks of its own part only
            return
        answers = self._answers[report.probe]
        answers[node] = report
        complete = set(status.nodes) <= set(answers)
        failed = any(not answer.ok for answer in answers.values())
        self._probes[report.probe] = msgspec.structs.replace(
            status,
            ok=False if failed else True if complete else None,
            answers={member: answer.detail or ("ok" if answer.ok else "failed") for member, answer in answers.items()},
            rows=_slowest(answers.values()),
        )

    def newest(self) -> tuple[ProbeStatus, ...]:
        """Newest first."""
        return tuple(reversed(self._probes.values()))

    def page(self, node: str, cursor: str, limit: int) -> tuple[tuple[ProbeStatus, ...], str]:
        """Probes that ``node`` (empty: any) takes part in, newest first, from after ``cursor`` on; and the cursor of
        the page after. Raises MalformedMessage for a cursor that nobody was given."""
        place = place_of(cursor, (int,))
        found = [
            status
            for status in self.newest()
            if (not node or node in status.nodes) and (place is None or _number(status.probe) < place[0])
        ]
        more = len(found) > limit
        return tuple(found[:limit]), cursor_at([_number(found[limit - 1].probe)]) if more else ""

    def get(self, probe: str) -> ProbeStatus:
        """Raises NotFound."""
        status = self._probes.get(probe)
        if status is None:
            raise NotFound(f"no probe {probe!r}: the newest {PROBES_KEPT} since the controller's start are kept")
        return status


def _number(probe: str) -> int:
    """The fleet counts its probes."""
    return int(probe.rpartition("-")[2])


def _slowest(answers: Iterable[ProbeFinished]) -> tuple[ProbeRow, ...]:
    """Per size, the longest latency and the lowest bandwidth that a member saw."""
    rows: dict[int, ProbeRow] = {}
    for answer in answers:
        for size, latency_s, bandwidth in answer.rows:
            other = rows.get(size)
            rows[size] = ProbeRow(
                bytes=size,
                latency_s=max(latency_s, other.latency_s) if other else latency_s,
                bandwidth_bytes_per_s=min(bandwidth, other.bandwidth_bytes_per_s) if other else bandwidth,
            )
    return tuple(rows[size] for size in sorted(rows))


class Boards:
    """Both boards, fed from the same reports."""

    def __init__(self, jobs: Iterable[JobRecord] = ()) -> None:
        self.recoveries = Recoveries(jobs)
        self.probes = Probes()

    def report(self, node: str, body: AnyReport) -> None:
        """A report that the core has taken."""
        if isinstance(body, Resumed):
            self.recoveries.resumed(body)
        elif isinstance(body, ProbeFinished):
            self.probes.answered(node, body)
